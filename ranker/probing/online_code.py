"""Compute the online code of a task for all layers, seeds and label sets.

In online (prequential) coding, the training pairs are split into blocks. For each block, new probes are trained on all
earlier blocks and then encode the labels of the block. Finished blocks are stored, so that a killed run resumes after
the last finished block. A member is the probe of one layer, one seed and one label set.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from torch import Tensor

from ranker.errors import ConfigError
from ranker.probing.blocks import BlockStore
from ranker.probing.code_length import FRACTIONS, CodeLength, accuracy, macro_f1, portion_ends
from ranker.probing.coding_jobs import Job, Member, Outcome, Portion, ProbeStack
from ranker.probing.probes import EdgeProbe
from ranker.probing.training import Fitted, fit, log_probabilities
from ranker.probing.training_options import TrainingOptions

VERSION = 4  # increase this number when a probe or its training changes, so that stored blocks are not reused
SMALL_PORTION = 0.05  # `TrainingOptions.small_val_pairs` is for portions below this share of the training pairs
BATCHINGS = ("auto", "separate", "stacked")
VALIDATIONS = ("fixed", "within")

Block = dict[str, np.ndarray]  # arrays of one member: bits (or predicted and scores), epochs, seconds


@dataclass(frozen=True)
class OnlineCoder:
    """Computes the online code of jobs.

    Args:
        options: How a probe is trained.
        fractions: Ends of the blocks, as shares of the training pairs.
        validation: `fixed`: probes are validated on the validation pairs. `within`: a tenth of the pairs of all earlier
            blocks is held out for validation, so that the code length depends on training pairs only.
        batching: `stacked`: one module trains all layers and seeds. `separate`: they are trained one after another.
            `auto`: stacked on a GPU.
        store: Store of finished blocks.
        progress: Function that is called with the number of members that have finished a block since the last call.

    Raises:
        ConfigError: An unknown `batching` or `validation`, or fractions that are not ascending or do not end at 1.
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
        """Return the layers and seeds of each stack."""
        layers, seeds = list(job.layers), list(job.seeds)
        if self.batching == "stacked" or (self.batching == "auto" and job.inputs.device.type == "cuda"):
            return [(layers, seeds)]
        return [([layer], [seed]) for layer in layers for seed in seeds]

    def code_stack(self, job: Job, layers: list[int], seeds: list[int]) -> list[Outcome]:
        """Code some layers and seeds of a job with one stack."""
        dim, slots = job.inputs.states.dim, job.inputs.spans.shape[1]
        options = self.options
        probe = EdgeProbe(dim, slots, job.classes, options.hidden, options.dropout, options.head)
        order = np.stack([job.train[permutation(seed, len(job.train))] for seed in seeds])
        stack = ProbeStack(job, probe, layers, seeds, order)
        ends = portion_ends(len(job.train), self.fractions)
        # the last training, on all training pairs, is only for the test, not for the code
        bounds = [*pairwise(ends), (len(job.train), None)]
        blocks = [self._block(stack, Portion(number, *bound)) for number, bound in enumerate(bounds)]
        return [self._outcome(stack, member, ends[0], [block[member] for block in blocks]) for member in stack.members]

    def _block(self, stack: ProbeStack, portion: Portion) -> dict[Member, Block]:
        """Return the block of a portion for each member: read it from the store, or compute and store it."""
        keys = {member: self._key(stack, member, portion) for member in stack.members}
        blocks = {member: block for member, key in keys.items() if (block := self.store.get(key)) is not None}
        missing = [member for member in keys if member not in blocks]
        self.progress(len(blocks))
        if missing:
            # A label set with a missing member is trained again for all layers and seeds.
            computed = self._train_block(stack, portion, sorted({label_set for _, _, label_set in missing}))
            self.store.put([(keys[member], arrays) for member, arrays in computed.items()])
            blocks |= computed
            self.progress(len(missing))
        return blocks

    def _train_block(self, stack: ProbeStack, portion: Portion, label_sets: list[int]) -> dict[Member, Block]:
        """Train the probes of some label sets on a portion, and apply the probes to the portion's block."""
        began = time.perf_counter()
        inputs = stack.job.inputs
        training_stack = stack.training_stack([stack.job.label_sets[i] for i in label_sets], portion)
        train, val = self._training_pairs(stack, portion.start)
        fitted = fit(stack.probe, inputs, training_stack, train, val, self.options, portion.number)
        pairs = stack.coded_pairs(portion)
        values = self._apply(stack, fitted, training_stack.labels, pairs, test=portion.end is None)
        # seeds code different training pairs, but predict the same test pairs
        rows = pairs.repeat(len(stack.seeds) // len(pairs), axis=0)
        targets = [inputs.targets_of(seed_pairs) for seed_pairs in rows]
        shape = training_stack.shape
        seconds = (time.perf_counter() - began) / math.prod(shape)
        blocks = {}
        for layer, seed, i in np.ndindex(*shape):
            block = {name: array[layer, seed, i, targets[seed]] for name, array in values.items()}
            block |= {"epochs": fitted.epochs[layer, seed, i].numpy(), "seconds": np.array(seconds)}
            blocks[layer, seed, label_sets[i]] = block
        return blocks

    def _training_pairs(self, stack: ProbeStack, start: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the pairs to train on, int64 [seeds, pairs], and to validate on, int64 [1 or seeds, pairs]."""
        job = stack.job
        train = stack.order[:, :start]
        if self.validation == "within":
            held_out = start // 10 if start >= 10 else int(start > 1)
            return train[:, : start - held_out], train[:, start - held_out :]
        limit = self.options.small_val_pairs
        if limit is not None and start < SMALL_PORTION * len(job.train) and limit < len(job.val):
            return train, job.val[permutation(0, len(job.val))[:limit]][None]
        return train, job.val[None]

    def _apply(
        self, stack: ProbeStack, fitted: Fitted, labels: Tensor, pairs: np.ndarray, test: bool
    ) -> dict[str, np.ndarray]:
        """Apply trained probes to the targets of pairs.

        Args:
            stack: The stack.
            fitted: The trained probes of the stack.
            labels: Labels of the trained label sets, int64 [label sets, targets].
            pairs: int64 [1 or seeds, pairs].
            test: Whether to return predictions and scores instead of bits.

        Returns:
            `bits`, or `predicted` and `scores`: float32 [layers, seeds, label sets, all targets]; NaN for targets
            outside `pairs`.
        """
        inputs = stack.job.inputs
        layers, seeds, label_sets = fitted.parameters.shape[:3]
        arrays = {
            name: np.full((layers, seeds, label_sets, len(inputs.spans)), np.nan, dtype=np.float32)
            for name in (("predicted", "scores") if test else ("bits",))
        }
        batches = log_probabilities(stack.probe, fitted.parameters, inputs, stack.layer_indices, pairs)
        for batch, logs in batches:
            targets = batch.targets.expand(seeds, -1)
            if test:
                values = {"predicted": logs.argmax(dim=-1).float(), "scores": logs[..., 1] - logs[..., 0]}
            else:
                truth = labels[:, targets].transpose(0, 1).expand(layers, -1, -1, -1)
                values = {"bits": -logs.gather(-1, truth.unsqueeze(-1)).squeeze(-1) / math.log(2)}
            indices, real = targets.cpu().numpy(), batch.real.expand(seeds, -1).cpu().numpy()
            for name, value in values.items():
                rows = value.cpu().numpy()
                for s in range(seeds):
                    arrays[name][:, s][..., indices[s, real[s]]] = rows[:, s][..., real[s]]
        return arrays

    def _outcome(self, stack: ProbeStack, member: Member, first_pairs: int, blocks: list[Block]) -> Outcome:
        """Return a member's outcome.

        `blocks` has all blocks except the first one, then the results on the test pairs. The `first_pairs` pairs of the
        first block have the uniform code.
        """
        layer, seed, label_set = member
        job, labels = stack.job, stack.job.label_sets[label_set]
        *coded, last = blocks
        order = stack.order[seed]
        targets = job.inputs.targets_of(order)
        first = int(np.diff(job.inputs.pair_starts)[order[:first_pairs]].sum())
        later = np.concatenate([block["bits"] for block in coded]) if coded else np.empty(0, dtype=np.float32)
        code = CodeLength(job.classes, first, len(targets), float(later.sum(dtype=np.float64)))
        bits = np.empty(len(targets), dtype=np.float32)
        # back from the seed's order to the order of pairs, so that seeds and subjects can be compared by target
        bits[np.argsort(np.argsort(targets))] = np.concatenate(
            [np.full(first, np.log2(job.classes), dtype=np.float32), later]
        )
        truth = labels.labels[job.inputs.targets_of(job.test)]
        predicted = last["predicted"].astype(np.int64)
        return Outcome(
            layer=stack.layers[layer],
            seed=stack.seeds[seed],
            label_set=labels,
            code=code,
            bits=bits,
            block_ends=np.cumsum([first, *(len(block["bits"]) for block in coded)]).tolist(),
            block_bits=[code.first_bits, *(float(block["bits"].sum(dtype=np.float64)) for block in coded)],
            predicted=predicted,
            scores=last["scores"],
            accuracy=accuracy(predicted, truth),
            macro_f1=macro_f1(predicted, truth),
            epochs=float(last["epochs"]),
            seconds=float(sum(block["seconds"] for block in blocks)),
        )

    def _key(self, stack: ProbeStack, member: Member, portion: Portion) -> str:
        """Return a hash of everything that decides a member's block."""
        layer, seed, label_set = member
        job, labels = stack.job, stack.job.label_sets[label_set]
        settings = [
            VERSION,
            job.states_key,
            stack.layers[layer],
            stack.seeds[seed],
            labels.task,
            labels.control,
            repr(stack.probe),
            repr(self.options),
            self.validation,
            portion.number,
            portion.start,
            portion.end,
        ]
        digest = hashlib.blake2b(json.dumps(settings).encode(), digest_size=16)
        for array in (job.inputs.spans, job.inputs.pair_starts, labels.labels, job.train, job.val, job.test):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()


def permutation(seed: int, num_pairs: int) -> np.ndarray:
    """Return a seeded random permutation of `num_pairs` pairs, int64 [pairs].

    Training pairs are coded in this order, which is the same for all layers, subjects (the probed encoders) and
    controls. The permutation also selects a subset of the validation pairs.
    """
    return np.random.default_rng([seed, num_pairs]).permutation(num_pairs)
