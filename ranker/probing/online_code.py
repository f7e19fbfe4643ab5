"""The online code of a task for all layers, seeds and label sets: one stack of fresh probes a portion, resumable after each."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch

from ranker.errors import ConfigError
from ranker.probing.batches import Inputs
from ranker.probing.blocks import BlockStore
from ranker.probing.code_length import FRACTIONS, CodeLength, accuracy, macro_f1, portion_ends
from ranker.probing.probes import EdgeProbe
from ranker.probing.training import Fitted, Stack, TrainingOptions, fit, log_probabilities

VERSION = 4  # raise it when a probe or its training changes: kept blocks are then made anew
SMALL = 0.05  # share of the training pairs below which few validation pairs do (`TrainingOptions.small_val_pairs`)
BATCHINGS = ("auto", "separate", "stacked")
VALIDATIONS = ("fixed", "within")


@dataclass(frozen=True)
class Column:
    """A label set: a task's own labels, or a control's.

    Args:
        task: Name of the task.
        control: `none`, or the control's name.
        labels: Class of each target, int64 [targets].
    """

    task: str
    control: str
    labels: np.ndarray


@dataclass(frozen=True)
class Job:
    """What is coded together: label sets over the same targets, which read the same spans of the same states.

    Args:
        inputs: States, spans and pairs.
        states_key: Hash of the states and how they were made.
        layers: Name of each layer to probe -> its position on the states' layer axis.
        columns: Label sets, all with the same number of classes.
        classes: That number.
        train: Training pairs, int64 [pairs].
        val: Validation pairs.
        test: Test pairs.
        seeds: One permutation of the training pairs and one set of initial weights each.
    """

    inputs: Inputs
    states_key: str
    layers: dict[int, int]
    columns: Sequence[Column]
    classes: int
    train: np.ndarray
    val: np.ndarray
    test: np.ndarray
    seeds: Sequence[int]


@dataclass(frozen=True)
class Outcome:
    """One layer, seed and label set.

    Args:
        layer: Name of the layer.
        seed: The seed.
        column: The label set.
        code: The description length.
        bits: Bits of each training target, float32 [training targets], in the order of the pairs' numbers; log2 k in
            block 1.
        block_ends: Where each block ended, in targets of this seed's order.
        block_bits: Bits of each block.
        predicted: Class told for each test target after training on all pairs.
        scores: Log-odds of class 1 against class 0 of each test target.
        accuracy: Of the test.
        macro_f1: Of the test.
        epochs: Passes over the training pairs of the last training.
        seconds: Time that this member's trainings took, its share of a stack.
    """

    layer: int
    seed: int
    column: Column
    code: CodeLength
    bits: np.ndarray
    block_ends: list[int]
    block_bits: list[float]
    predicted: np.ndarray
    scores: np.ndarray
    accuracy: float
    macro_f1: float
    epochs: float
    seconds: float


@dataclass(frozen=True)
class OnlineCoder:
    """Codes jobs.

    Args:
        options: How a probe is trained.
        fractions: Shares of the training pairs at which blocks end.
        validation: `fixed` looks at the validation pairs; `within` at a tenth of the pairs sent so far, so that the
            code is self-contained.
        batching: `stacked` trains all layers and seeds in one module, `separate` one after another; `auto` stacks on a
            GPU.
        store: Where finished blocks are kept.
        progress: Called with the number of members and blocks done.
    """

    options: TrainingOptions
    fractions: Sequence[float] = FRACTIONS
    validation: str = "fixed"
    batching: str = "auto"
    store: BlockStore = field(default_factory=lambda: BlockStore(None))
    progress: Callable[[int], None] = lambda _: None

    def __post_init__(self) -> None:
        if self.batching not in BATCHINGS:
            raise ConfigError(f"batching: expected one of {', '.join(BATCHINGS)}; got {self.batching!r}")
        if self.validation not in VALIDATIONS:
            raise ConfigError(f"validation: expected one of {', '.join(VALIDATIONS)}; got {self.validation!r}")
        portion_ends(1, self.fractions)

    def code(self, job: Job) -> list[Outcome]:
        """Code every layer, seed and label set of a job."""
        return [outcome for layers, seeds in self.stacks(job) for outcome in self.code_stack(job, layers, seeds)]

    def stacks(self, job: Job) -> list[tuple[list[int], list[int]]]:
        """Layers and seeds that are trained in one module."""
        layers, seeds = list(job.layers), list(job.seeds)
        if self.batching == "stacked" or (self.batching == "auto" and job.inputs.device.type == "cuda"):
            return [(layers, seeds)]
        return [([layer], [seed]) for layer in layers for seed in seeds]

    def code_stack(self, job: Job, layers: list[int], seeds: list[int]) -> list[Outcome]:
        """Code some layers and seeds of a job together."""
        probe = EdgeProbe(
            job.inputs.states.dim,
            job.inputs.spans.shape[1],
            job.classes,
            self.options.hidden,
            self.options.dropout,
            self.options.head,
        )
        ends = portion_ends(len(job.train), self.fractions)
        order = np.stack([job.train[permutation(seed, len(job.train))] for seed in seeds])
        blocks: list[dict[tuple[int, int, int], dict[str, np.ndarray]]] = []
        # the last training, on all pairs, is for the test and not part of the code
        for portion, (start, end) in enumerate([*pairwise(ends), (len(job.train), None)]):
            blocks.append(self._block(job, probe, layers, seeds, order, portion, start, end))
        return [
            self._outcome(job, order[s], ends, layer, seed, column, [block[place, s, c] for block in blocks])
            for place, layer in enumerate(layers)
            for s, seed in enumerate(seeds)
            for c, column in enumerate(job.columns)
        ]

    def _block(
        self,
        job: Job,
        probe: EdgeProbe,
        layers: list[int],
        seeds: list[int],
        order: np.ndarray,
        portion: int,
        start: int,
        end: int | None,
    ) -> dict[tuple[int, int, int], dict[str, np.ndarray]]:
        """Results of one portion for each member: trained on the first `start` pairs, applied to those up to `end` (None: to the test)."""
        members = [
            (place, s, c) for place in range(len(layers)) for s in range(len(seeds)) for c in range(len(job.columns))
        ]
        keys = {
            (p, s, c): self._key(job, probe, layers[p], seeds[s], job.columns[c], portion, start, end)
            for p, s, c in members
        }
        found = {member: self.store.get(keys[member]) for member in members}
        missing = [member for member in members if found[member] is None]
        self.progress(len(members) - len(missing))
        if missing:
            columns = sorted({c for _, _, c in missing})
            made = self._train_block(job, probe, layers, seeds, columns, order, portion, start, end)
            self.store.put([(keys[member], arrays) for member, arrays in made.items()])
            found |= made
            self.progress(len(missing))
        return {member: arrays for member, arrays in found.items() if arrays is not None}

    def _train_block(
        self, job: Job, probe: EdgeProbe, layers: list[int], seeds: list[int], columns: list[int], order: np.ndarray,
        portion: int, start: int, end: int | None,
    ) -> dict[tuple[int, int, int], dict[str, np.ndarray]]:  # fmt: skip
        began = time.perf_counter()
        positions = [job.layers[layer] for layer in layers]
        device = job.inputs.device
        labels = torch.from_numpy(np.stack([job.columns[c].labels for c in columns])).to(device)
        names = [f"{job.columns[c].task}/{job.columns[c].control}" for c in columns]
        member_keys = [[[_number(layer, seed, portion, name) for name in names] for seed in seeds] for layer in layers]
        stack = Stack(positions, seeds, member_keys, labels)
        train, val = order[:, :start], job.val[None]
        most = self.options.small_val_pairs
        if most is not None and start < SMALL * len(job.train) and most < len(job.val):
            val = job.val[permutation(0, len(job.val))[:most]][None]
        if self.validation == "within":
            held = start // 10 if start >= 10 else int(start > 1)
            train, val = train[:, : start - held], train[:, start - held :]
        fitted = fit(probe, job.inputs, stack, train, val, self.options, portion)
        # seeds read different pairs of the training set, but the same test pairs
        read = order[:, start:end] if end is not None else job.test[None]
        said = self._apply(job, probe, fitted, positions, labels, read, test=end is None)
        chosen = [job.inputs.targets_of(own) for own in read.repeat(len(seeds) // len(read), axis=0)]
        seconds = (time.perf_counter() - began) / (len(layers) * len(seeds) * len(columns))
        made = {}
        for place, s, v in np.ndindex(len(layers), len(seeds), len(columns)):
            own = {kind: values[place, s, v, chosen[s]] for kind, values in said.items()}
            made[place, s, columns[v]] = own | {
                "epochs": fitted.epochs[place, s, v].numpy(),
                "seconds": np.array(seconds),
            }
        return made

    def _apply(
        self,
        job: Job,
        probe: EdgeProbe,
        fitted: Fitted,
        positions: list[int],
        labels: torch.Tensor,
        read: np.ndarray,
        test: bool,
    ) -> dict[str, np.ndarray]:
        """What the trained probes say about the targets of the read pairs, each [layers, seeds, columns, all targets]."""
        layers, seeds, columns = fitted.parameters.shape[:3]
        kinds = ("predicted", "scores") if test else ("bits",)
        said = {
            kind: np.full((layers, seeds, columns, len(job.inputs.spans)), np.nan, dtype=np.float32) for kind in kinds
        }
        for batch, logs in log_probabilities(probe, fitted.parameters, job.inputs, positions, read):
            targets = batch.targets.expand(seeds, -1)
            if test:
                values = {"predicted": logs.argmax(dim=-1).float(), "scores": logs[..., 1] - logs[..., 0]}
            else:
                truth = labels[:, targets].transpose(0, 1).expand(layers, -1, -1, -1)
                values = {"bits": -logs.gather(-1, truth.unsqueeze(-1)).squeeze(-1) / math.log(2)}
            places, real = targets.cpu().numpy(), batch.real.expand(seeds, -1).cpu().numpy()
            for kind, value in values.items():
                rows = value.cpu().numpy()
                for s in range(seeds):
                    said[kind][:, s][..., places[s, real[s]]] = rows[:, s][..., real[s]]
        return said

    def _outcome(
        self,
        job: Job,
        order: np.ndarray,
        ends: list[int],
        layer: int,
        seed: int,
        column: Column,
        blocks: list[dict[str, np.ndarray]],
    ) -> Outcome:
        coded, last = blocks[:-1], blocks[-1]
        targets = job.inputs.targets_of(order)
        first = int(np.diff(job.inputs.pair_starts)[order[: ends[0]]].sum())
        later = np.concatenate([block["bits"] for block in coded]) if coded else np.empty(0, dtype=np.float32)
        code = CodeLength(job.classes, first, len(targets), float(later.sum(dtype=np.float64)))
        bits = np.empty(len(targets), dtype=np.float32)
        # back from the seed's order to the pairs' numbers, so that seeds and subjects can be paired
        place_of = np.argsort(np.argsort(targets))
        bits[place_of] = np.concatenate([np.full(first, np.log2(job.classes), dtype=np.float32), later])
        block_ends = np.cumsum([first, *(len(block["bits"]) for block in coded)]).tolist()
        truth = column.labels[job.inputs.targets_of(job.test)]
        predicted = last["predicted"].astype(np.int64)
        return Outcome(
            layer,
            seed,
            column,
            code,
            bits,
            block_ends,
            [code.first_bits, *(float(block["bits"].sum(dtype=np.float64)) for block in coded)],
            predicted,
            last["scores"],
            accuracy(predicted, truth),
            macro_f1(predicted, truth),
            float(last["epochs"]),
            float(sum(block["seconds"] for block in blocks)),
        )

    def _key(
        self, job: Job, probe: EdgeProbe, layer: int, seed: int, column: Column, portion: int, start: int, end: int | None
    ) -> str:  # fmt: skip
        digest = hashlib.blake2b(digest_size=16)
        named = [
            VERSION,
            job.states_key,
            layer,
            seed,
            column.task,
            column.control,
            repr(probe),
            repr(self.options),
            self.validation,
            portion,
            start,
            end,
        ]
        digest.update(json.dumps(named).encode())
        for array in (job.inputs.spans, job.inputs.pair_starts, column.labels, job.train, job.val, job.test):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()


def permutation(seed: int, num_pairs: int) -> np.ndarray:
    """The order in which a seed sends the training pairs: one for all layers, subjects and controls."""
    return np.random.default_rng([seed, num_pairs]).permutation(num_pairs)


def _number(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()) >> 1
