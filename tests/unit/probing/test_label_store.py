"""Samples, splits, hashes, arrays."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ranker.encoders.loading import load_encoder
from ranker.encoders.tiny import tiny_tokenizer
from ranker.errors import ConfigError, DataError
from ranker.probing.controls import control_labels, shuffled_labels, surface_features, type_of
from ranker.probing.examples import ProbeExample, Span, Target
from ranker.probing.label_store import build_data, labelled_examples, span_array, span_tokens
from ranker.probing.measuring import ranking_measures
from ranker.probing.options import StudyOptions
from ranker.probing.pairs import assign_parts, sample_pairs
from ranker.probing.results import COLUMNS, LENIENT, RANKING
from ranker.probing.sequences import Sequences, span_mask
from ranker.probing.state_cache import StateCache
from ranker.probing.study import Study
from ranker.probing.subject import Subject
from ranker.probing.tasks.bm25 import BM25Score
from ranker.probing.tasks.rel import Relevance
from ranker.probing.tasks.tf import TermFrequency
from ranker.probing.training_options import TrainingOptions
from tests.unit.probing.mini import mini_collection, mini_sample

SAMPLE = mini_sample()
TOKENIZER = tiny_tokenizer()


def built(task, sample=SAMPLE, max_doc=256, **options):
    examples = list(task.examples(sample))
    parts = assign_parts(examples, sample, "query", 0.2, 0.2)
    pairs = list(dict.fromkeys((example.query, example.doc) for example in examples))
    pair_index = {pair: place for place, pair in enumerate(pairs)}
    sequences = Sequences.of(pairs, TOKENIZER, "pairs", 512, 64, max_doc)
    return (
        build_data(task, examples, parts, [span_tokens(examples, sequences, pair_index)], **options),
        sequences,
        pair_index,
    )


def test_pairs_are_drawn_from_each_querys_candidates() -> None:
    collection = mini_collection()
    made = sample_pairs(collection, 50, 5, 8, 0, 0.2, 0.2)
    assert len(made.pairs) == 50 == len(set(made.pairs))
    for query_id, doc_id in made.pairs:
        assert doc_id in collection.candidates[query_id][:8]
    assert (
        sample_pairs(collection, 50, 5, 8, 0, 0.2, 0.2).pairs
        == made.pairs
        != sample_pairs(collection, 50, 5, 8, 1, 0.2, 0.2).pairs
    )
    draws = [sample_pairs(collection, 10**6, 3, 12, seed, 0.2, 0.2).pairs for seed in range(200)]
    ranks = np.array([collection.candidates[query_id].index(doc_id) for pairs in draws for query_id, doc_id in pairs])
    assert np.bincount(ranks, minlength=12) / len(ranks) == pytest.approx(np.full(12, 1 / 12), abs=0.01), (
        "uniform over the candidates"
    )
    with pytest.raises(DataError, match="expected queries with candidates"):
        sample_pairs(replace(collection, candidates=None), 50, 5, 8, 0, 0.2, 0.2)


@pytest.mark.parametrize("task", [BM25Score(), Relevance(pool=6)])
def test_no_query_is_in_two_parts(task) -> None:
    examples = list(task.examples(SAMPLE))
    parts = assign_parts(examples, SAMPLE, "query", 0.2, 0.2)
    where: dict[str, set[str]] = {}
    for example, part in zip(examples, parts, strict=True):
        where.setdefault(example.query_id, set()).add(part)
    assert all(len(found) == 1 for found in where.values())
    assert set(parts) == {"train", "val", "test"}


def test_groupings() -> None:
    examples = list(BM25Score().examples(SAMPLE))
    for group_by, key in (("doc", lambda e: e.doc_id), ("pair", lambda e: (e.query_id, e.doc_id))):
        parts = assign_parts(examples, SAMPLE, group_by, 0.2, 0.2)
        where: dict = {}
        for example, part in zip(examples, parts, strict=True):
            where.setdefault(key(example), set()).add(part)
        assert all(len(found) == 1 for found in where.values())
    by_query: dict = {}
    for example, part in zip(examples, parts, strict=True):
        by_query.setdefault(example.query_id, set()).add(part)
    assert any(len(found) > 1 for found in by_query.values()), (
        "the published split by pair puts one query on several sides"
    )
    with pytest.raises(ConfigError, match="group_by: expected one of query, doc, pair"):
        assign_parts(examples, SAMPLE, "author", 0.2, 0.2)


def test_parts_of_the_source_are_kept() -> None:
    named = [ProbeExample(f"q{i}", "d", "x", "y", (), "test" if i < 5 else "train") for i in range(20)]
    parts = assign_parts(named, SAMPLE, "query", 0.2, 0.2)
    assert parts[:5] == ["test"] * 5
    assert parts[5:].count("val") == 3, "validation is cut from train"
    whole = [replace(example, part=part) for example, part in zip(named, parts, strict=True)]
    assert assign_parts(whole, SAMPLE, "query", 0.5, 0.5) == parts
    for source in (named, whole):
        twice = [*source, replace(source[0], doc_id="e", part="train")]
        with pytest.raises(
            DataError, match=r"expected each query in one part, got 'q0' in test and (train|val) of its source"
        ):
            assign_parts(twice, SAMPLE, "query", 0.2, 0.2)
        assert assign_parts(twice, SAMPLE, "pair", 0.2, 0.2)[0] == "test"


def test_relevance_is_measured_by_both_thresholds() -> None:
    """Grade 2 is relevant to the collection; measures that count grade 1 as well have columns of their own."""
    qrels = {"a": {"x": 1, "y": 2, "z": 0}, "b": {"x": 1, "y": 0, "z": 2}}
    examples = [ProbeExample(query_id, doc_id, "q", doc_id, ()) for query_id in qrels for doc_id in "xyz"]
    data = SimpleNamespace(examples=examples, pairs_in=lambda part: range(6))
    collection = replace(mini_collection(), qrels=qrels, relevance=2)
    found = ranking_measures(data, np.array([3.0, 2, 1, 3, 2, 1]), collection)  # both are ranked x, y, z
    assert (found["AP"], found["RR"]) == pytest.approx((np.mean([1 / 2, 1 / 3]),) * 2)
    assert found["AP(rel=1)"] == pytest.approx(np.mean([1, (1 + 2 / 3) / 2]))
    assert found["RR(rel=1)"] == 1
    assert [found[name] for name in ("P@10", "P(rel=1)@10", "P(rel=1)@20")] == pytest.approx([0.1, 0.2, 0.1])
    assert set(found) == {*RANKING, *LENIENT} <= set(COLUMNS)
    binary = ranking_measures(data, np.arange(6), replace(collection, relevance=1))
    assert set(binary) == set(RANKING), "they would be the same numbers"


def test_bins_are_fitted_on_train_alone() -> None:
    data, _, _ = built(BM25Score())
    values = np.array([example.targets[0].value for example in data.examples])
    train = values[data.part == "train"]
    assert (data.bins.mean, data.bins.std) == (train.mean(), train.std())
    assert data.labels.tolist() == data.bins(values).tolist()
    assert data.record()["bins"]["edges"] == data.bins.edges.tolist()
    assert sum(data.record()["class_counts"]["train"]) == (data.part == "train").sum()


def test_hash_hangs_on_labels_texts_parts_and_labeller() -> None:
    first = built(BM25Score())[0].fingerprint
    assert built(BM25Score())[0].fingerprint == first
    assert built(BM25Score(k1=0.9))[0].fingerprint != first
    assert built(BM25Score(), mini_sample(seed=1))[0].fingerprint != first
    assert built(TermFrequency())[0].fingerprint != first


def test_labels_are_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = labelled_examples(BM25Score(), SAMPLE, tmp_path)
    assert made == list(BM25Score().examples(SAMPLE))
    monkeypatch.setattr(BM25Score, "score", lambda *_: pytest.fail("labelled again"))
    assert labelled_examples(BM25Score(), SAMPLE, tmp_path) == made
    with pytest.raises(pytest.fail.Exception):
        labelled_examples(BM25Score(b=0.5), SAMPLE, tmp_path)
    assert len([path for path in (tmp_path / "probe_labels").iterdir() if path.is_dir()]) == 1, (
        "the broken attempt left nothing"
    )


def test_labels_by_relevance_are_made_anew_for_another_threshold(tmp_path: Path) -> None:
    def positives(task, relevance: int) -> int:
        graded = {
            query_id: dict.fromkeys(judged, 1 + int(query_id[1:]) % 2)
            for query_id, judged in SAMPLE.collection.qrels.items()
        }
        collection = replace(SAMPLE.collection, qrels=graded, relevance=relevance)
        examples = labelled_examples(task, replace(SAMPLE, collection=collection), tmp_path)
        return sum(example.targets[0].label == "1" for example in examples)

    # one relevant doc for each of 24 queries, the candidates' first; those of the 12 odd queries have grade 2
    assert [positives(Relevance(), relevance) for relevance in (1, 2, 1)] == [24, 12, 24]
    for relevance in (1, 2):
        positives(BM25Score(), relevance)
    kept = [path.name.split("-")[0] for path in (tmp_path / "probe_labels").iterdir() if path.is_dir()]
    assert sorted(kept) == ["bm25", "rel", "rel"], "labels that do not hang on it are kept"


def prepared(tmp_path: Path, tasks, **options) -> list[str]:
    """What a study warns of before anything is encoded."""
    study = Study(
        [Subject("tiny", load_encoder("tiny"))],
        tasks,
        SAMPLE,
        StudyOptions(**options),
        TrainingOptions(),
        StateCache(tmp_path / "states"),
        tmp_path,
        torch.device("cpu"),
    )
    study.prepare()
    return study.warnings


def test_a_cache_of_the_spans_tokens_gives_the_same_numbers(tmp_path: Path) -> None:
    """Two-span targets of a word each; random words, control labels and a random encoder, too."""
    found, sizes, who = [], [], Subject("tiny", load_encoder("tiny"))
    for tokens in ("all", "spans"):
        cache = StateCache(tmp_path / tokens, dtype="float32", tokens=tokens)
        study = Study(
            [who],
            [Words()],
            SAMPLE,
            StudyOptions(seeds=(0,), controls=("random_embeddings", "control_task", "random_encoder"), workers=1),
            TrainingOptions(max_rounds=2),
            cache,
            tmp_path / tokens,
            torch.device("cpu"),
        )
        found.append({(r.control, r.layer): (r.code.bits, r.accuracy) for r in study.run().all})
        sizes.append(sum(path.stat().st_size for path in (tmp_path / tokens).glob("*/states.bin")))
    assert found[0] == found[1]
    assert len(found[0]) == 3 * 3 + 1
    assert 0 < sizes[1] < sizes[0] / 2


def test_spans_at_other_places_of_the_same_texts_take_no_kept_training(tmp_path: Path) -> None:
    """In a cache of the spans' tokens both sets of spans stand at the same places."""

    class Place(Words):
        def __init__(self, start: int) -> None:
            self.start, self.labeller = start, f"words@1 {start}"

        def examples(self, sample):
            for query_id, doc_id, query, doc in sample.texts():
                span = Span("doc", self.start, self.start + 3)
                yield ProbeExample(query_id, doc_id, query, doc, (Target((span,), "ab"[len(doc) % 2]),))

    def bits(start: int, folder: Path) -> float:
        cache = StateCache(folder, dtype="float32", tokens="spans")
        options = StudyOptions(seeds=(0,), controls=("random_embeddings",), workers=1)
        study = Study(
            [who], [Place(start)], SAMPLE, options, TrainingOptions(max_rounds=2), cache, folder, torch.device("cpu")
        )
        return next(r.code.bits for r in study.run().all if r.control == "random_embeddings")

    who = Subject("tiny", load_encoder("tiny"))
    first, second = bits(0, tmp_path / "kept"), bits(4, tmp_path / "kept")
    assert second == bits(4, tmp_path / "fresh") != first


def test_tokens_within_spans() -> None:
    spans = [np.array([[[1, 3]], [[2, 4]]]), np.array([[[6, 7], [9, 10]]])]  # two of one slot, one of two
    assert span_mask(spans, 10).nonzero()[0].tolist() == [1, 2, 3, 6, 9]


def test_warnings_follow_what_the_parts_share(tmp_path: Path) -> None:
    tasks = [BM25Score(), Relevance(pool=6)]
    rel = list(Relevance(pool=6).examples(SAMPLE))
    train_docs = {example.doc_id for example in rel if example.part == "train"}
    test_docs = [example.doc_id for example in rel if example.part == "test"]
    shared = f"rel {sum(doc_id in train_docs for doc_id in test_docs) / len(test_docs):.0%}"
    docs, queries = (
        "test pairs whose doc also occurs in a training pair: ",
        "test pairs whose query also occurs in a training pair: ",
    )
    own = f"{docs}{shared} (the task's source assigns the parts, group_by does not change them)"
    by_query, by_doc, by_pair = (prepared(tmp_path, tasks, group_by=group_by) for group_by in ("query", "doc", "pair"))
    assert not any(warning.startswith(queries) for warning in by_query)
    assert not any(warning.startswith(f"{docs}bm25") for warning in by_doc)
    for found in (by_query, by_doc, by_pair):
        assert own in found
    for found in (by_query, by_pair):
        assert any(
            warning.startswith(f"{docs}bm25 ") and warning.endswith("(group_by=doc avoids it)") for warning in found
        )
    for found in (by_doc, by_pair):
        assert [w.endswith("(group_by=query avoids it)") for w in found if w.startswith(f"{queries}bm25 ")] == [True]
        assert not any(warning.startswith(f"{queries}rel") for warning in found)


class Words:
    """Two-span targets on the doc's first and last word."""

    name, labeller, classes, whole_text, ranks = "words", "words@1", ("a", "b"), False, False

    def examples(self, sample):
        for query_id, doc_id, query, doc in sample.texts():
            last = doc.rindex(" ") + 1
            ends = Target((Span("doc", 0, 3), Span("doc", last, len(doc) - 1)), "ab"[len(doc) % 2])
            yield ProbeExample(
                query_id, doc_id, query, doc, (Target((Span("doc", 0, 3), Span("doc", 4, 8)), "a"), ends)
            )


def test_targets_beyond_the_truncation_are_left_out_and_counted() -> None:
    whole, _, _ = built(Words())
    assert (whole.num_cut, len(whole.labels)) == (0, 2 * len(SAMPLE.pairs))
    cut, sequences, pair_index = built(Words(), max_doc=20)
    assert cut.num_cut == len(SAMPLE.pairs) == len(cut.labels)
    assert span_array(cut, sequences, pair_index).shape == (len(cut.labels), 2, 2)
    assert cut.fingerprint != whole.fingerprint


def test_two_subjects_keep_the_targets_that_both_see() -> None:
    task = Words()
    examples = list(task.examples(SAMPLE))
    parts = assign_parts(examples, SAMPLE, "query", 0.2, 0.2)
    pairs = list(dict.fromkeys((example.query, example.doc) for example in examples))
    pair_index = {pair: place for place, pair in enumerate(pairs)}
    spans = [
        span_tokens(examples, Sequences.of(pairs, TOKENIZER, "pairs", 512, 64, limit), pair_index)
        for limit in (20, 256)
    ]
    assert build_data(task, examples, parts, spans).num_cut == len(SAMPLE.pairs)


def test_nothing_to_tell_apart_is_an_error() -> None:
    class Constant(Words):
        def examples(self, sample):
            for example in super().examples(sample):
                yield replace(example, targets=(Target((Span("doc"),), value=1.0),))

    with pytest.raises(DataError, match="got 1; change the labels of the task"):
        built(Constant())


def test_empty_classes_are_reported(tmp_path: Path) -> None:
    class TwoValues(Words):
        labeller, classes = "two@1", ()

        def examples(self, sample):
            for place, example in enumerate(super().examples(sample)):
                yield replace(example, targets=(Target((Span("doc"),), value=float(place % 4 == 0)),))

    assert (
        "words: 8 of the 10 classes have no training target; the cost of the first block, log2 10 bits per target, "
        "still counts them"
    ) in prepared(tmp_path, [TwoValues()])
    assert not any("no training target" in warning for warning in prepared(tmp_path, [Words()]))


# controls
# --------------------------------------------------------------------------------------------------------------


def test_control_labels_hang_on_the_type_and_keep_the_histogram() -> None:
    rng = np.random.default_rng(0)
    labels = rng.choice(4, 20_000, p=[0.6, 0.2, 0.15, 0.05])
    types = [f"type {i % 5_000}" for i in range(20_000)]
    made = control_labels(types, labels, np.arange(20_000) < 10_000, 4, seed=0)
    assert len({(kind, label) for kind, label in zip(types, made, strict=True)}) == 5_000, "one label a type"
    assert np.bincount(made) / 20_000 == pytest.approx([0.6, 0.2, 0.15, 0.05], abs=0.02)
    assert (made != control_labels(types, labels, np.arange(20_000) < 10_000, 4, seed=1)).mean() > 0.3
    assert np.mean(made == labels) < 0.5


def test_types() -> None:
    example = ProbeExample("q", "d", "What is the Java sandbox?", "New  York Times", ())
    assert type_of(example, Target((Span("query"), Span("doc")), "1")) == "java"
    assert type_of(example, Target((Span("doc", 0, 9),), "GPE")) == "new york"


def test_shuffled_labels_stay_in_their_part() -> None:
    labels, parts = np.arange(300) % 7, np.repeat(["train", "val", "test"], 100)
    made = shuffled_labels(labels, parts, 0)
    for part in np.unique(parts):
        assert sorted(made[parts == part]) == sorted(labels[parts == part])
    assert (made == labels).mean() < 0.3


def test_surface_features_by_hand() -> None:
    # stems: [red, bird] and [red, bird, red, fox]: shared red and bird, tf (2/4 + 1/4) / 2
    assert surface_features("The red birds", "A red bird, a red fox") == [2, 4, 2, 1, 0.375]
    assert surface_features("", "text") == [0, 1, 0, 0, 0]
