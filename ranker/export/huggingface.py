"""Cross-encoders as Hugging Face sequence classification models, or as an encoder with its head in a file beside it."""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

from ranker.encoders.encoder import Encoder
from ranker.encoders.execution import Execution
from ranker.encoders.family import families, family_of
from ranker.encoders.fit import check_config, check_tokens
from ranker.encoders.loading import load_encoder
from ranker.encoders.model_folder import check_model_folder
from ranker.errors import CheckpointError
from ranker.export._modules import has_modules, is_stanford, linear_of

log = logging.getLogger(__name__)

SCORER = "ranker.models.monobert.MonoBERT"
SCALE = 2.0**-12  # of the dense layer that `write` puts into a classifier whose model has none
HEAD_FILE = "head.safetensors"
# keys of older checkpoints that may be ignored: a constant, and a layer that RoBERTa's classifier never reads
UNUSED = ("position_ids", "pooler.dense.weight", "pooler.dense.bias")


def recognises(folder: Path) -> bool:
    """Whether a folder holds a single transformers model, a reranker or not; `read` refuses one without a head."""
    return (folder / "config.json").is_file() and not has_modules(folder) and not is_stanford(folder)


@dataclass
class Classifier:
    """A cross-encoder: encoder, pooling, perhaps dense and tanh, dropout, linear head.

    Args:
        encoder: The encoder.
        pooling: `cls`, `mean` or `max`.
        dense: The linear layer before tanh; None: neither.
        head: The output layer, with 1 or 2 outputs.
        dropout: Dropout rate before the head.
    """

    encoder: Encoder
    pooling: str
    dense: nn.Linear | None
    head: nn.Linear
    dropout: float


def write(folder: Path, model: Classifier, max_tokens: int) -> None:
    """Write config.json, model.safetensors and the tokenizer: a sequence classification model, if one fits.

    transformers' BERT and RoBERTa classifiers have a dense layer and tanh between the first token and the logits. A
    model without them is written with the dense layer `2^-12 I`, and its head is multiplied by `2^12`: for such small
    inputs tanh is the identity up to 1e-7, and powers of two scale without rounding. So other programs give the same
    scores, and `read` returns the same weights. For other families and poolings the encoder is written alone, and the
    head goes to `head.safetensors`, which only `read` knows.

    A tokenizer's files hold the maximum length of a pair, not those of query and doc. Other programs shorten the longer
    text first. So they give the same scores for the pairs that `ranker.data.pair_cuts` says are cut alike.

    Args:
        folder: Where to write.
        model: The model.
        max_tokens: Longest pair, special tokens included; stored with the tokenizer.
    """
    tokenizer = copy.deepcopy(model.encoder.tokenizer)
    tokenizer.model_max_length = max_tokens
    tokenizer.save_pretrained(folder)
    classifier = _classifier(model)
    if classifier is not None:
        classifier.save_pretrained(folder)
        return
    log.warning(
        "model/: %s with %s pooling has no such classifier in transformers; the head is in head.safetensors",
        model.encoder.config.model_type,
        model.pooling,
    )
    model.encoder.model.save_pretrained(folder)
    layers = {"head": model.head, **({} if model.dense is None else {"pooler.0": model.dense})}
    state = {f"{name}.{key}": value for name, layer in layers.items() for key, value in layer.state_dict().items()}
    metadata = {"pooling": model.pooling, "dropout": str(model.dropout)}
    save_file({key: value.contiguous() for key, value in state.items()}, folder / HEAD_FILE, metadata=metadata)


def _classifier(model: Classifier) -> PreTrainedModel | None:
    """Return the same model as a sequence classification model; None if the family has none that fits."""
    config = copy.deepcopy(model.encoder.config)
    config.num_labels = model.head.out_features
    config.classifier_dropout = model.dropout
    config.architectures = None
    if model.head.out_features == 1:
        # sentence-transformers would otherwise put a sigmoid on the logit
        config.sentence_transformers = {"activation_fn": "torch.nn.modules.linear.Identity"}
    if model.pooling != "cls" or family_of(config).classifier is None:
        return None
    classifier = AutoModelForSequenceClassification.from_config(config)
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
    """Read a folder that `write` wrote, or a sequence classification model with 1 or 2 labels.

    The family must have a `Classifier` in `ranker.encoders.families`.

    Raises:
        CheckpointError: The folder has no trained head, or one of another size; a weight is missing, or one is there
            that the model does not have.
    """
    if (folder / HEAD_FILE).is_file():
        return _read_apart(folder, execution)
    check_model_folder(folder)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    check_config(config, str(folder))
    if not any("ForSequenceClassification" in name for name in config.architectures or []):
        raise CheckpointError(
            f"{folder}: expected a trained reranker (a sequence classification model), got {config.architectures}; "
            "its head would be random: train it first with encoder.name=..."
        )
    if family_of(config).classifier is None:
        supported = sorted(name for name, family in families().items() if family.classifier)
        raise CheckpointError(
            f"{folder}: expected a classifier of one of {', '.join(supported)}, got {config.model_type!r}"
        )
    if config.num_labels not in (1, 2):
        raise CheckpointError(
            f"{folder}: expected a head of 1 or 2 labels, got {config.num_labels}; "
            "train a new one with encoder.name=..."
        )
    model, info = AutoModelForSequenceClassification.from_pretrained(
        folder, output_loading_info=True, dtype=torch.float32, trust_remote_code=False
    )
    if info["missing_keys"]:
        raise CheckpointError(f"{folder}: expected all weights, {', '.join(sorted(info['missing_keys']))} are missing")
    unknown = sorted(key for key in info["unexpected_keys"] if not key.endswith(UNUSED))
    if unknown:
        raise CheckpointError(
            f"{folder}: expected the weights that its config.json describes, got {', '.join(unknown)} as well"
        )
    dense, head = _layers_of(model)
    base = model.base_model
    if getattr(base, "pooler", None) is not None:
        base.pooler = None
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    encoder = Encoder(base, tokenizer, execution)
    check_tokens(encoder)
    dropout = getattr(config, "classifier_dropout", None) or 0.0
    if not torch.equal(dense.weight, torch.eye(config.hidden_size) * SCALE):
        return Classifier(encoder, "cls", dense, head, dropout)
    return Classifier(encoder, "cls", None, linear_of(head.weight * SCALE, head.bias), dropout)


def _read_apart(folder: Path, execution: Execution) -> Classifier:
    """Read an encoder and the head beside it."""
    with safe_open(folder / HEAD_FILE, "pt") as stored:
        metadata, state = stored.metadata(), {key: stored.get_tensor(key) for key in stored.keys()}  # noqa: SIM118
    has_dense = "pooler.0.weight" in state
    return Classifier(
        load_encoder(str(folder), **vars(execution)),
        metadata["pooling"],
        linear_of(state["pooler.0.weight"], state["pooler.0.bias"]) if has_dense else None,
        linear_of(state["head.weight"], state["head.bias"]),
        float(metadata.get("dropout", 0)),
    )


def _layers_of(model: Any) -> tuple[nn.Linear, nn.Linear]:
    """Return the dense layer before tanh and the output layer, see `ranker.encoders.family.Classifier`."""
    classifier = family_of(model.config).classifier
    assert classifier is not None
    dense: Any = model.get_submodule(classifier.dense)
    output: Any = model.get_submodule(classifier.output)
    return dense, output
