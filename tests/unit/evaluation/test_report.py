"""Files of an evaluation: numbers that follow from the run, a comparison computed by hand, complete files or none."""

import io
import json
import re

import ir_measures
import numpy as np
import pytest
import pytrec_eval
from omegaconf import OmegaConf
from rich.console import Console

from ranker.assembly.evaluation import write_set
from ranker.data.collection import Candidates, Collection, MemoryDocs
from ranker.data.ranking import rank_docs
from ranker.data.trec import read_run, write_qrels
from ranker.errors import ConfigError, DataError
from ranker.evaluation.measure_names import parse_measures
from ranker.evaluation.metrics import evaluate
from ranker.evaluation.report import compare, first_stage_run, print_table, write_evaluation

MEASURES = ["AP", "AP@5", "RR", "RR@3", "nDCG@10", "nDCG", "P@5", "R@10", "Rprec", "Success@1", "Judged@5"]


@pytest.fixture
def tied():
    """60 queries with many ties (a grid as in bf16), scores that differ only in float64, and graded judgements."""
    generator = np.random.default_rng(11)
    docs = [f"d{i}" for i in range(40)]
    run = {
        f"q{i}": {doc: float(generator.integers(-6, 6)) / 4 for doc in generator.permutation(docs)[:25]}
        for i in range(60)
    }
    run["q3"] = {doc: score * (1 + 1e-12 * i) for i, (doc, score) in enumerate(run["q3"].items())}
    qrels = {
        f"q{i}": {doc: int(generator.integers(-1, 4)) for doc in generator.permutation(docs)[:8]} for i in range(2, 63)
    }
    qrels["q9"] = dict.fromkeys(qrels["q9"], 0)
    return run, qrels


@pytest.mark.parametrize("relevance", [1, 2])
def test_means_can_be_computed_again_from_the_written_run(tmp_path, tied, relevance):
    run, qrels = tied
    metrics = write_evaluation(tmp_path, run, qrels, MEASURES, relevance, tag="t")
    assert metrics == json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["num_queries"] == 61
    names = list(metrics["measures"])
    again = evaluate(read_run(tmp_path / "run.trec"), qrels, MEASURES, relevance)
    assert metrics["measures"] == pytest.approx(again.means, abs=1e-12)
    write_qrels(tmp_path / "qrels.txt", qrels)
    plain = ir_measures.calc_aggregate(
        [ir_measures.parse_measure(name) for name in names],
        ir_measures.read_trec_qrels(str(tmp_path / "qrels.txt")),
        ir_measures.read_trec_run(str(tmp_path / "run.trec")),
    )
    assert metrics["measures"] == pytest.approx({str(measure): value for measure, value in plain.items()}, abs=1e-12)
    assert (
        evaluate(run, qrels, MEASURES, relevance).means == metrics["measures"]
    )  # before and after the file: one order


def test_pytrec_eval_alone_finds_the_same_values_in_the_file(tmp_path, tied):
    run, qrels = tied
    metrics = write_evaluation(tmp_path, run, qrels, ["AP", "RR", "nDCG@10", "P@5"])
    evaluator = pytrec_eval.RelevanceEvaluator(qrels, {"map", "recip_rank", "ndcg_cut.10", "P.5"})
    values = evaluator.evaluate(read_run(tmp_path / "run.trec"))
    for name, key in {"AP": "map", "RR": "recip_rank", "nDCG@10": "ndcg_cut_10", "P@5": "P_5"}.items():
        assert metrics["measures"][name] == pytest.approx(sum(row[key] for row in values.values()) / 61, abs=1e-12)


def test_pc20_the_written_run_is_strictly_ordered(tmp_path, tied):
    run, qrels = tied
    write_evaluation(tmp_path, run, qrels, ["AP"], tag="mine")
    rows = [line.split() for line in (tmp_path / "run.trec").read_text().splitlines()]
    assert {(row[1], row[5], len(row)) for row in rows} == {("Q0", "mine", 6)}
    for query_id, docs in run.items():
        mine = [row for row in rows if row[0] == query_id]
        assert [int(row[3]) for row in mine] == list(range(1, len(docs) + 1))
        assert [row[2] for row in mine] == rank_docs(docs)
        scores = [np.float32(row[4]) for row in mine]
        assert all(scores[i] > scores[i + 1] for i in range(len(scores) - 1))
        assert max(abs(float(row[4]) - docs[row[2]]) for row in mine) < 1e-5


def test_pc19_scores_are_written_with_all_digits(tmp_path):
    scores = {"dA": 12.34564, "dB": 12.34561, "dC": float(np.float32(0.1)), "dD": 1 / 3}
    metrics = write_evaluation(tmp_path, {"q1": scores}, {"q1": {"dA": 1, "dB": 0}}, ["AP", "nDCG@10"])
    assert read_run(tmp_path / "run.trec") == {"q1": scores}
    assert metrics["measures"] == {"AP": 1.0, "nDCG@10": 1.0}


def test_a_baseline_beside_unjudged_queries_compares_nothing(tmp_path):
    run = {"q1": {"a": 2.0, "b": 1.0}}
    collection = Collection("mine", MemoryDocs([]), {"q1": "words"}, {})
    cfg = OmegaConf.create({"name": "mine", "measures": ["AP"]})
    written = write_set(tmp_path, "mine", run, collection, cfg, 10, {"q1": {"a": 1.0, "b": 2.0}})
    assert written["measures"] == {}
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == [
        "metrics.json",
        "per_query.jsonl",
        "run.trec",
    ]
    assert read_run(tmp_path / "evaluation/mine/run.trec") == run


def test_comparison_by_hand(tmp_path):
    """Reciprocal ranks 1, 1, 1/2, 0 against 1/2, 1, 1, 0: differences 1/2, 0, -1/2, 0; for R@1 1, 0, -1, 0."""
    qrels = {f"q{i}": {"a": 1} for i in range(1, 5)}
    run = {"q1": {"a": 2.0, "b": 1.0}, "q2": {"a": 2.0, "b": 1.0}, "q3": {"a": 1.0, "b": 2.0}}
    baseline = {"q1": {"a": 1.0, "b": 2.0}, "q2": {"a": 1.0}, "q3": {"a": 2.0, "b": 1.0}, "q4": {"x": 1.0}}
    metrics = write_evaluation(tmp_path, run, qrels, ["RR@10", "R@1"], baseline=baseline)
    assert metrics["measures"] == {"RR@10": 0.625, "R@1": 0.5}
    assert metrics["comparison"] == {
        name: {
            "baseline": mean,
            "delta": 0.0,
            "p_value": 1.0,
            "p_value_t": 1.0,
            "p_value_holm": 1.0,
            "wins": 1,
            "losses": 1,
            "ties": 2,
        }
        for name, mean in {"RR@10": 0.625, "R@1": 0.5}.items()
    }
    assert metrics["warnings"] == ["1 judged query has no results and counts 0, for example 'q4'"]
    rows = [json.loads(line) for line in (tmp_path / "per_query.jsonl").read_text().splitlines()]
    assert rows == [
        {"query_id": "q1", "measures": {"RR@10": 1.0, "R@1": 1.0}, "baseline": {"RR@10": 0.5, "R@1": 0.0}},
        {"query_id": "q2", "measures": {"RR@10": 1.0, "R@1": 1.0}, "baseline": {"RR@10": 1.0, "R@1": 1.0}},
        {"query_id": "q3", "measures": {"RR@10": 0.5, "R@1": 0.0}, "baseline": {"RR@10": 1.0, "R@1": 1.0}},
        {"query_id": "q4", "measures": {"RR@10": 0.0, "R@1": 0.0}, "baseline": {"RR@10": 0.0, "R@1": 0.0}},
    ]


def test_p_values_of_a_comparison_by_hand():
    """Five equal wins: 2 of 32 sign patterns. The other measure is unchanged, so Holm doubles the smaller p-value."""
    qrels = {f"q{i}": {"a": 1} for i in range(5)}
    better = evaluate({q: {"a": 2.0, "b": 1.0} for q in qrels}, qrels, ["RR", "R@5"])
    worse = evaluate({q: {"a": 1.0, "b": 2.0} for q in qrels}, qrels, ["RR", "R@5"])
    comparison = compare(better, worse)
    assert comparison["RR"] == {
        "baseline": 0.5,
        "delta": 0.5,
        "p_value": 2 / 32,
        "p_value_t": 0.0,
        "p_value_holm": 4 / 32,
        "wins": 5,
        "losses": 0,
        "ties": 0,
    }
    assert comparison["R@5"]["p_value"] == comparison["R@5"]["p_value_holm"] == 1.0
    assert comparison["R@5"]["ties"] == 5


def test_warnings_of_the_baseline_say_so(tmp_path):
    metrics = write_evaluation(tmp_path, {"q1": {"a": 1.0}}, {"q1": {"a": 1}}, ["AP"], baseline={"1": {"a": 1.0}})
    assert [warning[:43] for warning in metrics["warnings"]] == [
        "baseline: 0 of 1 judged queries found in th", "baseline: 1 query of the run is not judged ",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "error", "complaint"),
    [
        (
            {"run": {"q1": {"a": float("nan")}}},
            DataError,
            "got 1 of 1 that are not, the first nan for query 'q1' and doc 'a'",
        ),
        ({"run": {"q1": {"a b": 1.0}}}, DataError, "doc id: expected text without white space"),
        ({"run": {}}, DataError, "expected a run with at least one doc, got none"),
        (
            {"baseline": {"q1": {"a": float("inf")}}},
            DataError,
            "run: expected finite scores within float32, got 1 of 1 that are not, the first inf",
        ),
        ({"measures": ["AP", "banana"]}, ConfigError, "'banana'"),
        ({"tag": "a b"}, DataError, "tag: expected text without white space"),
    ],
)
def test_a_fault_leaves_the_folder_as_it_was(tmp_path, change, error, complaint):
    good = {"run": {"q1": {"a": 1.0}}, "collection_qrels": {"q1": {"a": 1}}, "measures": ["AP"], "tag": "t"}
    with pytest.raises(error, match=re.escape(complaint)):
        write_evaluation(tmp_path / "new", **{**good, **change})
    assert not (tmp_path / "new").exists() or [path.name for path in (tmp_path / "new").iterdir()] == []
    write_evaluation(tmp_path / "old", **good)
    before = {path.name: path.read_bytes() for path in (tmp_path / "old").iterdir()}
    assert set(before) == {"run.trec", "metrics.json", "per_query.jsonl"}
    with pytest.raises(error):
        write_evaluation(tmp_path / "old", **{**good, **change})
    assert {path.name: path.read_bytes() for path in (tmp_path / "old").iterdir()} == before


def test_an_unjudged_set_gets_a_run_and_no_measures(tmp_path):
    metrics = write_evaluation(tmp_path, {"q1": {"a": 1.0, "b": 2.0}}, {}, ["AP"], baseline={"q1": {"a": 1.0}})
    assert metrics == {
        "measures": {},
        "num_queries": 0,
        "warnings": ["no query is judged: the run is written, nothing is measured"],
    }
    assert [line.split()[2] for line in (tmp_path / "run.trec").read_text().splitlines()] == ["b", "a"]
    assert (tmp_path / "per_query.jsonl").read_text() == "" and json.loads(
        (tmp_path / "metrics.json").read_text()
    ) == metrics


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([3.0, 2.0, 1.0], {"q1": {"a": 3.0, "b": 2.0}}),
        ([0.0, 0.0, 0.0], None),  # MS MARCO's top 1000: no scores, so no order that could be a baseline
    ],
)
def test_the_first_stage_is_the_baseline_where_its_scores_order_something(scores, expected):
    candidates = Candidates.from_lists([("q1", ["a", "b", "c"], scores), ("unjudged", ["a"], scores[:1])])
    collection = Collection("set", MemoryDocs([]), {"q1": "text", "unjudged": "text"}, {"q1": {"a": 1}}, candidates)
    assert first_stage_run(collection, depth=2) == expected


def test_files_keep_ids_as_they_are(tmp_path):
    write_evaluation(tmp_path, {"01": {"文書": 1.0}}, {"01": {"文書": 1}}, parse_measures(["AP"]))
    assert (tmp_path / "run.trec").read_text(encoding="utf-8") == "01 Q0 文書 1 1.0 ranker\n"
    assert json.loads((tmp_path / "per_query.jsonl").read_text()) == {"query_id": "01", "measures": {"AP": 1.0}}


def table(metrics: dict, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width)
    print_table("test/cwe", metrics, console)
    return console.file.getvalue()


def test_table_with_baseline():
    entry = {
        "baseline": 0.3871,
        "delta": 0.0531,
        "p_value": 0.0123,
        "p_value_t": 0.02,
        "p_value_holm": 0.0246,
        "wins": 90,
        "losses": 60,
        "ties": 150,
    }
    metrics = {
        "measures": {"nDCG@10": 0.44024, "AP(rel=2)": 0.5},
        "num_queries": 300,
        "warnings": ["1 judged query has no results and counts 0, for example '[bold]'"],
        "comparison": {"nDCG@10": entry, "AP(rel=2)": {**entry, "delta": -0.1, "p_value": 0.00004}},
    }
    lines = table(metrics).splitlines()
    assert "test/cwe (300 queries)" in lines[0]
    [row] = [line for line in lines if "measure" in line and "run" in line]
    headings = ["measure", "run", "baseline", "delta", "p", "p (Holm)", "wins/losses/ties"]
    assert [text.strip() for text in re.split("[┃│]", row)[1:-1]] == headings
    [row] = [line for line in lines if "nDCG@10" in line]
    assert re.findall(r"[^│\s]+", row) == ["nDCG@10", "0.4402", "0.3871", "+0.0531", "0.012", "0.025", "90/60/150"]
    [row] = [line for line in lines if "AP(rel=2)" in line]
    assert re.findall(r"[^│\s]+", row)[3:5] == ["-0.1000", "<0.001"]
    assert lines[-1] == "warning: 1 judged query has no results and counts 0, for example '[bold]'"


def test_table_without_baseline():
    text = table({"measures": {"AP": 1.0}, "num_queries": 1, "warnings": []})
    assert "test/cwe (1 query)" in text
    assert "1.0000" in text
    assert "baseline" not in text
    assert "wins" not in text


@pytest.mark.parametrize(
    ("baseline", "outcome"), [({"d1": 2.0, "d2": 1.0}, [0, 0, 1]), ({"d1": 1.0, "d2": 2.0}, [1, 0, 0])]
)
def test_pc2_21_no_difference_and_one_query_show_nothing(tmp_path, baseline, outcome):
    """p is 1, not 0 or NaN: both signs of no difference sum to 0, and both signs of one query are equally extreme."""
    run, qrels = {"q1": {"d1": 2.0, "d2": 1.0}}, {"q1": {"d1": 1, "d2": 0}}
    written = write_evaluation(tmp_path, run, qrels, ["RR@10", "AP@100"], baseline={"q1": baseline})
    for entry in written["comparison"].values():
        assert entry["p_value"] == entry["p_value_holm"] == 1.0
        assert [entry["wins"], entry["losses"], entry["ties"]] == outcome
