import json
import struct
from collections import Counter

import pytest

from ranker.config.stored import resumed_runs
from ranker.evaluation import learning_curves, pictures


def write_run(folder, config, rows):
    folder.mkdir()
    (folder / "config.yaml").write_text(config)
    (folder / "metrics.csv").write_text("epoch,step,train/loss,val/nDCG@10\n" + "".join(rows))
    return folder


def test_curves_are_the_logged_values_and_a_resumed_run_carries_on_the_earlier_one(tmp_path):
    first = write_run(
        tmp_path / "a", "resume: false\n", ["0,0,4.0,\n", "0,1,3.0,\n", "0,1,,0.25\n", "0,2,2.0,\n", "0,3,1.5,\n"]
    )
    second = write_run(
        tmp_path / "b", f"resume: true\ncheckpoint: {first}\n", ["0,2,2.0,\n", "0,3,1.0,\n", "0,3,,0.5\n"]
    )
    assert learning_curves.read_curves(first)["train/loss"] == [(1, 4.0), (2, 3.0), (3, 2.0), (4, 1.5)]
    curves = learning_curves.read_curves(*resumed_runs(second))
    assert curves["train/loss"] == [(1, 4.0), (2, 3.0), (3, 2.0), (4, 1.0)]
    # steps count from 0, and a validation has the step that it comes after
    assert curves["val/nDCG@10"] == [(2, 0.25), (4, 0.5)]
    figure = learning_curves.draw_curves(curves, "val/nDCG@10", "b")
    loss, val = figure.axes
    assert loss.lines[0].get_xydata().tolist() == [[1, 4.0], [2, 3.0], [3, 2.0], [4, 1.0]]
    assert val.lines[0].get_xydata().tolist() == [[2, 0.25], [4, 0.5]]
    assert val.lines[1].get_xydata().tolist() == [[4, 0.5]]
    assert [text.get_text() for text in val.get_legend().get_texts()] == ["nDCG@10", "best: 0.5000 at 4"]
    assert learning_curves.draw_curves({}, None, "nothing logged") is None


@pytest.mark.parametrize(
    "damage",
    [
        b"\x00\xff,1\n",
        b"step,a\n1,2,3,4\n",
        b"step,a\nx,2\n",
        b"a,b\n1,2\n",
        b"step,a\n1,two\n",
        b"step,a\n" + b"9" * 200_000 + b",1\n",  # more than csv reads by default, and than a number may have digits
    ],
)
def test_a_damaged_table_of_an_earlier_run_is_left_out(tmp_path, damage, caplog):
    first = write_run(tmp_path / "a", "", ["0,0,4.0,\n"])
    (first / "metrics.csv").write_bytes(damage)
    second = write_run(tmp_path / "b", "", ["0,2,2.0,\n"])
    assert learning_curves.read_curves(first, second) == {"train/loss": [(3, 2.0)]}
    assert f"{first / 'metrics.csv'}: expected a table with a column step" in caplog.text


PER_QUERY = [
    {"query_id": "q1", "measures": {"RR": 1.0}, "baseline": {"RR": 0.5}},
    {"query_id": "q2", "measures": {"RR": 0.25}, "baseline": {"RR": 1.0}},
    {"query_id": "q3", "measures": {"RR": 0.5}, "baseline": {"RR": 0.5}},
    {"query_id": "q0", "measures": {"RR": 1.0}, "baseline": {"RR": 0.5}},
]


def test_gains_are_sorted_and_counted(tmp_path):
    found = pictures.gains(PER_QUERY, "RR")
    assert found == [("q0", 0.5), ("q1", 0.5), ("q3", 0.0), ("q2", -0.75)]
    (axes,) = pictures.draw_gains(found, "RR", "cwe").axes
    assert [bar.get_height() for bar in axes.patches] == [0.5, 0.5, 0.0, -0.75]
    assert axes.get_title() == "cwe: 2 better, 1 worse, 1 the same"
    assert axes.get_legend().get_texts()[0].get_text() == "mean +0.0625"


RUN = {"q1": {"a": 0.9, "b": 0.8, "c": 0.7}, "q2": {"a": 0.2, "b": 0.1}}
BASELINE = {"q1": {"a": 1.0, "b": 2.0, "c": 3.0}, "q2": {"a": 2.0, "b": 2.0}}


def test_rank_changes_follow_the_tie_rule_and_leave_out_what_was_not_ranked(tmp_path):
    # q1: c had rank 1 and has 3, a had 3 and has 1; q2: tied in the baseline, so b, the larger id, came first, and is
    # now second
    qrels = {"q1": {"a": 1, "b": 0, "c": 2, "missed": 1}, "q2": {"b": 1}, "q3": {"a": 1}}
    assert pictures.rank_changes(RUN, BASELINE, qrels) == Counter({(1, 3): 1, (3, 1): 1, (1, 2): 1})
    assert pictures.rank_changes(RUN, BASELINE, qrels, relevance=2) == Counter({(1, 3): 1})
    (axes,) = pictures.draw_rank_changes(pictures.rank_changes(RUN, BASELINE, qrels), "cwe").axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["moved up: 1", "moved down: 2", "stayed: 0"]
    up, down, _ = axes.collections
    assert up.get_offsets().tolist() == [[3, 1]]
    assert sorted(down.get_offsets().tolist()) == [[1, 2], [1, 3]]


def test_pictures_of_a_set_lie_in_the_run_folder(tmp_path):
    (tmp_path / "evaluation/dl/judged").mkdir(parents=True)
    (tmp_path / "evaluation/dl/judged/per_query.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PER_QUERY))
    paths = pictures.write_comparison(tmp_path, "dl/judged", "RR", RUN, BASELINE, {"q1": {"a": 1}})
    assert [path.relative_to(tmp_path).as_posix() for path in paths] == [
        "pictures/dl_judged_gains.png",
        "pictures/dl_judged_ranks.png",
    ]
    for path in paths:
        width, height = struct.unpack(">II", path.read_bytes()[16:24])
        assert min(width, height) > 400
    assert sorted(path.name for path in (tmp_path / "pictures").iterdir()) == sorted(path.name for path in paths)


@pytest.mark.parametrize("queries", [1, 61])
def test_a_picture_of_few_and_of_many_queries(queries):
    (axes,) = pictures.draw_gains([(f"q{i}", 1.0 - i / 40) for i in range(queries)], "RR", "x").axes
    assert axes.get_xlim()[1] > queries


def test_bars_by_length_are_the_measures_of_each_bucket():
    rows = [
        {"words": [0, 128], "num_queries": 5, "measures": {"RR": 0.5}, "baseline": {"RR": 0.25}},
        {"words": [512, None], "num_queries": 2, "measures": {"RR": 0.75}, "baseline": {"RR": 1.0}},
    ]
    axes = pictures.draw_by_length(rows, "RR", "set", "first stage").axes[0]
    assert [[bar.get_height() for bar in bars] for bars in axes.containers] == [[0.25, 1.0], [0.5, 0.75]]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["first stage", "run"]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["0-127\n5 queries", "512+\n2 queries"]
