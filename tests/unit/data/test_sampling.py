"""Draws that depend on (seed, epoch, query) alone."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ranker.data.collate import Collator
from ranker.data.collection import Candidates, Collection, Doc, MemoryDocs, Splits
from ranker.data.datamodule import RankData
from ranker.data.judged_groups import JudgedGroups
from ranker.data.options import BatchOptions, TrainDocs
from ranker.data.sampling import GroupOptions
from ranker.data.score_batches import ScoreBatches
from ranker.data.scorer_inputs import ScorerInputs, TextLimits
from ranker.data.step_plan import HashedOrder, StepPlan
from ranker.data.token_store import build_token_store
from ranker.data.training_steps import StepLoader, TrainSteps
from ranker.data.triples import TripleGroups, triple_rows
from ranker.encoders.tiny import tiny_tokenizer
from ranker.errors import CheckpointError, DataError
from ranker.hashing import mix


@pytest.fixture
def stores(tmp_path):
    def make(collection):
        tokenizer = tiny_tokenizer()
        return (
            build_token_store(collection.queries.items(), tmp_path / "queries", tokenizer, 16, fingerprint="q"),
            build_token_store(
                ((doc.doc_id, doc.full_text) for doc in collection.docs),
                tmp_path / "docs",
                tokenizer,
                16,
                fingerprint="d",
            ),
        )

    return make


def collection_of(qrels, candidates, num_docs=0, triples=None) -> Collection:
    names = {doc for docs in qrels.values() for doc in docs} | {doc for docs in candidates.values() for doc in docs}
    docs = MemoryDocs(Doc(name, f"text of {name}") for name in sorted(names | {f"x{i}" for i in range(num_docs)}))
    run = {query: {doc: float(-place) for place, doc in enumerate(docs)} for query, docs in candidates.items()}
    return Collection(
        "made", docs, {query: f"query {query}" for query in qrels}, qrels, Candidates.from_run(run), triples
    )


def drawn(sampler, store, epoch=0, group=0):
    rows, labels = sampler.draw(epoch, np.array([group]))
    names = [name.decode() if isinstance(name, bytes) else name for name in store.ids()]
    return [names[row] if row >= 0 else None for row in rows[0]], labels[0].tolist()


def test_pc32_a_known_positive_is_never_a_negative(stores):
    collection = collection_of({"q1": {"p1": 1, "p2": 2, "s": -2}}, {"q1": ["p2", "n1", "s", "p1", "n2"]})
    queries, docs = stores(collection)
    sampler = JudgedGroups(collection, queries, docs, GroupOptions(num_docs=4))
    seen = set()
    for epoch in range(20):
        names, labels = drawn(sampler, docs, epoch)
        assert set(names[1:]) == {"n1", "s", "n2"}
        assert labels[0] in (1.0, 2.0)
        assert labels[1:] == [0.0, 0.0, 0.0]
        seen.add(names[0])
    assert seen == {"p1", "p2"}


def test_pc31_fewer_negatives_are_masked_and_none_is_an_error(stores):
    collection = collection_of({"q": {"A": 1}, "q2": {"B": 1}}, {"q": ["n1", "A"], "q2": ["A"]})
    queries, docs = stores(collection)
    names, labels = drawn(JudgedGroups(collection, queries, docs, GroupOptions(num_docs=4)), docs)
    assert names == ["A", "n1", None, None]
    assert labels == [1.0, 0.0, 0.0, 0.0]
    empty = collection_of({"q": {"A": 1}, "q2": {"B": 1}}, {"q": ["n1"], "q2": []})
    with pytest.raises(DataError, match="query 'q2': expected at least one candidate that is not relevant"):
        JudgedGroups(empty, queries, docs, GroupOptions(num_docs=4))


def test_queries_without_any_of_the_given_negatives_are_left_out(stores, caplog):
    collection = collection_of({"q": {"A": 1}, "q2": {"B": 1}}, {"q": ["n1"], "q2": ["n2"]})
    queries, docs = stores(collection)
    groups = JudgedGroups(
        collection, queries, docs, GroupOptions(num_docs=2), negatives=Candidates.from_run({"q2": {"n1": 1.0}})
    )
    assert groups.query_ids == ["q2"] and drawn(groups, docs)[0] == ["B", "n1"]
    assert "1 of 2 judged queries have no usable negative" in caplog.text
    taught = JudgedGroups(
        collection, queries, docs, GroupOptions(num_docs=2), teacher={"q": {"A": 1.0, "n1": 0.5}, "q2": {"B": 1.0}}
    )
    assert taught.query_ids == ["q"]
    with pytest.raises(
        DataError,
        match="expected a negative for at least one training query, got none for all 2 that have a relevant doc",
    ):
        JudgedGroups(
            collection, queries, docs, GroupOptions(num_docs=2), negatives=Candidates.from_run({"q9": {"n1": 1.0}})
        )


def test_random_negatives_fill_without_repeats_or_positives(stores):
    collection = collection_of({"q": {"A": 1, "B": 1}}, {"q": ["n1"]}, num_docs=30)
    queries, docs = stores(collection)
    names, _ = drawn(JudgedGroups(collection, queries, docs, GroupOptions(num_docs=12, random_negatives=True)), docs)
    assert None not in names
    assert len(set(names)) == 12
    assert not {"A", "B"} & set(names[1:])


def test_draws_are_uniform_without_replacement(stores):
    negatives = [f"n{i}" for i in range(10)]
    collection = collection_of({"q": {"A": 1}}, {"q": negatives})
    queries, docs = stores(collection)
    sampler = JudgedGroups(collection, queries, docs, GroupOptions(num_docs=4))
    counts = dict.fromkeys(negatives, 0)
    for epoch in range(3000):
        names, _ = drawn(sampler, docs, epoch)
        assert len(set(names)) == 4
        for name in names[1:]:
            counts[name] += 1
    assert (
        max(abs(count - 900) for count in counts.values()) < 5 * (900 * 0.7) ** 0.5
    )  # five standard deviations of a binomial


@pytest.mark.parametrize("mined", [False, True])
def test_negatives_come_from_the_first_candidates_to_the_depth_and_no_further(stores, mined):
    ranking = ["n1", "n2", "n3", "n4", "n5"]
    collection = collection_of({"q": {"A": 1}}, {"q": ["n5", "n4"] if mined else ranking})
    queries, docs = stores(collection_of({"q": {"A": 1}}, {"q": ranking}))
    negatives = Candidates.from_run({"q": {doc: -float(rank) for rank, doc in enumerate(ranking)}}) if mined else None
    sampler = JudgedGroups(collection, queries, docs, GroupOptions(num_docs=3, depth=3), negatives=negatives)
    names = [drawn(sampler, docs, epoch)[0][1:] for epoch in range(100)]
    assert {name for group in names for name in group} == {"n1", "n2", "n3"}


def test_a_relevant_candidate_counts_in_the_depth(stores):
    collection = collection_of({"q": {"A": 1}}, {"q": ["n1", "A", "n2", "n3"]})
    queries, docs = stores(collection)
    names, _ = drawn(JudgedGroups(collection, queries, docs, GroupOptions(num_docs=5, depth=3)), docs)
    assert names[0] == "A" and set(names[1:]) == {"n1", "n2", None}


def test_a_teacher_s_docs_are_drawn_to_the_depth_by_its_scores_where_there_are_no_candidates(stores):
    collection = collection_of({"q": {"A": 1}}, {"q": ["n1", "n2", "n3", "n4"]})
    queries, docs = stores(collection)
    # A has rank 2; n2 and n3 tie at rank 3, where the larger id comes first
    teacher = {"q": {"n1": 9.0, "A": 5.0, "n2": 1.0, "n3": 1.0, "n4": 0.5}}
    sampler = JudgedGroups(
        replace(collection, candidates=None), queries, docs, GroupOptions(num_docs=5, depth=3), teacher=teacher
    )
    names, labels = drawn(sampler, docs)
    assert dict(zip(names, labels, strict=True)) == {"A": 5.0, "n1": 9.0, "n3": 1.0, None: 0.0}


def test_teacher_scores_are_the_labels(stores):
    collection = collection_of({"q": {"A": 1}}, {"q": ["n1", "n2", "n3", "A"]})
    queries, docs = stores(collection)
    teacher = {"q": {"A": 7.5, "n1": -1.25, "n3": 2.0}}
    names, labels = drawn(JudgedGroups(collection, queries, docs, GroupOptions(num_docs=4), teacher=teacher), docs)
    assert dict(zip(names, labels, strict=True)) == {"A": 7.5, "n1": -1.25, "n3": 2.0, None: 0.0}


def test_triples_come_as_they_are(stores):
    collection = collection_of({"q": {"A": 1}}, {"q": ["n1", "n2"]}, triples=[("q", "A", "n2"), ("q", "A", "n1")])
    queries, docs = stores(collection)
    rows = triple_rows(collection, queries, docs, Path("not needed"), chunk=1)
    sampler = TripleGroups(rows)
    assert sampler.fingerprint() == TripleGroups(np.array(rows)).fingerprint() != TripleGroups(rows[::-1]).fingerprint()
    last = np.array([[0, 1, 2], [0, 2, 1], [3, 1, 2]])
    assert TripleGroups(last).fingerprint() != TripleGroups(np.array([[0, 1, 2], [0, 2, 1], [3, 1, 0]])).fingerprint()
    assert [drawn(sampler, docs, group=group) for group in range(2)] == [
        (["A", "n2"], [1.0, 0.0]),
        (["A", "n1"], [1.0, 0.0]),
    ]


class OneReading(list):
    """Triples that say what they are, and can be read once."""

    fingerprint = "three triples"

    def __iter__(self):
        while self:
            yield self.pop(0)


def test_named_triples_are_looked_up_once_and_a_killed_lookup_is_made_anew(stores, tmp_path):
    triples = OneReading([("q", "A", "n2"), ("q", "A", "n1"), ("q", "B", "n1")])
    collection = collection_of({"q": {"A": 1, "B": 1}}, {"q": ["n1", "n2"]}, triples=triples)
    queries, docs = stores(collection)
    at_once = triple_rows(replace(collection, triples=triples.copy()), queries, docs, tmp_path)
    first = triple_rows(collection, queries, docs, tmp_path, chunk=2)
    (file,) = tmp_path.glob("triples-*.bin")
    file.with_suffix(".partial").write_bytes(b"what a kill left")
    again = triple_rows(collection, queries, docs, tmp_path)
    assert at_once.tolist() == first.tolist() == again.tolist()
    assert file.stat().st_size == 3 * 12 and at_once.dtype == np.int32
    file.unlink()
    with pytest.raises(DataError, match="expected training triples, got none"):  # they were read before
        triple_rows(collection, queries, docs, tmp_path)


@pytest.mark.parametrize("size", [1, 2, 5, 1000, 4097])
def test_the_computed_order_is_a_shuffle(size):
    order = HashedOrder(size, seed=1, epoch=2)
    values = order[0:size]
    assert sorted(values.tolist()) == list(range(size))
    assert np.concatenate([order[start : start + 7] for start in range(0, size, 7)]).tolist() == values.tolist()
    if size >= 1000:  # neighbours part, epochs differ: as in a random order, about one value in all stays at its place
        assert abs(np.diff(values)).mean() == pytest.approx(size / 3, rel=0.1)
        assert (values == np.arange(size)).sum() < 8 and (values == HashedOrder(size, 1, 3)[0:size]).sum() < 8


def test_mix_spreads_neighbours():
    values = mix(0, np.arange(100_000))
    assert len(set(values.tolist())) == 100_000
    assert abs((values / 2**64).mean() - 0.5) < 0.005


@pytest.fixture
def steps(stores):
    qrels = {f"q{i}": {f"p{i}": 1} for i in range(10)}
    collection = collection_of(qrels, {f"q{i}": [f"n{i}{j}" for j in range(8)] for i in range(10)})
    queries, docs = stores(collection)
    collator = Collator.of(ScorerInputs(tiny_tokenizer(), "pairs", 512), queries, docs, TextLimits(16, 16))
    sampler = JudgedGroups(collection, queries, docs, GroupOptions(num_docs=4, seed=3))
    return TrainSteps(StepPlan(10, 4, 10_000, seed=3), sampler, collator, 0, 1)


def contents(loader, epoch):
    loader.set_epoch(epoch)
    return [[micro.pairs.tokens.tolist() for micro in step.micro_batches] for step in loader]


def test_pc91_pc92_workers_change_nothing_and_epochs_differ(steps):
    alone = [contents(StepLoader(steps), epoch) for epoch in (0, 1)]
    assert alone[0] != alone[1]
    for workers in (1, 2):
        loader = StepLoader(steps, workers=workers)
        assert [contents(loader, epoch) for epoch in (0, 1)] == alone


def test_pc71_a_resumed_epoch_goes_on_where_it_stood(steps):
    whole = contents(StepLoader(steps, workers=1), 0)
    loader = StepLoader(steps, workers=1)  # its worker prefetches beyond what is handed out
    iterator = iter(loader)
    first = [[micro.pairs.tokens.tolist() for micro in next(iterator).micro_batches]]
    state = loader.state_dict()
    assert (state["epoch"], state["done"]) == (0, 1)
    resumed = StepLoader(steps)
    resumed.load_state_dict(state)
    assert first + contents(resumed, 0) == whole


def test_a_resume_on_other_data_is_refused(steps):
    state = StepLoader(steps).state_dict()
    relevant = {f"q{i}": {f"p{i}": 1} for i in range(10)}
    negatives = {f"q{i}": [f"n{i}{j}" for j in range(8)] for i in range(10)}

    def loader(qrels, candidates, seed=3, queries_per_step=4):
        collator = steps.collator
        sampler = JudgedGroups(
            collection_of(qrels, candidates), collator.queries, collator.docs, GroupOptions(num_docs=4, seed=seed)
        )
        return StepLoader(TrainSteps(StepPlan(10, queries_per_step, 10_000, seed=seed), sampler, collator, 0, 1))

    loader(relevant, negatives).load_state_dict(state)  # read again from the same files
    for changed, fault in [
        (
            loader(relevant | {"q3": {"p3": 1, "n31": 1}}, negatives),
            r"\(a fingerprint of queries, docs and candidates '\w+', not '\w+'\)",
        ),
        (loader(relevant, negatives | {"q0": negatives["q0"][::-1]}), "a fingerprint of queries, docs and candidates"),
        (loader(relevant, negatives | {"q9": ["n00"]}), "a fingerprint of queries, docs and candidates"),
        (loader(relevant, negatives, seed=4), r"\(seed 4, not 3\)"),
        (loader(relevant, negatives, queries_per_step=5), r"\(steps an epoch 2, not 3\)"),
    ]:
        with pytest.raises(
            CheckpointError, match=f"data: expected the training data of the run that is resumed, got other .*{fault}"
        ):
            changed.load_state_dict(state)
        assert changed.done == 0


@pytest.mark.parametrize("reads", ["pairs", "texts"])
@pytest.mark.parametrize("max_tokens", [20, 60, 100_000])
@pytest.mark.parametrize("world", [1, 2, 7])
def test_pc17_pc64_pc67_every_candidate_is_scored_once(stores, reads, max_tokens, world):
    candidates = {"q1": ["a", "b", "c"], "q2": [], "q3": ["c"], "q4": ["b", "a"]}
    collection = collection_of({query: {"a": 1} for query in candidates}, candidates)
    queries, docs = stores(collection)
    collator = Collator.of(ScorerInputs(tiny_tokenizer(), reads, 512), queries, docs, TextLimits(16, 16))
    scores = np.full(6, np.nan, dtype=np.float32)
    for rank in range(world):
        batches = ScoreBatches(collection, 2, collator, max_tokens, rank, world)
        assert len(batches) > 0  # a device without a batch would leave the others waiting
        for batch in (batches[i] for i in range(len(batches))):
            for slot in batch.slots[batch.slots >= 0].tolist():
                assert np.isnan(scores[slot])
                scores[slot] = 10 * batches.doc_rows[slot] + batches.query_rows[slot]
            assert int(batch.batch.doc_mask.sum()) == len(batch.slots)
    run = batches.run(scores[: batches.num_slots])
    assert {query: list(docs) for query, docs in run.items()} == {"q1": ["a", "b"], "q3": ["c"], "q4": ["b", "a"]}
    assert not any(np.isnan(score) for docs in run.values() for score in docs.values())


def test_pc2_24_a_mined_negative_that_the_collection_lacks_is_named_before_the_training(tmp_path):
    collection = collection_of({"q1": {"p": 1}}, {"q1": ["n1", "n2"]})
    path = tmp_path / "negatives.trec"
    path.write_text("q1 Q0 n1 1 3 t\nq1 Q0 d99 2 2 t\n")

    def steps(**options):
        splits = Splits(collection, None, {})
        return RankData(
            splits,
            ScorerInputs(tiny_tokenizer(), "pairs", 512),
            BatchOptions(docs=2),
            TextLimits(),
            cache_dir=tmp_path / "c",
            train_docs=TrainDocs(**options),
        ).train_steps()

    with pytest.raises(
        DataError, match=r"negatives.trec:2: expected candidates from the collection, got the unknown doc id 'd99'"
    ):
        steps(negatives=path)
    path.write_text(path.read_text() + "q1 Q0 p 3 1 t\n")
    assert len(steps(teacher=path).sampler) == 1  # a teacher may have scored other docs
