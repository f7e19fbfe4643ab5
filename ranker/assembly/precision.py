"""Choose the precision of a run: bfloat16 where it is faster. The choice is stored, so a resumed run keeps it."""

from __future__ import annotations

import logging
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch.nn.functional import gelu, linear

from ranker.assembly.run import add_facts, write_config
from ranker.encoders.encoder import Encoder
from ranker.errors import ConfigError
from ranker.processes import is_first_process

log = logging.getLogger(__name__)

SMALLEST = 256  # on a CPU, bfloat16 is tried only for states of at least this many numbers
GAIN = 1.2  # smallest ratio of the times in float32 and bfloat16
TOKENS, REPEATS = 512, 3  # tokens of the measured block, and number of measurements
PROCESSES = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")  # variables with the number of processes of a run
NO_BF16 = "this CPU has no bfloat16 arithmetic (AVX512-BF16 or AMX)"


def settle_precision(cfg: DictConfig, folder: Path, encoder: Encoder) -> None:
    """If `trainer.precision` is null, set it to the faster one; store and log the choice and its reason.

    `config.yaml` gets the choice, so other processes of the run and a resumed run use it. `environment.json` gets the
    choice with its reason.

    Args:
        cfg: The configuration, which is changed.
        folder: The run folder.
        encoder: The encoder; its size and its path decide whether bfloat16 is faster on a CPU.

    Raises:
        ConfigError: The precision is a half precision in which the encoder's family does not run.
    """
    configured = cfg.trainer.precision
    refuse_half(configured, encoder)
    precision, reason = (configured, "configured") if configured is not None else chosen(cfg.trainer, encoder)
    cfg.trainer.precision = precision
    if is_first_process():
        if configured is None:
            write_config(cfg, folder)
        add_facts(folder, precision={"value": precision, "reason": reason})
        log.info("precision: %s (%s)", precision, reason)


def refuse_half(precision: Any, encoder: Encoder) -> None:
    """Refuse a half precision in which an encoder's family does not run.

    Args:
        precision: A precision as Lightning names it; None: not chosen yet.
        encoder: The encoder.

    Raises:
        ConfigError: The precision is refused.
    """
    fault = encoder.why_float32
    if fault and precision is not None and "16" in str(precision):
        family = encoder.config.model_type
        raise ConfigError(f"trainer.precision: expected 32-true for {family}, because {fault}; got {precision}")


def checked_precision(trainer: Mapping[str, Any]) -> Any:
    """Return `trainer.precision` for Lightning; 32-true if it is null, that is, not chosen yet.

    Raises:
        ConfigError: The precision is bfloat16, but this CPU only emulates bfloat16, which is slower than float32.
    """
    precision = trainer["precision"]
    if str(precision).startswith("bf16") and device_type(trainer) == "cpu" and not cpu_has_bf16():
        raise ConfigError(
            f"trainer.precision: expected 32-true, because {NO_BF16}; got {precision}; set trainer.precision=32-true"
        )
    return precision if precision is not None else "32-true"


def chosen(trainer: Mapping[str, Any], encoder: Encoder) -> tuple[str, str]:
    """Return the precision to use if `trainer.precision` is null, and the reason."""
    fault = encoder.why_float32
    if fault:
        return "32-true", fault
    device = device_type(trainer)
    if device == "cuda":
        bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        return ("bf16-mixed", "the GPU has bfloat16") if bf16 else ("32-true", "the GPU has no bfloat16")
    reason = f"the device is {device}" if device != "cpu" else _no_gain(trainer, encoder)
    if reason:
        return "32-true", reason
    single, half = times(encoder.dim)
    took = f"a layer's products take {1000 * half:.1f} ms in bfloat16 and {1000 * single:.1f} ms in float32"
    return ("bf16-mixed" if single > GAIN * half else "32-true"), took


def cpu_has_bf16() -> bool:
    """Return whether this CPU has instructions for products of bfloat16 matrices."""
    if platform.machine() in ("aarch64", "arm64"):
        return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def times(width: int) -> tuple[float, float]:
    """Return the seconds that a feed-forward block and its backward pass take in float32 and in bfloat16 autocast.

    Each time is the best of `REPEATS` runs over `TOKENS` tokens; runs in both precisions alternate. No random number is
    drawn, so the measurement does not change the training.

    Args:
        width: Size of a state. The block's inner size is four times as large.
    """
    states, up, down = (
        torch.full(shape, 0.01, requires_grad=True)
        for shape in ((TOKENS, width), (4 * width, width), (width, 4 * width))
    )
    best = {False: float("inf"), True: float("inf")}
    for repeat in range(REPEATS + 1):
        for half in best:
            started = time.perf_counter()
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                output = linear(gelu(linear(states, up)), down)
            torch.autograd.grad(output.float().sum(), [states, up, down])
            if repeat:  # the first run only prepares kernels
                best[half] = min(best[half], time.perf_counter() - started)
    return best[False], best[True]


def _no_gain(trainer: Mapping[str, Any], encoder: Encoder) -> str:
    """Return why bfloat16 is not tried on this CPU; empty if it is."""
    if not cpu_has_bf16():
        return NO_BF16
    if encoder.dim < SMALLEST:
        return f"states of {encoder.dim} numbers gain little from bfloat16 on a CPU"
    if not encoder.ragged:
        return f"on the path {encoder.path} attention is torch's, whose backward pass in bfloat16 is slow on a CPU"
    if trainer["num_nodes"] > 1 or any(int(os.environ.get(name, 1)) > 1 for name in PROCESSES):
        return "another program started several processes, which would each measure the time and might not agree"
    return ""


def device_type(trainer: Mapping[str, Any]) -> str:
    """Return the type of device that Lightning uses: cuda, mps or cpu."""
    accelerator = trainer["accelerator"]
    if accelerator in ("auto", "gpu"):
        return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    return str(accelerator)
