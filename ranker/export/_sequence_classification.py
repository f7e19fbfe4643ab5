"""Cross-encoders as sequence classification models of transformers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
)

from ranker.encoders import text_model
from ranker.encoders.classifier import Classifier
from ranker.encoders.encoder import Encoder
from ranker.encoders.execution import Execution
from ranker.encoders.family import family_of
from ranker.encoders.fit import check_config, check_tokens
from ranker.encoders.loading import load_encoder
from ranker.encoders.model_folder import check_model_folder
from ranker.encoders.native_head import NativeHead, has_native_head
from ranker.encoders.pruned_heads import removed_heads, with_fewer_heads
from ranker.errors import CheckpointError
from ranker.export._module_weights import linear_of, write_tokenizer

SCALE = 2.0**-12  # of the dense layer that `write` puts into a classifier whose model has none
HEAD_FILE = "head.safetensors"
IDENTITY = "torch.nn.modules.linear.Identity"
# keys of older checkpoints that may be ignored: a constant, and a layer that RoBERTa's classifier never reads
UNUSED = ("position_ids", "pooler.dense.weight", "pooler.dense.bias")


def write(folder: Path, model: Classifier, max_tokens: int) -> bool:
    """Write config.json, model.safetensors and the tokenizer. If no model fits, write nothing and return False.

    transformers' BERT and RoBERTa classifiers have a dense layer and tanh between the first token and the logits. A
    model without them is written with the dense layer `2^-12 I`, and its head is multiplied by `2^12`: for such small
    inputs tanh is the identity up to 1e-7, and powers of two scale without rounding. So other programs give the same
    scores, and `read` returns the same weights.

    A tokenizer's files have the maximum length of a pair, but not those of query and doc, and other programs shorten
    the longer text first. So they give the same scores only for pairs that `ranker.data.pair_cuts` describes.

    Args:
        folder: Where to write.
        model: The model.
        max_tokens: Longest pair, special tokens included; stored with the tokenizer.
    """
    if not fits(model):
        return False
    if isinstance(model.head, NativeHead):
        describe(model.head.whole.config, model.head.whole.config.num_labels)
        model.head.save(folder, model.encoder)
    else:
        _classifier(model).save_pretrained(folder)
    # XLNet's classifier reads the last column, padding or not
    write_tokenizer(folder, model.encoder, max_tokens, pads_right=model.encoder.config.model_type != "xlnet")
    return True


def fits(model: Classifier) -> bool:
    """Whether transformers has a sequence classification model that computes the same scores, see `write`."""
    if isinstance(model.head, NativeHead):
        return True
    return model.pooling == "cls" and family_of(model.encoder.config).classifier is not None


def describe(config: PretrainedConfig, num_labels: int) -> None:
    """Set the labels of a ranker's classifier in its configuration."""
    config.num_labels = num_labels
    if num_labels == 2:  # transformers does not store its default names, and BART's configuration then has 3 labels
        config.id2label, config.label2id = {0: "irrelevant", 1: "relevant"}, {"irrelevant": 0, "relevant": 1}
    config.architectures = None
    # sentence-transformers would otherwise put a sigmoid on a single logit
    config.sentence_transformers = {"activation_fn": IDENTITY}


def _classifier(model: Classifier) -> PreTrainedModel:
    """Return the same model as a sequence classification model."""
    assert isinstance(model.head, nn.Linear)
    config = copy.deepcopy(model.encoder.config)
    config._attn_implementation = None
    describe(config, model.head.out_features)
    config.classifier_dropout = model.dropout
    kind = _class_of(config)
    classifier = kind(config) if removed_heads(config) else kind.from_config(config)
    dense, head = _layers_of(classifier)
    classifier.base_model.load_state_dict(model.encoder.model.state_dict(), strict=False)
    with torch.no_grad():
        if model.dense is not None:
            dense.weight.copy_(model.dense.weight)
            dense.bias.copy_(model.dense.bias)
            head.weight.copy_(model.head.weight)
        else:
            dense.weight.copy_(torch.eye(model.encoder.dim) * SCALE)
            dense.bias.zero_()
            head.weight.copy_(model.head.weight / SCALE)
        head.bias.copy_(model.head.bias)
    return classifier


def read(folder: Path, execution: Execution) -> Classifier:
    """Read a sequence classification model with 1 or 2 labels.

    Raises:
        CheckpointError: The folder has no trained head, or a head of another size; a weight is missing, or the folder
            has a weight that the model does not have.
    """
    if (folder / HEAD_FILE).is_file():
        return _read_apart(folder, execution)
    check_model_folder(folder)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=execution.trust_remote_code)
    check_config(config, str(folder))
    if not is_classifier(config):
        raise CheckpointError(
            f"{folder}: expected a trained reranker (a sequence classification model), got {config.architectures}; "
            "its head would be random: train it first with encoder.name=..."
        )
    if not has_native_head(config):
        raise CheckpointError(
            f"{folder}: expected a classifier on the states of an encoder, got {config.model_type}'s, which reads a "
            "decoder's; train a new head with encoder.name=..."
        )
    if config.num_labels not in (1, 2):
        raise CheckpointError(
            f"{folder}: expected a head of 1 or 2 labels, got {config.num_labels}; "
            "train a new one with encoder.name=..."
        )
    config.use_cache = False
    options = {} if removed_heads(config) else {"trust_remote_code": execution.trust_remote_code}
    model, info = _class_of(config).from_pretrained(
        folder, config=config, output_loading_info=True, dtype=torch.float32, **options
    )
    if info["missing_keys"]:
        raise CheckpointError(f"{folder}: expected all weights, {', '.join(sorted(info['missing_keys']))} are missing")
    unknown = sorted(key for key in info["unexpected_keys"] if not key.endswith(UNUSED))
    if unknown:
        raise CheckpointError(
            f"{folder}: expected the weights that its config.json describes, got {', '.join(unknown)} as well"
        )
    dropout = getattr(config, "classifier_dropout", None) or 0.0
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=execution.trust_remote_code)
    if family_of(config).classifier is None:
        encoder_config = AutoConfig.from_pretrained(folder, trust_remote_code=execution.trust_remote_code)
        base, _ = text_model.read(folder, encoder_config, execution.trust_remote_code)
        encoder = Encoder(base, tokenizer, execution)
        check_tokens(encoder)
        return Classifier(encoder, NativeHead(model, encoder, 0.0))
    dense, head = _layers_of(model)
    base = model.base_model
    if getattr(base, "pooler", None) is not None:
        base.pooler = None
    encoder = Encoder(base, tokenizer, execution)
    check_tokens(encoder)
    if not torch.equal(dense.weight, torch.eye(config.hidden_size) * SCALE):
        return Classifier(encoder, head, "cls", dense, dropout)
    return Classifier(encoder, linear_of(head.weight * SCALE, head.bias), "cls", None, dropout)


def _class_of(config: PretrainedConfig) -> Any:
    """Return the class that reads and builds a classifier, also if attention heads of its encoder were removed."""
    if not removed_heads(config):
        return AutoModelForSequenceClassification
    return with_fewer_heads(MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)], config)


def is_classifier(config: PretrainedConfig) -> bool:
    """Whether a configuration describes a sequence classification model, of transformers or in the folder's code."""
    own = (getattr(config, "auto_map", None) or {}).get("AutoModelForSequenceClassification")
    names = config.architectures or []
    return any("ForSequenceClassification" in name or str(own).endswith(f".{name}") for name in names)


def _read_apart(folder: Path, execution: Execution) -> Classifier:
    """Read an encoder whose head is in a separate file, as this program's first versions wrote it."""
    with safe_open(folder / HEAD_FILE, "pt") as stored:
        metadata, state = stored.metadata(), {key: stored.get_tensor(key) for key in stored.keys()}  # noqa: SIM118
    has_dense = "pooler.0.weight" in state
    return Classifier(
        load_encoder(str(folder), **vars(execution)),
        linear_of(state["head.weight"], state["head.bias"]),
        metadata["pooling"],
        linear_of(state["pooler.0.weight"], state["pooler.0.bias"]) if has_dense else None,
        float(metadata.get("dropout", 0)),
    )


def _layers_of(model: Any) -> tuple[nn.Linear, nn.Linear]:
    """Return the dense layer before tanh and the output layer, see `ranker.encoders.family.Classifier`."""
    classifier = family_of(model.config).classifier
    assert classifier is not None
    dense: Any = model.get_submodule(classifier.dense)
    output: Any = model.get_submodule(classifier.output)
    return dense, output
