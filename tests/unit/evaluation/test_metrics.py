"""Measures: trec_eval's values for the known traps, names, thresholds, warnings, and faults of the libraries."""

import math

import numpy as np
import pytest

from ranker.errors import ConfigError, DataError
from ranker.evaluation.measure_names import parse_measures, with_relevance
from ranker.evaluation.metrics import evaluate


def run_of(text: str) -> dict[str, dict[str, float]]:
    run: dict[str, dict[str, float]] = {}
    for query, doc, score in (row.split() for row in text.split(" / ")):
        run.setdefault(query, {})[doc] = float(score)
    return run


def qrels_of(text: str) -> dict[str, dict[str, int]]:
    qrels: dict[str, dict[str, int]] = {}
    for query, doc, relevance in (row.split() for row in text.split(" / ")):
        qrels.setdefault(query, {})[doc] = int(relevance)
    return qrels


def means(run: str, qrels: str, measures: list[str], relevance: int = 1) -> dict[str, float]:
    return evaluate(run_of(run), qrels_of(qrels), measures, relevance).means


def close(values: dict[str, float]) -> object:
    return pytest.approx(values, abs=5e-7)


# values
# ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", ["q1 d10 0.5 / q1 d9 0.5", "q1 d9 0.5 / q1 d10 0.5"])
def test_pc01_ties_by_doc_id(run):
    names = ["AP", "RR", "P@1", "nDCG@10"]
    assert means(run, "q1 d9 1 / q1 d10 0", names) == dict.fromkeys(names, 1.0)
    assert means(run, "q1 d9 0 / q1 d10 1", names) == close({"AP": 0.5, "RR": 0.5, "P@1": 0.0, "nDCG@10": 0.630930})


def test_pc02_rr_with_and_without_cutoff_come_from_one_ranking():
    names = ["RR", "RR@10", "AP", "nDCG@10"]
    assert means("q1 d10 0.5 / q1 d9 0.5", "q1 d9 1 / q1 d10 0", names) == dict.fromkeys(names, 1.0)


def test_pc02_every_measure_sees_the_same_order_of_ties():
    """Also those whose evaluators break ties the other way round (Judged, Compat) or not at all (Accuracy)."""
    names = ["RR@1", "Judged@1", "Compat(p=0.5)", "Accuracy", "P@1", "Success@1", "nDCG(dcg='exp-log2')@1"]
    tied = means("q1 a 0.5 / q1 b 0.5 / q1 c 0.5", "q1 b 1 / q1 c 2", names)
    assert tied == means("q1 c 3 / q1 b 2 / q1 a 1", "q1 b 1 / q1 c 2", names)
    assert tied == dict.fromkeys(names, 1.0)


def test_pc04_judged_query_without_results_counts_zero():
    evaluation = evaluate(
        run_of("q1 d1 1.0 / q2 x 2.0 / q2 d2 1.0 / q3 x 1.0"),
        qrels_of("q1 d1 1 / q2 d2 1 / q3 d3 1 / q4 d4 1"),
        ["AP", "RR@10", "RR", "nDCG@10", "NumQ", "NumRel"],
    )
    assert evaluation.means == close(
        {"AP": 0.375, "RR@10": 0.375, "RR": 0.375, "nDCG@10": 0.407732, "NumQ": 4.0, "NumRel": 4.0}
    )
    assert evaluation.num_queries == 4
    assert evaluation.num_without_results == 1
    assert evaluation.per_query["q4"] == {
        "AP": 0.0,
        "RR@10": 0.0,
        "RR": 0.0,
        "nDCG@10": 0.0,
        "NumQ": 1.0,
        "NumRel": 1.0,
    }
    assert evaluation.per_query["q2"] == close(
        {"AP": 0.5, "RR@10": 0.5, "RR": 0.5, "nDCG@10": 0.630930, "NumQ": 1.0, "NumRel": 1.0}
    )
    assert evaluation.warnings == ["1 judged query has no results and counts 0, for example 'q4'"]


def test_pc05_query_whose_judgements_are_all_zero():
    names = ["AP", "RR", "RR@10", "nDCG", "nDCG@10", "R@10", "Rprec", "Bpref", "infAP"]
    evaluation = evaluate(run_of("q1 d1 1.0 / q2 d2 1.0"), qrels_of("q1 d1 1 / q2 d2 0"), names)
    assert evaluation.means == dict.fromkeys(names, 0.5)
    assert evaluation.num_queries == 2
    assert evaluation.num_without_relevant == 1
    assert evaluation.warnings == [
        "1 query has no relevant document and can only score 0 in binary measures, for example 'q2'"
    ]


def test_pc08_a_repeated_judgement_that_was_collapsed_gives_a_perfect_run():
    assert means("q1 d1 3.0", "q1 d1 1 / q1 d1 1", ["AP", "nDCG@10"]) == {"AP": 1.0, "nDCG@10": 1.0}


def test_pc10_ndcg_has_linear_gain_and_exponential_gain_has_another_name():
    """Together in one call: ir-measures 0.4.3 by itself then computes nDCG@10 with the exponential gains."""
    names = ["nDCG@10", "nDCG(dcg='exp-log2')@10", "nDCG(gains={3:1,2:5})@10", "AP", "RR"]
    expected = [0.789998, 0.680606, (1 + 5 / math.log2(3) + 1 / 2) / (5 + 1 / math.log2(3) + 1 / 2), 1.0, 1.0]
    got = means("q1 d3 3 / q1 d2 2 / q1 d1 1", "q1 d1 3 / q1 d2 2 / q1 d3 1", names)
    assert list(got.values()) == pytest.approx(expected, abs=5e-7)
    assert list(got)[:2] == ["nDCG@10", "nDCG(dcg='exp-log2')@10"]


def test_pc11_threshold_two_is_in_value_and_name():
    got = means(
        "q1 d3 3 / q1 d2 2 / q1 d1 1",
        "q1 d1 3 / q1 d2 2 / q1 d3 1",
        ["AP", "RR@10", "nDCG@10", "P@2", "R@2"],
        relevance=2,
    )
    assert got == close(
        {"AP(rel=2)": 0.583333, "RR(rel=2)@10": 0.5, "nDCG@10": 0.789998, "P(rel=2)@2": 0.5, "R(rel=2)@2": 0.5}
    )


def test_pc11_ndcg_is_untouched_where_no_doc_reaches_the_threshold():
    evaluation = evaluate(
        run_of("q1 x 3 / q1 b 2 / q1 a 1"), qrels_of("q1 a 1 / q1 b 1"), ["AP", "nDCG@10", "NumRel"], relevance=2
    )
    expected = (1 / math.log2(3) + 1 / 2) / (1 + 1 / math.log2(3))
    assert evaluation.means == close({"AP(rel=2)": 0.0, "nDCG@10": expected, "NumRel(rel=2)": 0.0})
    assert evaluation.warnings == [
        "1 query has no relevant document (grade 2 or higher) and can only score 0 in binary measures, for example 'q1'"
    ]


def test_pc13_ap_and_ndcg_divide_by_all_relevant_docs():
    got = means("q1 d1 3.0 / q1 x 2.0 / q1 d2 1.0", "q1 d1 1 / q1 d2 1 / q1 d3 1", ["AP", "nDCG@10", "R@10", "AP@2"])
    assert got == close({"AP": 0.555556, "nDCG@10": 0.703918, "R@10": 0.666667, "AP@2": 0.333333})


def test_pc14_a_relevant_doc_that_the_first_stage_missed_is_not_added():
    evaluation = evaluate(run_of("q1 a 2.0 / q1 b 1.0"), qrels_of("q1 z 1"), ["AP", "RR@10", "nDCG@10"])
    assert evaluation.means == {"AP": 0.0, "RR@10": 0.0, "nDCG@10": 0.0}
    assert evaluation.num_queries == 1


def test_pc16_rr_takes_the_first_relevant_doc():
    assert means("q1 d1 3 / q1 d2 2 / q1 d3 1", "q1 d1 1 / q1 d3 1", ["RR", "RR@10", "AP"]) == close(
        {"RR": 1.0, "RR@10": 1.0, "AP": 0.833333}
    )


def test_pc17_all_candidates_of_a_query_are_ranked_together():
    got = means("q1 d1 0.9 / q1 d2 0.8 / q1 d3 0.7 / q1 d4 0.1", "q1 d3 1", ["RR", "AP", "nDCG@10"])
    assert got == close({"RR": 1 / 3, "AP": 1 / 3, "nDCG@10": 0.5})


def test_pc19_all_digits_of_a_score_count():
    """The second pair differs in float64 alone, where pytrec_eval (float32) sees a tie."""
    names = ["AP", "RR@10", "nDCG@10"]
    assert means("q1 dA 12.34564 / q1 dB 12.34561", "q1 dA 1 / q1 dB 0", names) == dict.fromkeys(names, 1.0)
    assert means("q1 dA 12.3456400000001 / q1 dB 12.34564", "q1 dA 1 / q1 dB 0", names) == dict.fromkeys(names, 1.0)


def test_pc20_scores_count_not_ranks():
    got = means("q1 da 1 / q1 db 2", "q1 da 1 / q1 db 0", ["AP", "RR", "P@1", "nDCG@10"])
    assert got == close({"AP": 0.5, "RR": 0.5, "P@1": 0.0, "nDCG@10": 0.630930})


@pytest.mark.parametrize(
    ("rank", "cutoff", "expected"),
    [(10, 10, 0.1), (11, 10, 0.0), (1, 1, 1.0), (2, 1, 0.0), (49, 49, 1 / 49), (50, 49, 0)],
)
def test_rr_with_cutoff_at_the_edge(rank, cutoff, expected):
    run = {"q1": {f"d{i}": -float(i) for i in range(1, 61)}}
    assert evaluate(run, {"q1": {f"d{rank}": 1}}, [f"RR@{cutoff}"]).means == {f"RR@{cutoff}": expected}


def test_negative_grades_are_not_relevant_and_gain_nothing():
    """As trec_eval: a retrieved doc of grade -1 only takes a rank (b is second: 1/2 and 1/log2 3)."""
    got = means(
        "q1 a 3 / q1 b 2 / q1 c 1", "q1 a -1 / q1 b 2 / q1 c -2", ["AP", "nDCG@10", "RR@10", "P@2", "R@2", "NumRel"]
    )
    assert got == close({"AP": 0.5, "nDCG@10": 0.630930, "RR@10": 0.5, "P@2": 0.5, "R@2": 1.0, "NumRel": 1.0})


def test_only_negative_grades_do_not_crash_the_evaluator():
    """pytrec_eval reads beyond its tables for such a query."""
    names = ["AP", "nDCG", "nDCG@10", "Bpref", "RR@10", "Rprec", "infAP", "R@2", "P@2", "SetF"]
    for relevance in (1, 3):
        for grade in (-1, -2, -3):
            evaluation = evaluate(run_of("q1 a 1 / q1 b 2"), qrels_of(f"q1 a {grade}"), names, relevance)
            assert set(evaluation.means.values()) == {0.0}


def test_counts_are_sums_and_judged_only_measures_do_not_disturb_them():
    """ir-measures 0.4.3 alone returns the number of judged docs as NumRet if P(judged_only=True) is computed, too."""
    got = means(
        "q1 a 3 / q1 x 2 / q1 b 1 / q2 y 1",
        "q1 a 1 / q1 b 1 / q2 c 1",
        ["P(judged_only=True)@2", "NumRet", "NumRelRet", "P@2"],
    )
    assert got == {"P(judged_only=True)@2": 0.5, "NumRet": 4.0, "NumRet(rel=1)": 2.0, "P@2": 0.25}


def test_values_do_not_depend_on_the_number_of_queries_taken_at_once(monkeypatch):
    generator = np.random.default_rng(0)
    run = {f"q{i}": {f"d{doc}": float(generator.integers(0, 5)) for doc in range(20)} for i in range(30)}
    qrels = {
        f"q{i}": {f"d{doc}": int(generator.integers(0, 4)) for doc in generator.permutation(25)[:6]}
        for i in range(2, 33)
    }
    names = ["AP", "RR@3", "nDCG@5", "nDCG(dcg='exp-log2')@5", "NumRel", "Judged@5"]
    whole = evaluate(run, qrels, names)
    monkeypatch.setattr("ranker.evaluation.metrics._QUERIES_AT_ONCE", 4)
    assert evaluate(run, qrels, names) == whole


def test_numpy_scores_and_grades_are_taken():
    run = {"q1": {"a": np.float32(0.5), "b": np.float64(0.25), "c": 1}}
    assert evaluate(run, {"q1": {"b": np.int64(1)}}, ["RR"]).means == close({"RR": 1 / 3})


# warnings and faults
# ----------------------------------------------------------------------------------------------------


def test_pc22_ids_that_only_look_alike():
    evaluation = evaluate(run_of("01 d1 1.0"), qrels_of("1 d1 1"), ["AP"])
    assert evaluation.means == {"AP": 0.0}
    assert (
        evaluation.warnings[0]
        == "0 of 1 judged queries found in the run: the qrels have ids like '1', the run has ids like '01'"
    )
    assert evaluation.warnings[1] == "1 query of the run is not judged and was ignored, for example '01'"
    assert evaluate({}, qrels_of("1 d1 1"), ["AP"]).warnings == [
        "0 of 1 judged queries found in the run: the qrels have ids like '1', the run is empty"
    ]


def test_pc23_no_overlap_of_docs_shows_an_id_of_each_side():
    run = run_of("q1 urn:doc:0123456789-a 5.0 / q9 x 1 / q8 x 1")
    evaluation = evaluate(run, qrels_of("q1 urn:doc:0123456789-abcdefghij 1"), ["AP", "RR", "nDCG@10"])
    assert evaluation.means == {"AP": 0.0, "RR": 0.0, "nDCG@10": 0.0}
    assert evaluation.warnings == [
        "none of the judged documents of any query occurs in the run: "
        "for query 'q1' 'urn:doc:0123456789-abcdefghij' is judged, "
        "the run has 'urn:doc:0123456789-a'; compare the ids",
        "2 queries of the run are not judged and were ignored, for example 'q9'",
    ]
    assert evaluation.num_ignored == 2


def test_a_good_run_has_no_warnings():
    assert evaluate(run_of("q1 a 1"), qrels_of("q1 a 1"), ["AP"]).warnings == []


@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("query", ["q1", "q9"], ids=["judged", "not judged"])
def test_scores_that_are_not_finite_are_named(score, query):
    run = {"q1": {"a": 1.0}, "q9": {"a": 1.0}}
    run[query]["b"] = score
    with pytest.raises(DataError, match=f"run: expected a finite score for query '{query}' and doc 'b', got {score}"):
        evaluate(run, qrels_of("q1 a 1"), ["AP"])


@pytest.mark.parametrize("qrels", [{}, {"q1": {}}])
def test_no_judged_query_at_all(qrels):
    with pytest.raises(DataError, match="expected at least one judged query, got none"):
        evaluate(run_of("q1 a 1"), qrels, ["AP"])


@pytest.mark.parametrize("relevance", [10_001, 1.5])
def test_grades_that_are_no_grades(relevance):
    with pytest.raises(
        DataError, match=f"expected whole grades up to 10000, got {relevance} for query 'q1' and doc 'a'"
    ):
        evaluate(run_of("q1 a 1"), {"q1": {"a": relevance}}, ["AP"])


def test_exponential_gain_of_large_grades_is_refused():
    with pytest.raises(DataError, match="expected grades up to 13"):
        evaluate(run_of("q1 a 1"), {"q1": {"a": 14}}, ["nDCG(dcg='exp-log2')@10"])


# names
# ----------------------------------------------------------------------------------------------------


def test_names_are_canonical_and_repeats_are_one():
    names = ["MAP", "AP", "MRR@10", "NDCG@10", " P@5 ", "Recall@100", "AP(rel=2)"]
    assert [str(measure) for measure in parse_measures(names)] == [
        "AP",
        "RR@10",
        "nDCG@10",
        "P@5",
        "R@100",
        "AP(rel=2)",
    ]
    assert parse_measures(parse_measures(names)) == parse_measures(names)


def test_relevance_is_given_to_binary_measures_that_do_not_carry_it():
    names = [
        "AP",
        "RR@10",
        "P@10",
        "R@100",
        "Rprec",
        "Success@1",
        "AP(rel=3)",
        "RR(rel=1)",
        "nDCG@10",
        "Judged@10",
        "NumRet",
    ]
    assert [str(measure) for measure in with_relevance(parse_measures(names), 2)] == [
        "AP(rel=2)", "RR(rel=2)@10", "P(rel=2)@10", "R(rel=2)@100", "Rprec(rel=2)", "Success(rel=2)@1",
        "AP(rel=3)", "RR", "nDCG@10", "Judged@10", "NumRet",
    ]  # fmt: skip
    assert with_relevance(parse_measures(names), 1) == parse_measures(names)
    assert [str(m) for m in with_relevance(parse_measures(["AP", "AP(rel=2)"]), 2)] == ["AP(rel=2)"]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("ndcg@10", "did you mean nDCG@10?"),
        ("nCDG@10", "did you mean nDCG@10?"),
        ("mrr@10", "did you mean MRR@10?"),
        ("ndcg_cut_10", "did you mean nDCG@10?"),
        ("recip_rank", "did you mean RR?"),
        ("map", "did you mean AP?"),
        ("P", "give it a cutoff, as P@10"),
        ("R(rel=2)", "give it a cutoff, as R@10"),
        ("nDCG(rel=2)@10", "unsupported params found: ['rel']"),
        ("banana", "https://ir-measur.es lists them"),
        ("", "https://ir-measur.es lists them"),
        ("RR@ten", "values must be str, float, int"),
        ("RR@10.5", "invalid param cutoff=10.5"),
        ("P@0", "expected a cutoff of at least 1"),  # would abort the whole process
        ("nDCG@True", "expected a cutoff of at least 1"),
        ("AP(rel=0)", "expected a rel of at least 1"),
        ("IPrec@0.123", "at most two decimals"),  # trec_eval would answer for 0.12
        ("nDCG(gains={1:1000000})@10", "expected whole gains up to 10000"),
        ("RBP", "no installed evaluator"),
        ("ERR@10", "no installed evaluator"),
        (10, "https://ir-measur.es lists them"),
    ],
)
def test_wrong_names_are_named_with_a_hint(name, hint):
    with pytest.raises(ConfigError) as error:
        parse_measures(["AP", name])
    message = str(error.value)
    assert repr(name) in message
    assert hint in message
    assert "\n" not in message


def test_all_wrong_names_are_named_at_once():
    with pytest.raises(ConfigError) as error:
        parse_measures(["banana", "AP", "P"])
    assert ["'banana'" in line or "'P'" in line for line in str(error.value).split("\n")] == [True, True]


@pytest.mark.parametrize("names", [[], "AP"])
def test_measures_are_a_list(names):
    with pytest.raises(ConfigError, match="measures: expected a list of ir-measures names"):
        parse_measures(names)


def test_relevance_below_one_is_refused():
    with pytest.raises(ConfigError, match="relevance: expected a grade of at least 1, got 0"):
        evaluate(run_of("q1 a 1"), qrels_of("q1 a 1"), ["AP"], relevance=0)
