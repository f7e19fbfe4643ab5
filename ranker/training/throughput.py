"""Measure a training: pairs, tokens and FLOPs per second, share of padding, waiting time, peak memory."""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from ranker.encoders.encoder import Encoder
from ranker.encoders.model_runner import TokenCounts
from ranker.training.flops import LinearWeights, linear_weights, matmul_flops, near_pairs, transformers_flops
from ranker.types import TrainStep

WARM_UP = 3  # number of first steps, which compile and fill caches; reported separately if more steps follow
IN_BAR = ("pairs_per_second", "mfu", "data_wait_share")  # values that the progress bar shows; all values are logged
YARDSTICK = 8192  # rows and columns of the bf16 matrix product that measures a card's rate


@dataclass
class Counts:
    """Work and time of some training steps. Pairs and tokens are counted over all devices."""

    pairs: int = 0
    tokens: int = 0
    computed_tokens: int = 0
    last_layer_tokens: int = 0
    seconds: float = 1e-9  # time of the steps and between them, including waiting for data
    wait_seconds: float = 0.0  # time of waiting for data
    squares: Tensor | float = 0.0  # number of token pairs, summed over rows
    near: Tensor | float = 0.0  # number of token pairs within the window, summed over rows


class Throughput(pl.Callback):
    """Measure training epochs without their validations. Tokens of this device are multiplied by the number of devices.

    The first steps compile kernels and fill caches. If more steps follow, the first ones are counted in `start`.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.start, self.counts = Counts(), Counts()
        self.matmul_rate = 0.0  # of all devices, FLOP/s
        self._config: Any = None
        self._encoders: list[Encoder] = []
        self._weights: LinearWeights | None = None  # for an encoder whose layers transformers runs
        self._device = torch.device("cpu")
        self._since: float | None = None  # start of the time that is not counted yet; None between epochs
        self._waited = 0.0  # total waiting time of the loader at the moment `_since`
        self._refresh: Any = None  # the object that mines negatives during the training, if there is one
        self._mined = 0.0  # total time of mining at the moment `_since`

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Measure the GPU's FLOP/s, and reset token counts and peak memory."""
        self._refresh = getattr(module, "refresh", None)
        self._mined = getattr(self._refresh, "seconds", 0.0)
        self._config = getattr(getattr(getattr(module, "scorer", None), "encoder", None), "config", None)
        self._encoders = [part for part in module.modules() if isinstance(part, Encoder)]
        for encoder in self._encoders:
            encoder.token_counts = TokenCounts()
        if self._encoders and self._encoders[0].by_transformers:
            self._weights = linear_weights(self._encoders[0].model)
        self._device = module.device
        if self._device.type == "cuda":
            self.matmul_rate = measure_matmul(self._device) * trainer.world_size
            torch.cuda.reset_peak_memory_stats(self._device)

    def on_train_epoch_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Start counting. The start of the data loader is counted; the time between epochs is not."""
        self._since = time.perf_counter()

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        outputs: Any,
        batch: TrainStep,
        batch_idx: int,
    ) -> None:
        """Add the pairs, tokens and time of this step to the counts."""
        self.steps += 1
        counts = self.counts
        counts.pairs += batch.num_docs
        window = getattr(self._config, "sliding_window", None)
        for micro in batch.micro_batches:
            for texts in (micro.pairs, micro.queries, micro.docs):
                if texts is not None:
                    counts.tokens += trainer.world_size * texts.num_tokens
                    # these sums stay on the device, since reading them would make the host wait
                    lengths = texts.cu_seqlens.diff()
                    counts.squares = counts.squares + trainer.world_size * near_pairs(lengths, None)
                    counts.near = counts.near + trainer.world_size * near_pairs(lengths, window)
        for encoder in self._encoders:
            counts.computed_tokens += trainer.world_size * encoder.token_counts.computed_tokens
            counts.last_layer_tokens += trainer.world_size * encoder.token_counts.last_layer_tokens
            encoder.token_counts = TokenCounts()
        is_logged = batch_idx % trainer.log_every_n_steps == 0  # type: ignore[attr-defined]
        if self.steps == WARM_UP or is_logged:
            self._wait_for_device()
        self._count_time(trainer)
        if self.steps == WARM_UP:
            self.start, self.counts = counts, Counts()
        if is_logged:
            shown: Any = getattr(module, "shown", {})
            for name, value in self.report().items():
                if name not in ("train_seconds", "start_seconds"):
                    module.log(f"train/{name}", float(value))
                    if name in IN_BAR:
                        shown[f"train/{name}"] = float(value)

    def _count_time(self, trainer: pl.Trainer) -> None:
        now, waited = time.perf_counter(), getattr(trainer.train_dataloader, "waited", 0.0)
        if self._since is not None:
            self.counts.seconds += now - self._since
            self.counts.wait_seconds += waited - self._waited
        mined = getattr(self._refresh, "seconds", 0.0)
        self.counts.seconds -= mined - self._mined  # the time of mining is reported separately
        self._since, self._waited, self._mined = now, waited, mined

    def _wait_for_device(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def on_validation_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Stop counting after the device has finished the steps before the validation."""
        if self._since is not None:
            self._wait_for_device()
            self._count_time(trainer)

    def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Resume counting."""
        if self._since is not None:
            self._since = time.perf_counter()

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Stop counting after the device has finished the epoch's steps."""
        if self._since is not None:
            self._wait_for_device()
            self._count_time(trainer)
        self._since = None

    def report(self) -> dict[str, float]:
        """Return the values for `result.json`.

        `mfu`, on CUDA only, is the FLOP rate divided by the GPU's measured rate for a large bf16 matrix product.
        """
        counts = self.counts if self.counts.pairs else self.start
        figures = {
            "pairs_per_second": counts.pairs / counts.seconds,
            "tokens_per_second": counts.tokens / counts.seconds,
            "padding_share": 1 - counts.tokens / max(counts.computed_tokens, counts.tokens, 1),
            "data_wait_share": counts.wait_seconds / counts.seconds,
            "peak_memory_bytes": peak_memory_bytes(),
            "train_seconds": self.start.seconds + self.counts.seconds,
            "start_seconds": self.start.seconds,
        }
        if self.matmul_rate and hasattr(self._config, "num_hidden_layers"):
            pairs = float(counts.squares), float(counts.near)
            if self._weights is not None:
                flops = transformers_flops(self._config, self._weights, counts.tokens, *pairs)
            else:
                flops = 3 * matmul_flops(self._config, counts.tokens, pairs[0], counts.last_layer_tokens, pairs[1])
            figures["flops_per_second"] = flops / counts.seconds
            figures["mfu"] = flops / counts.seconds / self.matmul_rate
        return figures


def measure_matmul(device: torch.device, repeats: int = 10) -> float:
    """Return the FLOP/s of a square bf16 matrix product of size `YARDSTICK`, the median of `repeats` measurements."""
    left, right = (torch.randn(YARDSTICK, YARDSTICK, device=device, dtype=torch.bfloat16) for _ in range(2))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 4)]
    for event in events:
        left @ right
        event.record()
    torch.cuda.synchronize(device)
    seconds = sorted(first.elapsed_time(then) / 1e3 for first, then in pairwise(events[3:]))
    return 2 * YARDSTICK**3 / seconds[len(seconds) // 2]


def peak_memory_bytes() -> int:
    """Return the peak memory of the GPU if there is one, else of this process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
