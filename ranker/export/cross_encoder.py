"""Cross-encoders as sentence-transformers writes them since version 6: modules.json and a folder per module.

Four forms are read: a sequence classification model alone; Transformer, Pooling and one or two Dense modules, of which
the last gives the scores; the same with a LayerNorm between the two (the head of ModernBERT's classifier); a causal
language model with LogitScore (the logit of a word, or the difference of two logits).
"""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.activations import GELUActivation

from ranker.encoders.classifier import Classifier
from ranker.encoders.encoder import Encoder
from ranker.encoders.execution import Execution
from ranker.encoders.family import family_of
from ranker.encoders.model_folder import read_object
from ranker.encoders.native_head import TOLERANCE, NativeHead, has_native_head
from ranker.encoders.traits import common_tokens
from ranker.errors import CheckpointError
from ranker.export import _sequence_classification as sequence_classification
from ranker.export._module_weights import (
    linear_of,
    read_dense,
    read_encoder,
    read_weights,
    write_dense,
    write_encoder,
    write_norm,
)
from ranker.export._modules import (
    MODULES,
    SETTINGS,
    StoredModule,
    has_modules,
    is_cross_encoder,
    read_modules,
    write_json,
)
from ranker.export._pooling import pooling_config, read_pooling

log = logging.getLogger(__name__)

SCORER = "ranker.models.monobert.MonoBERT"
OWN_FILE = "scorer.json"  # the dropout rate, which sentence-transformers does not have
TOKENIZER, INPUTS = "tokenizer_config.json", ("input_ids", "attention_mask")
IDENTITY = "torch.nn.modules.linear.Identity"
ENLARGED = 100.0  # factor of a language model's logits, to find out whether the model caps them
SCORES = {"module_input_name": "sentence_embedding", "module_output_name": "scores"}


def recognises(folder: Path) -> bool:
    """Whether a folder is a cross-encoder of sentence-transformers with modules.json."""
    return is_cross_encoder(folder)


def write(folder: Path, model: Classifier, max_tokens: int, prefix: str | None = None) -> None:
    """Write Transformer, Pooling and Dense: a head on pooled states, over any encoder.

    Args:
        folder: Where to write.
        model: The model; its head is a linear layer, or a native head that `norm_head` recognises.
        max_tokens: Longest pair, special tokens included; stored with the tokenizer.
        prefix: Text before each query, see `ranker.export._prompt.as_prefix`; rows have no segments then. None: none.
    """
    own = norm_head(model)
    dense, norm, head = own or (model.dense, None, model.head)
    assert isinstance(head, nn.Linear)
    pooling = getattr(model.encoder.config, "classifier_pooling", "cls") if own else model.pooling
    write_encoder(folder, model.encoder, max_tokens, {})
    write_json(folder / "1_Pooling/config.json", pooling_config(model.encoder.dim, pooling))
    names = ["Transformer", "Pooling"]
    paths = ["", "1_Pooling"]

    def add(name: str) -> Path:
        names.append(name)
        paths.append(f"{len(paths)}_{name}")
        return folder / paths[-1]

    if dense is not None:
        write_dense(add("Dense"), dense, nn.Tanh() if norm is None else nn.GELU())
    if norm is not None:
        write_norm(add("LayerNorm"), norm)
    write_dense(add("Dense"), head, nn.Identity(), SCORES)
    classes = [f"sentence_transformers.models.{name}" for name in names]
    modules = [{"idx": i, "name": str(i), "path": paths[i], "type": classes[i]} for i in range(len(paths))]
    write_json(folder / MODULES, modules)
    # with the default activation, sentence-transformers would put a sigmoid on the scores
    settings: dict[str, Any] = {"model_type": "CrossEncoder", "prompts": {}, "activation_fn": IDENTITY}
    if prefix is not None:
        settings |= {"prompts": {"query": prefix}, "default_prompt_name": "query"}
        tokenizer = read_object(folder / TOKENIZER)
        names = [name for name in tokenizer.get("model_input_names", INPUTS) if name != "token_type_ids"]
        write_json(folder / TOKENIZER, tokenizer | {"model_input_names": names})
    write_json(folder / SETTINGS, settings)
    write_json(folder / OWN_FILE, {"dropout": model.dropout})


def norm_head(model: Classifier) -> tuple[nn.Linear, nn.LayerNorm, nn.Linear] | None:
    """Return the layers of a native head if it consists of dense, GELU, norm and output layer, as ModernBERT's.

    None for other heads, or if sentence-transformers' modules have another norm or activation.
    """
    if not isinstance(model.head, NativeHead):
        return None
    whole: Any = model.head.whole
    inner, output = getattr(whole, "head", None), getattr(whole, "classifier", None)
    dense, norm = getattr(inner, "dense", None), getattr(inner, "norm", None)
    if not (isinstance(dense, nn.Linear) and isinstance(norm, nn.LayerNorm) and isinstance(output, nn.Linear)):
        return None
    usual = type(getattr(inner, "act", None)) in (nn.GELU, GELUActivation) and norm.eps == nn.LayerNorm(1).eps
    known = getattr(whole.config, "classifier_pooling", None) in ("cls", "mean")
    return (dense, norm, output) if usual and known else None


def read(folder: Path, execution: Execution) -> Classifier:
    """Read a folder of one of the four forms.

    Raises:
        CheckpointError: The folder has another module, or a head of more than two labels.
    """
    modules = read_modules(folder)["query"]
    if len(modules) == 1:
        return sequence_classification.read(modules[0].folder, execution)
    encoder, _ = read_encoder(modules[0].folder, execution)
    head = read_head(folder, encoder)
    assert head is not None
    return head


def read_head(folder: Path, encoder: Encoder) -> Classifier | None:
    """Read the head of the folder from which an encoder was loaded; None for a folder without such a head.

    Raises:
        CheckpointError: The folder has a module that this program does not have.
    """
    if not (has_modules(folder) and is_cross_encoder(folder)):
        return None
    modules = read_modules(folder)["query"]
    names = [module.name for module in modules]
    if names == ["Transformer", "LogitScore"]:
        return _language_model(modules, encoder)
    denses = [read_dense(module) for module in modules if module.name == "Dense"]
    activations = [type(activation) for _, activation in denses]
    dropout = float(read_object(folder / OWN_FILE).get("dropout", 0.0))
    if names in (["Transformer", "Pooling", "Dense"], ["Transformer", "Pooling", "Dense", "Dense"]) and (
        activations in ([nn.Identity], [nn.Tanh, nn.Identity])
    ):
        dense = denses[0][0] if len(denses) == 2 else None
        return Classifier(encoder, denses[-1][0], read_pooling(modules[1]), dense, dropout)
    if (
        names == ["Transformer", "Pooling", "Dense", "LayerNorm", "Dense"]
        and activations == [nn.GELU, nn.Identity]
        and has_native_head(encoder.config)
    ):
        return _with_norm(modules, encoder, dropout)
    if len(modules) == 1:
        return None
    raise CheckpointError(
        f"{folder}: expected a sequence classification model, Transformer, Pooling and Dense (with tanh between two), "
        f"Dense with GELU, LayerNorm and Dense after Pooling, or a language model with LogitScore; got "
        f"{', '.join(names)}, activations {', '.join(kind.__name__ for kind in activations) or 'none'}"
    )


def _with_norm(modules: list[StoredModule], encoder: Encoder, dropout: float) -> Classifier:
    """Return the classifier of the encoder's family with the weights of Dense, LayerNorm and Dense.

    The norm of ModernBERT's classifier has no bias b. A bias of the stored norm is moved to the output layer, which
    then computes W n + (c + W b) instead of W (n + b) + c.

    Raises:
        CheckpointError: The family's classifier has other layers.
    """
    (dense, _), (output, _) = read_dense(modules[2]), read_dense(modules[4])
    norm = read_weights(modules[3].folder)
    config = copy.deepcopy(encoder.config)
    config.num_labels, config.classifier_pooling, config._attn_implementation = (
        output.out_features,
        read_pooling(modules[1]),
        None,
    )
    config.classifier_bias = dense.bias is not None
    whole: Any = AutoModelForSequenceClassification.from_config(config)
    whole.base_model.load_state_dict(encoder.model.state_dict(), strict=False)
    model = Classifier(encoder, NativeHead(whole, encoder, dropout), dropout=dropout)
    layers: Any = norm_head(model)
    if layers is None:
        raise CheckpointError(
            f"{modules[0].folder}: expected a family whose classifier is dense, GELU and norm, such as ModernBERT's, "
            f"got {config.model_type}"
        )
    bias: Tensor = output.weight.new_zeros(output.out_features) if output.bias is None else output.bias
    if layers[1].bias is None and "norm.bias" in norm:
        bias = bias + output.weight @ norm["norm.bias"]
    stored = (dense.weight, dense.bias), (norm["norm.weight"], norm.get("norm.bias")), (output.weight, bias)
    with torch.no_grad():
        for layer, (weight, added) in zip(layers, stored, strict=True):
            layer.weight.copy_(weight)
            if layer.bias is not None:
                layer.bias.copy_(torch.zeros_like(layer.bias) if added is None else added)
    return model


def initial_head(encoder: Encoder, dropout: float = 0.0) -> Classifier | None:
    """Return the trained head in the folder of an encoder's weights; None, with a line in the log, if none fits.

    Args:
        encoder: An encoder that was just loaded; `Encoder.source` is its folder or hub id.
        dropout: Dropout rate in the head.
    """
    if encoder.source is None:
        return None
    folder, config = Path(encoder.source), encoder.config
    if (stored := read_head(folder, encoder)) is not None:
        return stored
    if not sequence_classification.is_classifier(config):
        return None
    if config.num_labels not in (1, 2) or not has_native_head(config):
        log.warning(
            "encoder %s: its head of %d labels is dropped, and a new one is trained; a ranker's head has 1 or 2 and "
            "reads the encoder's states",
            encoder.source,
            config.num_labels,
        )
        return None
    if family_of(config).classifier is None:
        return Classifier(encoder, NativeHead.of(encoder, config.num_labels, dropout), dropout=dropout)
    stored = sequence_classification.read(folder, encoder.execution)
    log.info("head: the trained one of %s", encoder.source)
    return replace(stored, encoder=encoder, dropout=dropout)


def _language_model(modules: list[StoredModule], encoder: Encoder) -> Classifier:
    """Return LogitScore as a linear head: a row of the language model's output layer, or the difference of two.

    Raises:
        CheckpointError: The logits are no linear function of the last layer's states, as in Gemma 2.
    """
    settings: dict[str, Any] = modules[1].config
    model = AutoModelForCausalLM.from_pretrained(
        modules[0].folder, dtype=torch.float32, trust_remote_code=encoder.execution.trust_remote_code
    ).eval()
    output: Any = model.get_output_embeddings()
    yes, no = settings["true_token_id"], settings.get("false_token_id")
    rows = [part.detach() for part in (output.weight, output.bias) if part is not None]
    weight, *bias = [part[[yes]] if no is None else part[[yes]] - part[[no]] for part in rows]
    head = linear_of(weight, bias[0] if bias else torch.zeros(1))
    with torch.no_grad():
        ids = torch.tensor([common_tokens(encoder.tokenizer, len(output.weight))[:8]])
        states: list[Any] = []

        def enlarge(_: Any, inputs: Any, result: Tensor) -> Tensor:
            states.append(inputs[0])
            return ENLARGED * result  # small logits are below a cap, and nearly linear

        output.register_forward_hook(enlarge)
        whole = model(input_ids=ids).logits[0]
        logits = whole[:, yes] - (0 if no is None else whole[:, no])
        logits /= ENLARGED  # so that rounding counts as it does in the model's own logits
        change = float((head(states[0][0])[:, 0] - logits).abs().max())
    if change > TOLERANCE * max(1.0, float(logits.abs().max())):
        raise CheckpointError(
            f"{modules[0].folder}: expected logits that are a linear function of the states, got those of "
            f"{encoder.config.model_type}, which scales or caps them; model=lm_reranker with model.yes_word and "
            "model.no_word does so too"
        )
    words = [encoder.tokenizer.convert_ids_to_tokens(token) for token in (yes, no) if token is not None]
    log.warning(
        "the head is the logit of %s at the last token; texts are laid out as query and doc, without the chat template "
        "or the prompts that the model may have been trained with",
        " minus that of ".join(map(repr, words)),
    )
    return Classifier(encoder, head, "last")
