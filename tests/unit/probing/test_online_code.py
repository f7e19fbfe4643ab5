"""The online code over real trainings: signal, no signal, and a killed run that ends with the same numbers."""

import math
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ranker.errors import ConfigError
from ranker.probing import online_code
from ranker.probing.batches import Inputs
from ranker.probing.blocks import BlockStore
from ranker.probing.code_length import counting_code, portion_ends
from ranker.probing.coding_jobs import Job, LabelSet
from ranker.probing.controls import MAIN, control_labels, shuffled_labels
from ranker.probing.online_code import OnlineCoder, permutation
from ranker.probing.state_readers import TensorStates
from ranker.probing.training_options import TrainingOptions
from ranker.probing.workers import code_jobs

PAIRS, DIM, CLASSES, LAYERS = 240, 16, 4, 5
TRAIN, VAL, TEST = np.arange(160), np.arange(160, 200), np.arange(200, 240)
FAST = TrainingOptions(lr=1e-2, batch_pairs=32, max_rounds=8, round_steps=10, patience=2, hidden=16)
SHORT = replace(FAST, max_rounds=2, round_steps=5)
FRACTIONS = (0.0625, 0.25, 1.0)


def planted(
    seeds: tuple[int, ...] = (0,),
    columns: tuple[str, ...] = (MAIN,),
    several: bool = False,
    layers: tuple[int, ...] = (1, 3),
) -> Job:
    """Noise on every layer, and the label, one-hot, on layer 3."""
    rng = np.random.default_rng(0)
    counts = rng.integers(1, 3, PAIRS) if several else np.ones(PAIRS, dtype=int)
    targets = int(counts.sum())
    lengths = rng.integers(1, 5, targets)
    starts = np.cumsum(lengths) - lengths
    spans = np.stack([starts, starts + lengths], axis=1)[:, None]
    labels = rng.choice(CLASSES, targets, p=[0.4, 0.3, 0.2, 0.1])
    states = rng.normal(size=(LAYERS, int(lengths.sum()), DIM)).astype(np.float32)
    states[3, :, :CLASSES] = np.repeat(np.eye(CLASSES)[labels], lengths, axis=0) * 2
    pair_starts = np.concatenate([[0], np.cumsum(counts)])
    parts = np.repeat(np.select([np.arange(PAIRS) < 160, np.arange(PAIRS) < 200], ["train", "val"], "test"), counts)
    made = {
        MAIN: labels,
        "shuffled": shuffled_labels(labels, parts, 0),
        "control_task": control_labels([str(i) for i in range(targets)], labels, parts == "train", CLASSES, 0),
    }
    inputs = Inputs(TensorStates(torch.from_numpy(states)), spans, pair_starts, torch.device("cpu"))
    return Job(
        inputs,
        "planted",
        {layer: layer for layer in layers},
        [LabelSet("task", name, made[name]) for name in columns],
        CLASSES,
        TRAIN,
        VAL,
        TEST,
        seeds,
    )


def prior_compression(job: Job, labels: np.ndarray, seed: int = 0) -> float:
    order = job.inputs.targets_of(TRAIN[permutation(seed, len(TRAIN))])
    ends = [
        len(job.inputs.targets_of(TRAIN[permutation(seed, len(TRAIN))][:end]))
        for end in portion_ends(len(TRAIN), FRACTIONS)
    ]
    return len(order) * math.log2(CLASSES) / counting_code(labels[order], ends, CLASSES).sum()


def test_planted_signal_at_layer_3_is_found_at_layer_3() -> None:
    job = planted(layers=tuple(range(LAYERS)))
    outcomes = OnlineCoder(FAST, FRACTIONS).code(job)
    compression = {outcome.layer: outcome.code.compression() for outcome in outcomes}
    prior = prior_compression(job, job.label_sets[0].labels)
    assert max(compression, key=compression.__getitem__) == 3
    assert compression[3] > 2.5
    for layer in (0, 1, 2, 4):
        assert compression[layer] < prior + 0.1, "noise tells no more than the label prior"
    by_layer = {outcome.layer: outcome for outcome in outcomes}
    assert by_layer[3].accuracy == 1
    assert by_layer[0].accuracy < 0.6


def test_shuffled_labels_compress_no_better_than_the_prior() -> None:
    job = planted(columns=("shuffled",))
    for outcome in OnlineCoder(FAST, FRACTIONS).code(job):
        assert outcome.code.compression() < prior_compression(job, job.label_sets[0].labels) + 0.1


def test_small_portions_look_at_some_validation_pairs_and_large_ones_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    looked, real = [], online_code.fit

    def fit(probe, inputs, stack, train, val, options, portion):
        looked.append((train.shape[1], sorted(val[0].tolist())))
        return real(probe, inputs, stack, train, val, options, portion)

    monkeypatch.setattr(online_code, "fit", fit)
    OnlineCoder(replace(SHORT, small_val_pairs=7), (0.03, 0.25, 1.0)).code(planted(layers=(3,)))
    small = [val for pairs, val in looked if pairs < 0.05 * len(TRAIN)]
    assert small
    assert all(len(val) == 7 and val == small[0] and set(val) < set(VAL.tolist()) for val in small)
    assert all(val == sorted(VAL.tolist()) for pairs, val in looked if pairs >= 0.05 * len(TRAIN))


@pytest.mark.parametrize("several", [False, True])
def test_code_adds_up(several: bool) -> None:
    job = planted(seeds=(0, 1), several=several)
    for outcome in OnlineCoder(SHORT, FRACTIONS, batching="stacked").code(job):
        ends = portion_ends(len(TRAIN), FRACTIONS)
        order = TRAIN[permutation(outcome.seed, len(TRAIN))]
        first = job.inputs.targets_of(order[: ends[0]])
        assert outcome.code.first == len(first)
        assert outcome.block_ends == [len(job.inputs.targets_of(order[:end])) for end in ends]
        assert sum(outcome.block_bits) == pytest.approx(outcome.code.bits, abs=1e-6)
        assert outcome.bits.sum(dtype=np.float64) == pytest.approx(outcome.code.bits, rel=1e-6)
        assert outcome.code.targets == len(job.inputs.targets_of(TRAIN)) == len(outcome.bits)
        # targets of block 1 cost log2 k each, at their own places among the training targets
        assert np.allclose(outcome.bits[np.searchsorted(job.inputs.targets_of(TRAIN), first)], 2.0)
        assert np.isfinite(outcome.bits).all()
        assert len(outcome.predicted) == len(job.inputs.targets_of(TEST))


def test_stacked_and_separate_give_the_same_lengths() -> None:
    job = planted(seeds=(0, 1), columns=(MAIN, "shuffled"), several=True)
    separate, stacked = (
        OnlineCoder(SHORT, FRACTIONS, batching=batching).code(job) for batching in ("separate", "stacked")
    )
    found = {(o.layer, o.seed, o.label_set.control): o for o in separate}
    assert len(found) == len(stacked) == 2 * 2 * 2
    for outcome in stacked:
        own = found[outcome.layer, outcome.seed, outcome.label_set.control]
        assert outcome.code.bits == pytest.approx(own.code.bits, rel=2e-3)
        assert outcome.epochs == own.epochs


def test_a_column_does_not_depend_on_its_company() -> None:
    alone, together = (
        OnlineCoder(SHORT, FRACTIONS).code(planted(columns=names)) for names in ((MAIN,), (MAIN, "control_task"))
    )
    found = {outcome.layer: outcome for outcome in together if outcome.label_set.control == MAIN}
    for outcome in alone:
        assert outcome.code.bits == pytest.approx(found[outcome.layer].code.bits, rel=2e-3)


class Killed(Exception):
    pass


@pytest.mark.parametrize(("batching", "fits"), [("separate", 5), ("stacked", 2)])
def test_a_killed_run_ends_with_the_same_lengths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batching: str, fits: int
) -> None:
    job = planted(seeds=(0, 1), columns=(MAIN, "shuffled"))
    whole = OnlineCoder(SHORT, FRACTIONS, batching=batching).code(job)
    real, calls = online_code.fit, []

    def dies(*args: object) -> object:
        calls.append(1)
        if len(calls) == fits + 1:
            raise Killed
        return real(*args)

    monkeypatch.setattr(online_code, "fit", dies)
    path = tmp_path / "blocks.sqlite"
    with pytest.raises(Killed):
        OnlineCoder(SHORT, FRACTIONS, batching=batching, store=BlockStore(path)).code(job)
    done = []
    resumed = OnlineCoder(SHORT, FRACTIONS, batching=batching, store=BlockStore(path), progress=done.append).code(job)
    blocks = len(FRACTIONS) * (1 if batching == "stacked" else 2 * 2)
    assert len(calls) - 1 == blocks, "finished blocks were not trained again"
    assert sum(done) == len(FRACTIONS) * 2 * 2 * 2
    for before, after in zip(whole, resumed, strict=True):
        assert after.code == before.code
        assert np.array_equal(after.bits, before.bits)
        assert (after.accuracy, after.macro_f1, after.epochs) == (before.accuracy, before.macro_f1, before.epochs)


def test_kept_blocks_are_for_these_labels_and_options_alone(tmp_path: Path) -> None:
    store = BlockStore(tmp_path / "blocks.sqlite")
    coder = OnlineCoder(SHORT, (0.5, 1.0), store=store)
    first = coder.code(planted())
    done: list[int] = []
    again = OnlineCoder(SHORT, (0.5, 1.0), store=store, progress=done.append)
    assert again.code(planted())[1].code == first[1].code
    other = planted(columns=("shuffled",))
    assert again.code(other)[1].code != first[1].code
    changed = OnlineCoder(replace(SHORT, lr=3e-3), (0.5, 1.0), store=store).code(planted())
    assert changed[1].code != first[1].code


def test_validation_within_the_prefix_reads_no_validation_pair() -> None:
    job = planted(layers=(3,))
    poisoned = replace(job, val=np.array([10**9]))  # would be out of range
    outcome = OnlineCoder(FAST, FRACTIONS, validation="within").code(poisoned)[0]
    assert outcome.code.compression() > 2
    with pytest.raises(IndexError):
        OnlineCoder(FAST, FRACTIONS).code(poisoned)


@pytest.mark.parametrize("batching", ["separate", "stacked"])
def test_all_layers_columns_and_portions_share_a_seeds_permutation_and_initial_weights(
    monkeypatch: pytest.MonkeyPatch, batching: str
) -> None:
    assert permutation(3, 50).tolist() == permutation(3, 50).tolist() != permutation(4, 50).tolist()
    assert sorted(permutation(3, 50)) == list(range(50))
    real, seen = online_code.fit, {3: [], 4: []}

    def watched(probe, inputs, stack, train, *rest: object) -> object:
        fitted = real(probe, inputs, stack, train, *rest)
        for s, seed in enumerate(stack.seeds):
            seen[seed] += [(train[s].tolist(), weights) for weights in fitted.parameters[:, s].flatten(0, 1)]
        return fitted

    monkeypatch.setattr(online_code, "fit", watched)
    still = replace(SHORT, lr=1e-30, max_rounds=1)  # the weights at the end are those at the start
    OnlineCoder(still, FRACTIONS, batching=batching).code(planted(seeds=(3, 4), columns=(MAIN, "shuffled")))
    for seed, members in seen.items():
        assert len(members) == len(FRACTIONS) * 2 * 2, "layers and columns of each portion"
        for pairs, weights in members:
            assert pairs == permutation(seed, 160)[: len(pairs)].tolist()
            assert torch.equal(weights, members[0][1])
    assert not torch.equal(seen[3][0][1], seen[4][0][1])


def test_faults() -> None:
    for wrong, text in (
        ({"batching": "all"}, "batching"),
        ({"validation": "none"}, "validation"),
        ({"fractions": (0.5,)}, "portions"),
    ):
        with pytest.raises(ConfigError, match=text):
            OnlineCoder(FAST, **wrong)


def test_several_processes_give_the_same_lengths(tmp_path: Path) -> None:
    """Workers map states again, they are not copied; workers store blocks; the main process reports the progress."""
    job = planted(seeds=(0, 1), columns=(MAIN, "shuffled"))
    data = job.inputs.states.data
    data.half().numpy().tofile(tmp_path / "states.bin")
    mapped = TensorStates.mapped(tmp_path / "states.bin", "float16", tuple(data.shape))
    assert pickle.loads(pickle.dumps(mapped)).data.equal(mapped.data)
    assert len(pickle.dumps(mapped)) < 1000
    job = replace(job, inputs=replace(job.inputs, states=mapped))
    done: list[int] = []
    store = BlockStore(tmp_path / "blocks.sqlite")
    (together,) = code_jobs(OnlineCoder(SHORT, FRACTIONS, store=store, progress=done.append), [job], workers=2)
    alone = OnlineCoder(SHORT, FRACTIONS).code(job)
    assert [(o.layer, o.seed, o.label_set.control) for o in together] == [
        (o.layer, o.seed, o.label_set.control) for o in alone
    ]
    for ours, theirs in zip(together, alone, strict=True):
        assert ours.code.bits == pytest.approx(theirs.code.bits, rel=2e-3)
    assert sum(done) == len(FRACTIONS) * 2 * 2 * 2
    (again,) = code_jobs(OnlineCoder(SHORT, FRACTIONS, store=store), [job], workers=1)
    assert [o.code for o in again] == [o.code for o in together], "their blocks were found"
