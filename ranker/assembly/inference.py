"""Apply the options of `inference` to a trained model, for evaluation, re-ranking and serving."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from ranker.assembly.precision import device_type
from ranker.encoders.encoder import Encoder
from ranker.encoders.quantized import KINDS, fp8_unavailable
from ranker.errors import ConfigError
from ranker.exits.early_exit import EarlyExit
from ranker.models.interface import Scorer

log = logging.getLogger(__name__)
OPTIONS = ("exit", "margin", "quantize")


def prepare(scorer: Scorer, options: Mapping[str, Any], accelerator: str = "auto") -> Scorer:
    """Return the scorer with the options of the node `inference`; an option that is null changes nothing.

    Args:
        scorer: A loaded scorer, on the CPU.
        options: `exit` and `margin`, see `EarlyExit.leave`; `quantize`, see `Encoder.quantize`.
        accelerator: The device type on which the scorer will run, as in `trainer.accelerator`.

    Raises:
        ConfigError: An option is unknown or does not apply to this scorer or device.
    """
    unknown = sorted(set(options) - set(OPTIONS))
    if unknown:
        raise ConfigError(f"inference.{unknown[0]}: expected one of {', '.join(OPTIONS)}")
    kind = options.get("quantize")
    if kind is not None:
        _quantize(scorer, str(kind), accelerator)
    exit, margin = options.get("exit"), options.get("margin")
    if exit is not None or margin is not None:
        if not isinstance(scorer, EarlyExit):
            key = "exit" if exit is not None else "margin"
            raise ConfigError(
                f"inference.{key}: expected null, or a model with early heads (model=early_exit), got "
                f"{type(scorer).__name__}"
            )
        scorer.leave(exit, margin)
        log.info("inference: pairs leave at layer %s", exit if margin is None else f"{scorer.exits}, margin {margin}")
    return scorer


def check_quantize(kind: str, accelerator: str) -> None:
    """Check that the device can multiply matrices in the precision chosen for linear layers.

    Args:
        kind: `inference.quantize`.
        kind: Value of `inference.quantize`.
        accelerator: Value of `trainer.accelerator`.

    Raises:
        ConfigError: The device can't multiply in that precision.
    """
    if kind not in KINDS:
        raise ConfigError(f"inference.quantize: expected null, {' or '.join(KINDS)}, got {kind!r}")
    device = device_type({"accelerator": accelerator})
    if kind == "int8" and device != "cpu":
        other = "null or fp8" if not fp8_unavailable(torch.device(device)) else "null"
        raise ConfigError(
            f"inference.quantize: expected {other} on {device}, got int8, which runs on a CPU; or set "
            "trainer.accelerator=cpu"
        )
    reason = fp8_unavailable(torch.device(device)) if kind == "fp8" else ""
    if reason:
        other = "null or int8" if device == "cpu" else "null"
        raise ConfigError(f"inference.quantize: expected {other}, got fp8, but {reason}")


def _quantize(scorer: Scorer, kind: str, accelerator: str) -> None:
    check_quantize(kind, accelerator)
    for module in scorer.modules():
        if isinstance(module, Encoder):
            module.quantize(kind)
    log.info("inference: linear layers of the encoder run in %s", kind)
