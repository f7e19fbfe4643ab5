"""The numbers of a suite: hand-computed measures, macro means and shares; the bootstrap beside known distributions."""

import io
import math

import numpy as np
import pytest
from rich.console import Console

from ranker.data.trec import write_qrels, write_run
from ranker.evaluation.measure_names import names_with_relevance
from ranker.evaluation.suite import SuiteSet, bootstrap_interval, oracle, read_set, summarise
from ranker.evaluation.suite_report import draw, print_suite, rows_of, write_picture

# one: the first stage has the relevant doc at rank 2, 1, 3; the run at 1, 2, 3
ONE = SuiteSet(
    run={"q1": {"a": 3.0, "b": 2.0}, "q2": {"a": 2.0, "b": 3.0}, "q3": {"a": 3.0, "b": 2.0, "c": 1.0}},
    qrels={"q1": {"a": 1}, "q2": {"a": 1}, "q3": {"c": 1, "x": 1}},
    first_stage={"q1": {"a": 1.0, "b": 2.0}, "q2": {"a": 2.0, "b": 1.0}, "q3": {"a": 3.0, "b": 2.0, "c": 1.0}},
)
# two: grade 2 is relevant; q1's relevant doc is at rank 2 in both, q2 has none
TWO = SuiteSet(
    run={"q1": {"a": 3.0, "b": 2.0}, "q2": {"a": 1.0}},
    qrels={"q1": {"a": 1, "b": 2}, "q2": {"a": 1}},
    relevance=2,
    first_stage={"q1": {"a": 9.0, "b": 8.0}, "q2": {"a": 1.0}},
)


def test_the_oracle_is_the_best_order_of_the_candidates_not_of_all_docs():
    content = summarise({"one": ONE}, ["RR@10", "R@10"])
    assert content["sets"]["one"]["oracle"]["RR@10"] == 1.0
    # q3's other relevant doc x is not among the candidates
    assert content["sets"]["one"]["oracle"]["R@10"] == pytest.approx((1 + 1 + 0.5) / 3)
    assert oracle(ONE.run, {}) == {q: dict.fromkeys(docs, 0.0) for q, docs in ONE.run.items()}


def test_a_set_by_hand():
    entry = summarise({"one": ONE}, ["RR@10"])["sets"]["one"]
    assert entry["run"]["RR@10"] == pytest.approx((1 + 1 / 2 + 1 / 3) / 3)
    assert entry["first_stage"]["RR@10"] == pytest.approx((1 / 2 + 1 + 1 / 3) / 3)
    assert entry["worse"] == {"RR@10": pytest.approx(1 / 3)}
    compared = entry["comparison"]
    assert compared["against"] == "first_stage"
    assert [compared["RR@10"][key] for key in ("wins", "losses", "ties")] == [1, 1, 1]
    assert compared["RR@10"]["delta"] == pytest.approx(0)


def test_the_macro_mean_is_over_sets_not_over_queries_and_thresholds_do_not_split_it():
    content = summarise({"one": ONE, "two": TWO}, ["RR@10", "nDCG@10"])
    # two: the relevant doc of q1 at rank 2, none in q2
    assert content["sets"]["two"]["run"]["RR@10"] == pytest.approx((1 / 2 + 0) / 2)
    one = (1 + 1 / 2 + 1 / 3) / 3
    assert content["macro"]["run"]["RR@10"]["mean"] == pytest.approx((one + 0.25) / 2)
    assert content["macro"]["first_stage"]["RR@10"]["mean"] == pytest.approx((one + 0.25) / 2)
    assert content["macro"]["delta"]["RR@10"]["mean"] == pytest.approx(0)
    # nDCG of two, q1: a (1), b (2) -> (1 + 2 / log2(3)) / (2 + 1 / log2(3)); q2: 1
    log = math.log2(3)
    assert content["sets"]["two"]["run"]["nDCG@10"] == pytest.approx(((1 + 2 / log) / (2 + 1 / log) + 1) / 2)


def test_a_baseline_takes_the_first_stage_s_place_in_the_comparison_only():
    baseline = {"q1": {"b": 1.0}, "q2": {"a": 1.0}, "q3": {"c": 1.0}}  # RR 0, 1, 1
    part = SuiteSet(ONE.run, ONE.qrels, 1, ONE.first_stage, baseline)
    entry = summarise({"one": part}, ["RR@10"])["sets"]["one"]
    assert entry["baseline"]["RR@10"] == pytest.approx(2 / 3)
    assert entry["worse"] == {"RR@10": pytest.approx(1 / 3)}
    compared = entry["comparison"]
    assert compared["against"] == "baseline"
    assert [compared["RR@10"][key] for key in ("wins", "losses", "ties")] == [1, 2, 0]


def test_candidates_without_an_order_have_no_first_stage_and_no_macro_mean_of_it():
    content = summarise({"one": ONE, "two": SuiteSet(TWO.run, TWO.qrels, 2)}, ["RR@10"])
    assert not {"first_stage", "worse", "comparison"} & set(content["sets"]["two"])
    assert set(content["macro"]) == {"run", "oracle"}


def test_names_have_the_threshold_of_the_set():
    assert names_with_relevance(["AP@100", "nDCG@10", "P(rel=3)@5"], 2) == {
        "AP@100": "AP(rel=2)@100",
        "nDCG@10": "nDCG@10",
        "P(rel=3)@5": "P(rel=3)@5",
    }


def test_the_bootstrap_of_two_queries():
    # means 0, 1/2 and 1 with shares 1/4, 1/2, 1/4
    values = [np.array([0.0, 1.0])]
    assert bootstrap_interval(values, level=0.95) == (0.0, 1.0)
    assert bootstrap_interval(values, level=0.4) == (0.5, 0.5)


def test_the_bootstrap_has_the_width_of_the_standard_error():
    rng = np.random.default_rng(3)
    parts = [rng.random(400), rng.random(100)]
    low, high = bootstrap_interval(parts, samples=20_000)
    error = math.sqrt(sum(part.var() / len(part) for part in parts)) / 2
    assert (high - low) / 2 == pytest.approx(1.96 * error, rel=0.03)
    assert (high + low) / 2 == pytest.approx((parts[0].mean() + parts[1].mean()) / 2, abs=0.1 * error)


def test_the_bootstrap_is_that_of_a_plain_loop():
    parts = [np.array([0.1, 0.4, 0.9]), np.array([0.5, 0.6])]
    rng = np.random.default_rng(11)
    means = []
    for _ in range(20_000):
        drawn = [[part[rng.integers(len(part))] for _ in part] for part in parts]
        means.append(np.mean([np.mean(values) for values in drawn]))
    expected = np.quantile(means, [0.05, 0.95])
    np.testing.assert_allclose(bootstrap_interval(parts, samples=20_000, level=0.9), expected, atol=0.02)


def test_equal_values_have_no_width_and_the_seed_decides():
    assert bootstrap_interval([np.full(5, 0.25)]) == (0.25, 0.25)
    values = [np.random.default_rng(0).random(50)]
    assert bootstrap_interval(values) == bootstrap_interval(values) != bootstrap_interval(values, seed=1)


def test_everything_comes_from_files(tmp_path):
    for name, part in (("one", ONE), ("two", TWO)):
        write_run(tmp_path / name / "run.trec", part.run)
        write_run(tmp_path / name / "first_stage.trec", part.first_stage)
        write_qrels(tmp_path / name / "qrels.txt", part.qrels)
    read = {name: read_set(tmp_path / name, part.relevance) for name, part in (("one", ONE), ("two", TWO))}
    assert read == {"one": ONE, "two": TWO}
    assert read_set(tmp_path / "one", 1, tmp_path / "two/run.trec").baseline == TWO.run


def content(**more):
    summary = summarise({"[one]": ONE, "two": TWO}, ["RR@10"])
    return {"suite": "small", **summary, "left_out": {"cacm": "/x/cacm"}, "warnings": ["r was trained on"], **more}


def test_the_table():
    rows = rows_of(content(), "RR@10")
    assert rows[0] == ["[one]", "3", "0.6111", "0.6111", "+0.0000", "1.000", "1.0000", "33 %", "1/1/1"]
    assert rows[-1] == ["macro mean", "5", "0.4306", "0.4306", "+0.0000", "", "0.7500", "", ""]
    text = io.StringIO()
    print_suite(content(), "RR@10", Console(file=text, width=80))
    shown = text.getvalue()
    assert "[one]" in shown and "left out: cacm, no folder /x/cacm" in shown and "warning: r was trained on" in shown
    low, high = content()["macro"]["run"]["RR@10"]["interval"]
    assert f"macro mean: 0.4306, 95 % of bootstrap samples {low:.4f} to {high:.4f}" in shown
    assert all(len(line) <= 80 for line in shown.splitlines()) and "…" not in shown


def test_the_table_has_a_column_for_baselines():
    part = SuiteSet(ONE.run, ONE.qrels, 1, ONE.first_stage, ONE.first_stage)
    summary = {**content(), **summarise({"one": part}, ["RR@10"])}
    assert len(rows_of(summary, "RR@10")[0]) == len(rows_of(summary, "RR@10")[-1]) == 10
    text = io.StringIO()
    print_suite(summary, "RR@10", Console(file=text, width=100))
    assert "base-" in text.getvalue()


def test_the_picture_shows_each_set_and_the_mean(tmp_path):
    (axes,) = draw(content(), "RR@10").axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["[one]", "two", "macro mean"]
    runs = next(part for part in axes.collections if part.get_label() == "run").get_offsets()
    np.testing.assert_allclose(runs[:, 0], [11 / 18, 0.25, 11 / 36 + 0.125], rtol=1e-12)
    assert write_picture(tmp_path, content(), "RR@10") == tmp_path / "pictures/suite.png"
    assert (tmp_path / "pictures/suite.png").stat().st_size > 1000
