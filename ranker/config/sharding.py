"""Refuse options that do not work with `trainer.strategy=fsdp`, such as passes that bypass the scorer's `forward`."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf

from ranker.config.groups import is_set
from ranker.config.sets import source_nodes
from ranker.config.signatures import attribute_of
from ranker.config.targets import is_trusted

PRECISIONS = ("None", "bf16-mixed", "32-true", "32")  # supported by Lightning's strategy and by the training step
OPTIONS = ("compile", "fused", "graphs")  # options of the encoder whose layers read weights without gathering them


def faults_of(cfg: DictConfig) -> list[str]:
    """Return error messages for options that do not work with fsdp; the caller puts `trainer.` before each."""
    if "optim" not in cfg:
        return ["strategy: expected auto or ddp for this command, since only a training shards weights; got fsdp"]
    reasons = [
        f"encoder.{option}=true"
        for option in OPTIONS
        if OmegaConf.select(cfg, f"encoder.{option}", default=None) is True
    ]
    if str(OmegaConf.select(cfg, "trainer.precision", default=None)) not in PRECISIONS:
        reasons.append(f"trainer.precision={cfg.trainer.precision}")
    if OmegaConf.select(cfg, "encoder.lora", default=None) is not None:
        reasons.append("adapters (lora=...)")
    callbacks = [str(node.get("_target_")) for node in (cfg.get("callbacks") or {}).values() if node is not None]
    for name, part in (("ema", "EMA"), ("last_k", ".LastK")):
        if any(part in target for target in callbacks):
            reasons.append(f"callbacks={name}")
    for key in ("layer_drop", "quantize_aware"):
        if OmegaConf.select(cfg, f"encoder.{key}", default=None):
            reasons.append(f"encoder.{key}={cfg.encoder[key]}")
    if cfg.get("distill") is not None:
        reasons.append("distill=layers")
    if OmegaConf.select(cfg, "mining.every", default=None) is not None:
        reasons.append(f"mining.every={cfg.mining.every}, which encodes the docs between two steps")
    if OmegaConf.select(cfg, "loss.affine", default=False):
        reasons.append("loss.affine=true")
    reasons += _of_objective(cfg) if "objective" in cfg else _of_model(cfg)
    return [f"strategy: expected auto or ddp with {reason}, got fsdp" for reason in reasons]


def _of_objective(cfg: DictConfig) -> list[str]:
    target = str(OmegaConf.select(cfg, "objective._target_"))
    whole = is_trusted(target, "objective") and attribute_of(target, "compares_texts", default=False)
    return [f"objective={target.split('.')[-2]}, which compares the texts of the whole step"] if whole else []


def _of_model(cfg: DictConfig) -> list[str]:
    model: Any = cfg.get("model") if is_set(cfg, "model") else {}
    target = str(model.get("_target_"))
    contrast = model.get("in_batch_negatives", False)
    taught = any(node.get("teacher") for node in source_nodes(cfg).values())
    reasons = []
    if "heads" in model:
        reasons.append("model=multitask")
    elif "exits" in model:
        reasons.append("model=early_exit")
    elif "doc_penalty" in model or contrast or (contrast is None and not taught):
        reasons.append("texts of a step that are compared (model.in_batch_negatives, penalties)")
    reasons += [f"model.{key}" for key in ("matryoshka_dims", "matryoshka_layers") if model.get(key)]
    if target.endswith(".MonoT5"):
        reasons.append("model=mono_t5, whose decoder step reads weights by itself")
    return reasons
