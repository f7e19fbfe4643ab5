"""Label formulas against hand-computed values and slow reference forms."""

import math
from pathlib import Path

import numpy as np
import pytest

from ranker.data.collection import Candidates, Collection, Doc, MemoryDocs
from ranker.errors import ConfigError, DataError
from ranker.probing.collection_statistics import CollectionStatistics
from ranker.probing.examples import PairSample, TaskUnavailable
from ranker.probing.tasks.bm25 import BM25Score, idf
from ranker.probing.tasks.coref import Coreference
from ranker.probing.tasks.rel import Relevance
from ranker.probing.tasks.sem import SemanticSimilarity
from ranker.probing.tasks.tf import TermFrequency, term_frequency
from ranker.probing.tasks.tfidf import TFIDFScore
from ranker.probing.word_vectors import WordVectors, cosine_of_means, mean_pairwise_cosine, ppmi_svd, read_vectors, unit
from ranker.probing.words import content_stems, first_content_word, standard_words
from ranker.retrieval.tfidf import TFIDF


def sample_of(
    queries: dict[str, str], docs: dict[str, str], pairs: list[tuple[str, str]], qrels: dict | None = None
) -> PairSample:
    candidates = Candidates.from_lists(
        (query_id, list(docs), [float(-i) for i in range(len(docs))]) for query_id in queries
    )
    collection = Collection("mini", MemoryDocs(Doc(*item) for item in docs.items()), queries, qrels or {}, candidates)
    return PairSample(collection, tuple(pairs), 100, 10, 100, 0, dict.fromkeys(queries, "train"))


CATS = sample_of(
    {"q": "cat dog"},
    {"1": "cat sat", "2": "cat cat dog ran", "3": "bird sang song"},
    [("q", "2"), ("q", "1"), ("q", "3")],
)


@pytest.mark.parametrize(("keep", "expected"), [(False, [0.660905, None, 0.0]), (True, [1.453991, 0.544215, 0.0])])
def test_bm25_by_hand(keep: bool, expected: list[float | None]) -> None:
    scores = [example.targets[0].value for example in BM25Score(keep_k1_plus_1=keep).examples(CATS)]
    for score, value in zip(scores, expected, strict=True):
        assert value is None or score == pytest.approx(value, abs=1e-6)


def test_bm25_idf_by_hand() -> None:
    """3 docs: cat in 2, dog in 1: ln(1 + 1.5 / 2.5) and ln(1 + 2.5 / 1.5); mean length (2 + 4 + 3) / 3."""
    docs = (standard_words(doc.text) for doc in CATS.collection.docs)
    statistics = CollectionStatistics.of(docs, {"cat", "dog"})
    assert statistics.mean_length == 3
    assert idf("cat", statistics) == pytest.approx(0.470004, abs=1e-6)
    assert idf("dog", statistics) == pytest.approx(0.980829, abs=1e-6)


def test_bm25_counts_repeated_query_words_and_whole_collection_statistics() -> None:
    twice = sample_of(
        {"q": "cat cat dog"}, {"1": "cat sat", "2": "cat cat dog ran", "3": "bird sang song"}, [("q", "2")]
    )
    once, more = (next(iter(BM25Score().examples(sample))).targets[0].value for sample in (CATS, twice))
    cat = 2.2 * 0.470004 * 2 / (2 + 1.2 * (0.25 + 0.75 * 4 / 3))
    assert more - once == pytest.approx(cat, abs=1e-5)


def test_tfidf_by_hand_and_as_the_first_stage_scores_it() -> None:
    """3 docs: cat in 2, dog in 1. Doc 2 has cat twice: (1 + ln 2) ln(3 / 2) + ln 3; doc 1 has it once."""
    scores = [example.targets[0].value for example in TFIDFScore().examples(CATS)]
    expected = [(1 + math.log(2)) * math.log(1.5) + math.log(3), math.log(1.5), 0.0]
    assert scores == pytest.approx(expected, abs=1e-12)
    found = TFIDF(CATS.collection.docs, stemmer=None, stopwords=None).search(CATS.collection.queries, 3).to_run()["q"]
    assert found["2"] == pytest.approx(scores[0], abs=1e-6) and found["1"] == pytest.approx(scores[1], abs=1e-6)
    twice = sample_of(
        {"q": "cat cat dog"}, {"1": "cat sat", "2": "cat cat dog ran", "3": "bird sang song"}, [("q", "1")]
    )
    assert next(iter(TFIDFScore().examples(twice))).targets[0].value == pytest.approx(2 * math.log(1.5))
    stemmed = TFIDFScore(analyzer="stemmed")
    (plural,) = stemmed.examples(sample_of({"q": "cats"}, {"1": "the cat", "2": "a dog"}, [("q", "1")]))
    assert plural.targets[0].value == pytest.approx(math.log(2)) and stemmed.labeller != TFIDFScore().labeller


def test_bm25_words_are_those_of_a_standard_analyser() -> None:
    assert standard_words("The U.S. Senate's 3,000.5 files: foo_bar, naïve-approach; O'Neil!") == [
        "the", "u.s", "senate's", "3,000.5", "files", "foo_bar", "naïve", "approach", "o'neil",
    ]  # fmt: skip


def test_tf_by_hand() -> None:
    """Words after stop words and stemming: query [run, dog] (2), doc [dog, run, fast, dog] (4): (1/4 + 2/4) / 2."""
    assert content_stems("The running dogs") == ["run", "dog"]
    assert content_stems("A dog ran? Runs fast, dogs!") == ["dog", "ran", "run", "fast", "dog"]
    assert term_frequency(["run", "dog"], ["dog", "run", "fast", "dog"]) == pytest.approx(0.375, abs=1e-6)
    assert term_frequency([], ["dog"]) == 0, "an empty query is 0, not NaN"
    assert term_frequency(["dog"], []) == 0
    values = [example.targets[0].value for example in TermFrequency().examples(CATS)]
    assert values == pytest.approx([(2 / 4 + 1 / 4) / 2, (1 / 2) / 2, 0], abs=1e-6)


def test_tf_legacy_case_keeps_capitalised_stop_words_and_has_its_own_name() -> None:
    assert content_stems("The dog", legacy_case=True) == ["the", "dog"]
    assert TermFrequency(legacy_case=True).name != TermFrequency().name
    assert TermFrequency(legacy_case=True).labeller != TermFrequency().labeller


def test_sem_product_of_means_is_the_mean_of_all_pairs() -> None:
    rng = np.random.default_rng(0)
    doc, query = rng.normal(size=(17, 50)), rng.normal(size=(5, 50))
    slow = np.mean([d @ q / np.linalg.norm(d) / np.linalg.norm(q) for d in doc for q in query])
    assert mean_pairwise_cosine(doc, query) == pytest.approx(slow, abs=1e-6)
    other = cosine_of_means(doc, query)
    assert other == pytest.approx(unit(doc.mean(0)) @ unit(query.mean(0)), abs=1e-6)
    assert abs(other - slow) > 1e-3, "the two definitions differ"
    assert mean_pairwise_cosine(doc[:0], query) == 0


def test_sem_unknown_words_have_the_mean_of_all_vectors(tmp_path: Path) -> None:
    path = tmp_path / "tiny.txt"
    path.write_text("cat 1 0\ndog 0 1\nfox 2 2\n")
    vectors = read_vectors(path, {"cat", "unheard"})
    assert vectors.of(["cat", "unheard"]).tolist() == [[1, 0], [1, 1]], (
        "fox and dog count for the mean though nobody asked for them"
    )
    task = SemanticSimilarity(vectors=str(path))
    assert task.name == "sem_tiny"
    values = [example.targets[0].value for example in task.examples(CATS)]
    # doc 2: cat cat dog ran(unknown: 1, 1); query: cat dog
    doc = unit(np.array([[1.0, 0], [1, 0], [0, 1], [1, 1]])).mean(0)
    assert values[0] == pytest.approx(doc @ np.array([0.5, 0.5]), abs=1e-6)


def test_sem_vector_file_is_part_of_the_hash_and_may_be_missing(tmp_path: Path) -> None:
    path = tmp_path / "v.txt"
    path.write_text("cat 1 0\n")
    before = SemanticSimilarity(vectors=str(path)).labeller
    path.write_text("cat 1 0.5\n")
    assert SemanticSimilarity(vectors=str(path)).labeller != before
    with pytest.raises(TaskUnavailable, match=r"probe\.sem\.vectors"):
        list(SemanticSimilarity(vectors=str(tmp_path / "none.txt")).examples(CATS))
    path.write_text("cat 1 0\ndog 1\n")
    with pytest.raises(DataError, match=r"v\.txt:2: expected 2 numbers"):
        read_vectors(path, {"cat"})
    path.write_text("cat 1 0\ndog 1 2 3\n")
    with pytest.raises(DataError, match=r"v\.txt:2: expected 2 numbers as in the first line, got 3"):
        read_vectors(path, {"cat"})
    with pytest.raises(ConfigError, match="similarity"):
        SemanticSimilarity(similarity="euclid")


def test_words_of_a_vector_file_may_hold_spaces(tmp_path: Path) -> None:
    """As glove.840B's `. . .` and `at name@domain.com`; word2vec's lines end with a space."""
    path = tmp_path / "v.txt"
    path.write_text("cat 1 0\n. . . 3 4\nat name@domain.com 5 2 \n")
    vectors = read_vectors(path, {"cat", ". . .", "at name@domain.com"})
    assert vectors.of([". . .", "at name@domain.com", "unheard"]).tolist() == [[3, 4], [5, 2], [3, 2]]


def test_sem_vectors_of_words_in_like_company_are_alike() -> None:
    rng = np.random.default_rng(0)
    animals, machines = ["cat", "dog", "fox"], ["cpu", "gpu", "ram"]
    docs = []
    for _ in range(300):
        docs.append([str(rng.choice(animals)), "eats", "meat", "and", str(rng.choice(animals)), "sleeps"])
        docs.append([str(rng.choice(machines)), "computes", "sums", "with", str(rng.choice(machines)), "fast"])
    vectors = ppmi_svd(docs, dim=8)
    assert isinstance(vectors, WordVectors)
    cat, dog, gpu = unit(vectors.of(["cat", "dog", "gpu"]))
    assert cat @ dog > 0.8 > 0.3 > abs(cat @ gpu)


def test_sem_ppmi_against_dense_formula() -> None:
    """With the whole spectrum, v v' is the (symmetric) PPMI matrix, up to signs of negative eigenvalues."""
    docs = [["a", "b", "c", "a"], ["b", "c", "d"], ["a", "d", "d", "b"]] * 3
    words = ["a", "b", "c", "d"]
    counts = np.zeros((4, 4))
    for doc in docs:
        for i, left in enumerate(doc):
            for right in doc[i + 1 : i + 3]:
                counts[words.index(left), words.index(right)] += 1
                counts[words.index(right), words.index(left)] += 1
    shares = counts / counts.sum()
    with np.errstate(divide="ignore"):
        ppmi = np.maximum(np.log(shares / shares.sum(1, keepdims=True) / shares.sum(0, keepdims=True)), 0)
    made = ppmi_svd(docs, dim=3, window=2, min_count=1)
    left, singular, _ = np.linalg.svd(ppmi)
    reference = left[:, :3] * np.sqrt(singular[:3])
    own = made.of(words)
    assert np.allclose(own @ own.T, reference @ reference.T, atol=1e-6)


def test_rel_labels_and_pools() -> None:
    docs = {str(i): f"text {i}" for i in range(30)}
    qrels = {"q1": {"3": 1, "29": 2, "5": 0}, "q2": {"4": 1}}
    sample = sample_of({"q1": "one", "q2": "two"}, docs, [], qrels)
    sample = PairSample(sample.collection, (), 100, 4, 100, 0, {"q1": "train", "q2": "test"})
    train, test = (
        [e for e in Relevance(pool=20).examples(sample) if e.query_id == query_id] for query_id in ("q1", "q2")
    )
    assert sorted(e.doc_id for e in train if e.targets[0].label == "1") == ["29", "3"]
    assert sum(e.targets[0].label == "0" for e in train) == 2, "one irrelevant candidate for each relevant doc"
    assert [e.doc_id for e in test] == [str(i) for i in range(20)], (
        "the test re-ranks what the first stage found, as it found it"
    )
    assert [e.doc_id for e in test if e.targets[0].label == "1"] == ["4"]
    with pytest.raises(DataError, match=r"probe\.rel: expected judgements"):
        list(Relevance().examples(CATS))


def test_first_content_word() -> None:
    assert first_content_word("What is the Java sandbox?") == "java"
    assert first_content_word("to be or not to be") == "to"
    assert first_content_word("?!") == ""


def test_variants_have_names_of_their_own() -> None:
    made = [
        BM25Score(),
        BM25Score(analyzer="stemmed"),
        BM25Score(k1=0.9, b=0.4),
        TFIDFScore(),
        TFIDFScore(analyzer="stemmed"),
        SemanticSimilarity(),
        SemanticSimilarity("glove.6B.50d.txt"),
        SemanticSimilarity("glove.6B.300d.txt"),
        SemanticSimilarity(similarity="mean_vec"),
        Coreference(),
        Coreference(exclude_copies=True),
        Coreference("other"),
    ]
    assert [task.name for task in made] == [
        "bm25",
        "bm25_stemmed",
        "bm25_k1_0.9_b_0.4",
        "tfidf",
        "tfidf_stemmed",
        "sem_svd",
        "sem_glove_6B_50d",
        "sem_glove_6B_300d",
        "sem_svd_mean_vec",
        "coref_head",
        "coref_head_nocopy",
        "coref_head_other",
    ]
