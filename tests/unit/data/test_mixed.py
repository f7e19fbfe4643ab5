"""Shares of sets by hand, the draw as a function of (seed, epoch, step), and the steps of a mix."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from ranker.data.collection import Candidates, Collection, Doc, MemoryDocs, Splits
from ranker.data.datamodule import RankData
from ranker.data.mixed_data import MixedData, MixedSet, merged, warn_of_shared_queries
from ranker.data.mixed_plan import MixedPlan
from ranker.data.options import BatchOptions
from ranker.data.scorer_inputs import ScorerInputs, TextLimits
from ranker.data.shares import shares, spread, whole_numbers
from ranker.data.sources.mixed import Mixed
from ranker.data.step_plan import StepPlan
from ranker.data.training_steps import StepLoader
from ranker.encoders.tiny import tiny_tokenizer
from ranker.errors import CheckpointError, ConfigError


@pytest.mark.parametrize(
    ("weights", "temperature", "expected"),
    [
        ([1, 1, 1], 1.0, [0.8, 0.19, 0.01]),  # in proportion to the sizes
        # the roots 28.284271, 13.784049, 3.162278 of their sum 45.230598
        ([1, 1, 1], 2.0, [0.6253349, 0.3047506, 0.0699145]),
        ([1, 2, 3], None, [1 / 6, 2 / 6, 3 / 6]),  # the weights alone
        ([0, 3, 1], 1.0, [0, 0.57 / 0.58, 0.01 / 0.58]),  # 3 * 190 and 1 * 10
    ],
)
def test_shares_are_those_computed_by_hand(weights, temperature, expected):
    assert shares([800, 190, 10], weights, temperature) == pytest.approx(expected, abs=1e-7)


def test_a_temperature_near_zero_does_not_overflow():
    assert shares([10**9, 2], [1, 1], 0.001) == pytest.approx([1, 0])


@pytest.mark.parametrize(
    ("parts", "total", "expected"),
    [
        ([0.5, 0.25, 0.25], 10, [5, 3, 2]),  # remainders 0, .5, .5: the first of the two gets the last place
        ([0.8, 0.19, 0.01], 40, [32, 8, 0]),  # 32, 7.6 and 0.4
        ([1 / 3, 1 / 3, 1 / 3], 3, [1, 1, 1]),
        ([0.999, 0.001], 100, [100, 0]),  # 99.9 and 0.1
    ],
)
def test_counts_are_largest_remainders(parts, total, expected):
    assert whole_numbers(parts, total) == expected


def test_an_even_spread_is_the_sorted_list_of_places():
    """A plain loop: the k-th place of a set with n places is (2k + 1) / 2n."""
    rng = np.random.default_rng(0)
    for _ in range(100):
        counts = rng.integers(0, 12, rng.integers(1, 6)).tolist()
        places = sorted(((2 * k + 1) / (2 * n), i) for i, n in enumerate(counts) for k in range(n))
        for first in range(sum(counts) + 1):
            taken = Counter(i for _, i in places[:first])
            assert spread(counts, first) == [taken[i] for i in range(len(counts))]


def plan(sizes, counts, one_set=False, queries=4):
    return MixedPlan([StepPlan(size, queries, 1000, seed) for seed, size in enumerate(sizes)], counts, one_set)


@pytest.mark.parametrize("one_set", [False, True])
def test_a_step_takes_the_next_groups_of_each_set_s_shuffled_passes(one_set):
    """A plain loop over the whole training: each set is one stream of permutations."""
    sizes, counts = [7, 10, 3], [5, 9, 4]
    mixed = plan(sizes, counts, one_set)
    streams = [
        [(draw, int(group)) for draw in range(8) for group in np.random.default_rng([seed, draw]).permutation(size)]
        for seed, size in enumerate(sizes)
    ]
    taken = [0, 0, 0]
    for epoch in range(4):
        before = list(taken)
        for index in range(len(mixed)):
            parts = mixed.parts(epoch, index)
            assert not one_set or len({part.set_index for part in parts}) == 1
            num_groups = 0
            for part in parts:
                found = [(part.draw, int(group)) for group in part.groups]
                start = taken[part.set_index]
                assert found == streams[part.set_index][start : start + len(found)]
                taken[part.set_index] += len(found)
                num_groups += len(found)
            assert 1 <= num_groups <= 4 and (one_set or index == len(mixed) - 1 or num_groups == 4)
        assert [now - then for now, then in zip(taken, before, strict=True)] == counts


def test_a_step_depends_on_nothing_that_was_read_before():
    fresh, used = plan([7, 10], [6, 6]), plan([7, 10], [6, 6])
    for epoch, index in ((3, 2), (0, 0), (2, 1), (3, 0)):
        used.parts(epoch, index)
    for one, other in zip(fresh.parts(3, 1), used.parts(3, 1), strict=True):
        assert (one.set_index, one.draw, one.groups.tolist()) == (other.set_index, other.draw, other.groups.tolist())


def test_a_small_share_is_spread_over_the_epoch():
    mixed = plan([30, 3], [30, 3], queries=3)
    steps = [index for index in range(len(mixed)) if any(part.set_index == 1 for part in mixed.parts(0, index))]
    assert len(mixed) == 11 and steps == [1, 5, 9], "its places are 1/6, 3/6 and 5/6 of the way"


# steps of token batches
# ----------------------------------------------------------------------------------------------------------------------


LIMITS = TextLimits(8, 12)


def collection(word, num_queries, num_docs=5):
    docs = MemoryDocs(Doc(f"d{i}", f"{word} doc {i} " + "long " * (i % 7)) for i in range(num_docs * num_queries))
    queries = {f"q{i}": f"{word} {i}" for i in range(num_queries)}
    qrels = {f"q{i}": {f"d{num_docs * i}": 1} for i in range(num_queries)}
    run = {f"q{i}": {f"d{num_docs * i + j}": float(-j) for j in range(num_docs)} for i in range(num_queries)}
    return Collection(word, docs, queries, qrels, Candidates.from_run(run))


@pytest.fixture
def rank_data(tmp_path):
    def build(train, limits=LIMITS, seed=3):
        batch = BatchOptions(queries=4, docs=3, max_tokens=1000)
        inputs = ScorerInputs(tiny_tokenizer(), "pairs", 64)
        return RankData(Splits(train, None, {}), inputs, batch, limits, seed=seed, cache_dir=tmp_path)

    return build


def contents(step):
    return [
        (batch.pairs.tokens, batch.pairs.cu_seqlens, batch.pairs.row_ids, batch.labels, batch.doc_mask, batch.group_ids)
        for batch in step.micro_batches
    ]


@pytest.mark.parametrize("batches", ["mixed", "one_set"])
def test_a_mix_of_one_set_takes_the_steps_of_the_set(rank_data, batches):
    alone = rank_data(collection("bab", 10)).train_steps()
    mixed = MixedData({"a": MixedSet(rank_data(collection("bab", 10)))}, Mixed({"a": 1}, batches=batches)).train_steps()
    assert len(mixed.plan) == len(alone.plan) == 3
    for epoch in range(2):
        for index in range(3):
            for one, other in zip(contents(alone[epoch, index]), contents(mixed[epoch, index]), strict=True):
                assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
            assert mixed.query_ids(epoch, index) == [f"a/{name}" for name in alone.query_ids(epoch, index)]


def test_each_set_keeps_its_own_text_limits_and_groups_stand_in_the_order_of_the_sets(rank_data):
    first, second = collection("bab", 8), collection("cel", 8)
    triples = replace(second, triples=[(f"q{i}", f"d{5 * i}", f"d{5 * i + 1}") for i in range(8)])
    sets = {
        "short": MixedSet(rank_data(first, TextLimits(8, 4))),
        "long": MixedSet(rank_data(triples, TextLimits(8, 12), seed=4)),
    }
    steps = MixedData(sets, Mixed({"a": 1})).train_steps()
    for index in range(4):
        step = steps[0, index]
        (batch,) = step.micro_batches
        assert batch.set_sizes == step.set_groups == (2, 2)
        # the doc and the special token after it have segment 1
        docs = [int(row.sum()) - 1 for row in batch.pairs.segments.split(batch.pairs.cu_seqlens.diff().tolist())]
        assert batch.doc_mask.tolist() == [[True] * 3] * 2 + [[True, True, False]] * 2  # a triple has two docs
        assert max(docs[:6]) <= 4 < max(docs[6:]) <= 12
        assert len(set(batch.pairs.row_ids.tolist())) == len(batch.pairs.row_ids)


def test_a_loader_resumes_in_the_middle_of_an_epoch_and_refuses_other_shares(rank_data):
    def loader(cap):
        sets = {"a": MixedSet(rank_data(collection("bab", 9)), cap=cap), "b": MixedSet(rank_data(collection("cel", 6)))}
        return StepLoader(MixedData(sets, Mixed({"a": 1})).train_steps())

    whole = [contents(step) for step in loader(5)]
    started = loader(5)
    steps = iter(started)
    next(steps), next(steps)
    state = started.state_dict()
    resumed = loader(5)
    resumed.load_state_dict(state)
    rest = [contents(step) for step in resumed]
    assert len(rest) == len(whole) - 2 == 1
    assert all(torch.equal(a, b) for a, b in zip(rest[0][0], whole[2][0], strict=True))
    with pytest.raises(CheckpointError, match="expected the training data of the run that is resumed"):
        loader(6).load_state_dict(state)


def test_test_sets_are_named_by_their_sets():
    one = collection("bab", 2)
    splits = merged({"a": Splits(None, None, {"x": one}, "N"), "b": Splits(one, None, {"x": one, "y": one}, "N")})
    assert list(splits.tests) == ["a", "b-x", "b-y"] and (splits.train, splits.val, splits.notice) == (None, None, "N")


def test_queries_that_another_set_tests_on_are_counted(caplog):
    first, second = collection("bab", 6), collection("cel", 6)
    mixed = replace(second, queries=second.queries | {"x1": "bab 1", "x2": "bab 4"})
    warn_of_shared_queries({"a": Splits(first, second, {}), "b": Splits(second, None, {"t": mixed})})
    assert [record.getMessage().split(" (")[0] for record in caplog.records] == [
        "data.sets.a: this set trains on 2 queries that b validates or tests on",
        "data.sets.b: this set trains on 6 queries that a validates or tests on",
    ]


@pytest.mark.parametrize(
    ("sets", "options", "message"),
    [
        ({"a": 0.0, "b": 0.0}, {}, "data.sets: expected a weight above 0 for at least one set, got 0 for all"),
        ({"a": 1.0, "none": 1.0}, {}, "data.sets.none: expected a source with training queries, got one without; name"),
        ({"a": 1000.0, "b": 0.001}, {}, "data.sets.b: expected at least one group in an epoch, got none of 12 at a"),
        ({"a": 1.0, "b": 1.0}, {"groups_per_epoch": 1}, "data.sets.b: expected at least one group in an epoch, got"),
    ],
)
def test_mistakes_in_the_shares_are_one_line(rank_data, sets, options, message):
    data = {"a": rank_data(collection("bab", 6)), "b": rank_data(collection("cel", 6)), "none": rank_data(None)}
    mixed = MixedData({name: MixedSet(data[name], weight) for name, weight in sets.items()}, Mixed({"a": 1}, **options))
    with pytest.raises(ConfigError) as caught:
        mixed.train_steps()
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sets": {}}, "data.sets: expected at least one set, got none"),
        ({"sets": {"a b": 1}}, "data.sets: expected names of letters, digits, - and _, got 'a b'"),
        ({"sets": {"a": 1}, "temperature": 0.0}, "data.temperature: expected a number above 0 or null, got 0.0"),
        ({"sets": {"a": 1}, "batches": "both"}, "data.batches: expected one of mixed, one_set; got 'both'"),
    ],
)
def test_mistakes_in_the_options_are_one_line(arguments, message):
    with pytest.raises(ConfigError) as caught:
        Mixed(**arguments)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)
