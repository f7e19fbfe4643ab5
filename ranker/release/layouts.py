"""Decide which model can be exported to which format, and write the files of a format."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from ranker.checkpoint import longest_pair_of, write_description, write_model
from ranker.encoders.word_head import WordHead
from ranker.errors import ConfigError
from ranker.export import _adapter, cross_encoder, language_model
from ranker.export import _sequence_classification as sequence_classification
from ranker.export._prompt import as_prefix, write_prompt
from ranker.models.colbert import ColBERT
from ranker.models.dpr import DPR
from ranker.models.interface import Scorer
from ranker.models.lm_reranker import LMReranker
from ranker.models.monobert import MonoBERT

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NEEDS = {
    "onnx": ("onnx", "onnxscript", "onnxruntime"),
    "onnx_int8": ("onnx", "onnxscript", "onnxruntime"),
    "sentence_transformers": ("sentence_transformers",),
}
FIX = {"onnx": "pip install 'ranker[onnx]'", "onnx_int8": "pip install 'ranker[onnx]'"}


def check_format(scorer: Scorer, layout: str, dtype: str) -> None:
    """Check that a format can hold a model, and that its packages are installed.

    Args:
        scorer: The model.
        layout: A format: `onnx`, `onnx_int8`, `hf`, `sentence_transformers` or `merged`.
        dtype: A key of `DTYPES`.

    Raises:
        ConfigError: The format does not fit, or a package is missing; the message names the formats that fit.
    """
    reason = _reason(scorer, layout)
    if reason:
        raise ConfigError(f"format: {reason}, got {layout}")
    if layout == "onnx_int8" and dtype != "float32":
        raise ConfigError(f"dtype: expected float32 with format=onnx_int8, whose weights are int8, got {dtype}")
    if layout == "onnx" and dtype == "bf16":
        raise ConfigError(
            "dtype: expected float32 or fp16 with format=onnx, since onnxruntime has no bf16 on a CPU, got bf16"
        )
    missing = [name for name in NEEDS.get(layout, ()) if importlib.util.find_spec(name) is None]
    if missing:
        fix = FIX.get(layout, "pip install sentence-transformers")
        raise ConfigError(f"format: expected {' and '.join(missing)} for {layout}, which is not installed; {fix}")


def _reason(scorer: Any, layout: str) -> str:
    """Return the message for a format that does not fit; empty if the format fits."""
    name = type(scorer).__name__
    if layout == "merged":
        if not _adapter.has_adapters(scorer):
            return "expected hf or sentence_transformers, since the model has no adapters to merge"
        return ""
    if getattr(scorer, "reads_lists", False):
        return f"expected the run's model/, since no format holds the lists of docs that {name} reads"
    if not isinstance(scorer, (MonoBERT, LMReranker, DPR, ColBERT)):
        return f"expected a model of monobert, lm_reranker, dpr or colbert, since no format is known for {name}"
    if layout == "hf":
        if isinstance(scorer, (DPR, ColBERT)):
            return f"expected sentence_transformers, since {name} has vectors and no ForSequenceClassification"
        if isinstance(scorer, MonoBERT) and not sequence_classification.fits(scorer.classifier()):
            return (
                "expected sentence_transformers, since transformers has no ForSequenceClassification of "
                f"{scorer.encoder.config.model_type} with a linear head on pooling={scorer.pooling}"
            )
    prompt = getattr(scorer, "prompt", None)
    if layout == "sentence_transformers" and prompt is not None:
        if type(scorer) is not MonoBERT or not is_modular(scorer):
            return f"expected hf or onnx, since sentence-transformers has no prompt for {name} with its head"
        if as_prefix(scorer.encoder, prompt) is None:
            return (
                "expected hf or onnx, since sentence-transformers puts a prompt before the query and the tokenizer's "
                f"special tokens between query and doc, and the model's prompt is {prompt!r}"
            )
    if layout.startswith("onnx") and isinstance(scorer, DPR) and not scorer.pools_prompt:
        return "expected sentence_transformers, since the model leaves its prompt out of the pooling"
    capped = getattr(scorer.encoder.config.get_text_config(), "final_logit_softcapping", None)
    if capped and isinstance(getattr(scorer, "head", None), WordHead):
        return "expected the run's model/, since the family caps its logits, which a linear head does not"
    return ""


def write_layout(folder: Path, scorer: Any, cfg: DictConfig, layout: str) -> None:
    """Write a model without adapters, its tokenizer and `ranker.yaml`.

    Args:
        folder: An empty folder.
        scorer: The model.
        cfg: The configuration of the model's training.
        layout: `hf`: ForSequenceClassification of transformers. `sentence_transformers`: the modules Transformer,
            Pooling, Dense (and LayerNorm) if the head has these layers, else the layout of the run's `model/`. All
            other formats: the layout of `model/`.
    """
    longest = longest_pair_of(scorer, cfg)
    if layout == "hf" and isinstance(scorer, LMReranker):
        head = nn.Linear(scorer.encoder.dim, 1, bias=False)
        head.weight = nn.Parameter(
            scorer.head.difference().detach() if isinstance(scorer.head, WordHead) else scorer.head.weight
        )
        language_model.write(folder, scorer.encoder, head, longest, scorer.prompt, scorer.words)
        write_description(folder, cfg)
    elif layout == "sentence_transformers" and type(scorer) is MonoBERT and is_modular(scorer):
        prefix = None if scorer.prompt is None else as_prefix(scorer.encoder, scorer.prompt)
        cross_encoder.write(folder, scorer.classifier(), longest, prefix)
        write_prompt(folder, scorer.prompt)
        write_description(folder, cfg)
    else:
        write_model(folder, scorer, cfg)


def is_modular(scorer: MonoBERT) -> bool:
    """Return whether a cross-encoder's head consists of the modules Dense and LayerNorm of sentence-transformers."""
    model = scorer.classifier()
    return isinstance(model.head, nn.Linear) or cross_encoder.norm_head(model) is not None


def cast(folder: Path, dtype: str) -> None:
    """Convert the weights of a folder to another precision.

    Args:
        folder: A folder with `*.safetensors` files and `config.json`, also in subfolders.
        dtype: A key of `DTYPES`.
    """
    if dtype == "float32":
        return
    for path in folder.rglob("*.safetensors"):
        with safe_open(path, "pt") as stored:
            metadata = stored.metadata()
        weights = load_file(path)
        converted = {
            name: value.to(DTYPES[dtype]) if value.is_floating_point() else value for name, value in weights.items()
        }
        save_file(converted, path, metadata=metadata)
    for path in folder.rglob("config.json"):
        content = json.loads(path.read_text(encoding="utf-8"))
        if "model_type" in content:
            content["dtype"] = str(DTYPES[dtype]).removeprefix("torch.")
            path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def megabytes(folder: Path) -> float:
    """Return the size of a folder's weights and graphs in megabytes (10^6 bytes)."""
    endings = (".safetensors", ".onnx", ".data", ".bin")
    return sum(path.stat().st_size for path in folder.rglob("*") if path.suffix in endings) / 1e6
