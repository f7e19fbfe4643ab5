"""From rows of results to files, summaries, comparisons, pictures and the report, with numbers made by hand."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_hex

from ranker.assembly.training_queries import seen_in_training
from ranker.commands.probe import check_earlier, with_earlier
from ranker.errors import ConfigError, DataError
from ranker.probing.code_length import CodeLength
from ranker.probing.options import StudyOptions
from ranker.probing.pictures import heat_map, online_curves, save
from ranker.probing.report import write_report
from ranker.probing.results import COLUMNS, Result, Results, TaskRecord
from ranker.probing.summary import compare, control_ratios, layer_differences, selectivity, summarise
from ranker.probing.training_options import TrainingOptions
from tests.unit.probing.mini import mini_splits

QUERIES = np.repeat([f"q{i:02d}" for i in range(30)], 4)  # 120 targets of 4 classes: a uniform code takes 240 bits
ENDS = [12, 60, 120]
# bits a target of every layer, subject by subject: the second gains half a bit at layer 2 and nothing elsewhere
BITS = {"base": {0: 1.5, 1: 1.0, 2: 1.25}, "tuned": {0: 1.5, 1: 1.0, 2: 0.75}}


def result(model: str, layer: int | None, seed: int, control: str, mean: float, accuracy: float = 0.5) -> Result:
    """Block 1 at 2 bits a target, the others at about `mean`, the same spread for every subject."""
    bits = mean + np.random.default_rng(seed).normal(0, 0.05, 120).astype(np.float32)
    bits[:12] = 2.0
    later = float(bits[12:].sum(dtype=np.float64))
    blocks = [float(part.sum(dtype=np.float64)) for part in np.split(bits, ENDS[:-1])]
    return Result(
        model,
        "task",
        layer,
        seed,
        control,
        CodeLength(4, 12, 120, later),
        230.5,
        accuracy,
        0.25,
        {"AP": 0.5} if control == "none" else {},
        3.0,
        0.125,
        "data",
        f"hash of {model}",
        bits,
        ENDS,
        blocks,
    )


def make(seeds: tuple[int, ...] = (0, 1), **changes: object) -> Results:
    rows = []
    for model, layers in BITS.items():
        for layer, mean in layers.items():
            rows += [result(model, layer, seed, "none", mean, accuracy=0.9) for seed in seeds]
            rows.append(result(model, layer, 0, "control_task", 1.9, accuracy=0.6))
        rows.append(result(model, None, 0, "label_prior", 1.6))
        rows.append(result(model, None, 0, "surface", 1.4))
        rows += [result(model, layer, 0, "shuffled", 1.7) for layer in (1, 2)]
    record = {
        "task": "task",
        "labeller": "hand@1",
        "data_hash": "data",
        "classes": list("abcd"),
        "pairs": {"train": 120, "val": 9, "test": 9},
        "class_counts": {"train": [60, 20, 20, 20], "val": [9, 0, 0, 0], "test": [9, 0, 0, 0]},
        "cut_targets": 0,
    }
    return Results(
        [replace(row, **changes) if row.model == "tuned" else row for row in rows],
        {"task": TaskRecord(record, QUERIES)},
    )


def test_rows_and_code_lengths_are_read_back(tmp_path: Path) -> None:
    results = make()
    results.write(tmp_path)
    again = Results.read(tmp_path)
    assert (tmp_path / "probe_results.csv").read_text().split("\n")[0] == ",".join(COLUMNS)
    assert again.tasks["task"].description == results.tasks["task"].description
    for before, after in zip(results.all, again.all, strict=True):
        assert np.array_equal(before.bits, after.bits)
        assert after.code.bits == pytest.approx(before.code.bits, abs=1e-9)
        same = (
            "model",
            "task",
            "layer",
            "seed",
            "control",
            "measures",
            "block_ends",
            "block_bits",
            "data_hash",
            "accuracy",
            "prior_bits",
        )
        for name in same:
            assert getattr(before, name) == getattr(after, name), name
    (tmp_path / "codes/task.npz").unlink()
    with pytest.raises(DataError, match=r"codes/task.npz: expected a readable file, got '?No such file"):
        Results.read(tmp_path)
    with pytest.raises(DataError, match="expected a finished probing run"):
        Results.read(tmp_path / "none")


def test_a_row_in_bits_and_in_the_published_unit() -> None:
    one = make().of("base", "task")[0]
    length = float(one.bits.sum(dtype=np.float64))
    row = one.row("bits")
    assert (row["n_targets"], row["k"], row["t1"], row["uniform_bits"]) == (120, 4, 12, 240)
    assert row["mdl_bits"] == pytest.approx(length, abs=1e-6)
    assert row["mdl_legacy"] == pytest.approx(24 + (length - 24) * math.log(2), abs=1e-6)
    assert row["compression"] == pytest.approx(240 / length, abs=1e-6)
    assert one.row("legacy_mixed")["compression"] == pytest.approx(240 / row["mdl_legacy"], abs=1e-6)


def test_summary_by_hand() -> None:
    results = make()
    own = summarise(results, "base", "task")
    lengths = [np.mean([row.code.bits for row in results.by_layer("base", "task")[layer]]) for layer in range(3)]
    assert own.best == 1
    assert own.compression == pytest.approx(240 / lengths[1], rel=1e-3)
    assert own.tied == [1], "half a bit and a quarter are far above the noise of 0.05 bits"
    assert own.selectivity == pytest.approx(0.3)
    assert selectivity(results, "base", "task") == pytest.approx({0: 0.3, 1: 0.3, 2: 0.3})
    control = results.by_layer("base", "task", "control_task")[1][0].code.bits
    first_seed = results.by_layer("base", "task")[1][0].code.bits
    assert control_ratios(results, "base", "task")[1] == pytest.approx(control / first_seed)
    prior = results.of("base", "task", "label_prior")[0].code.compression()
    weights = [max(0.0, value - prior) for value in results.compression("base", "task").values()]
    assert own.gravity == pytest.approx(np.dot(range(3), weights) / sum(weights))
    assert own.measures == {"AP": 0.5}
    gap = layer_differences(results, "base", "task", 1)[0]
    assert gap.mean == pytest.approx(0.5 * 108 / 120, abs=1e-6), "the same noise in both, and block 1 costs the same"


def test_two_subjects_on_the_same_targets() -> None:
    own = compare(make(), "base", "tuned", "task")
    assert own.bits[2].mean == pytest.approx(-0.5 * 108 / 120, abs=1e-6)
    assert own.compression[2] > 0.5 > own.compression[0] == own.compression[1] == 0
    assert [own.tied(layer) for layer in range(3)] == [True, True, False]
    with pytest.raises(DataError, match="expected the same pairs, spans and labels"):
        compare(make(data_hash="other"), "base", "tuned", "task")
    lacking = make()
    lacking.all = [row for row in lacking.all if not (row.model == "tuned" and row.seed == 1)]
    with pytest.raises(DataError, match="expected the same seeds"):
        compare(lacking, "base", "tuned", "task")


@pytest.mark.parametrize(
    ("options", "training", "dtype", "other"),
    [
        ({"portions": (0.5, 1.0)}, {}, "float16", r"portions=\[0.001"),
        ({"validation": "within"}, {}, "float16", "validation=fixed"),
        ({"max_doc_tokens": 64}, {}, "float16", "max_doc_tokens=256, got 64"),
        ({}, {"lr": 1e-4}, "float16", "training.lr=0.001, got 0.0001"),
        ({}, {}, "int8", "cache.dtype=float16, got int8"),
    ],
)
def test_an_earlier_run_that_coded_in_another_way_is_refused(
    tmp_path: Path, options: dict, training: dict, dtype: str, other: str
) -> None:
    def coded(options: dict, training: dict, dtype: str = "float16") -> Results:
        made = make()
        record = made.tasks["task"]
        coding = StudyOptions(**options).coding(TrainingOptions(**training), dtype)
        return Results(made.all, {"task": TaskRecord(record.description | {"coding": coding}, record.queries)})

    records = coded({}, {}).tasks
    coded({}, {}).write(tmp_path / "same")
    ours, same = coded({"workers": 7, "batching": "separate"}, {}), Results.read(tmp_path / "same")
    check_earlier(same, ours.tasks, [1, 0], [0, 1, 2])
    results, warnings = with_earlier(ours, same)
    assert (results.models, warnings) == (["base", "tuned", "base (earlier run)"], [])
    coded(options, training, dtype).write(tmp_path / "other")
    with pytest.raises(ConfigError, match=f"compare: task: expected an earlier run with {other}"):
        check_earlier(Results.read(tmp_path / "other"), records, [0, 1], [0])
    make().write(tmp_path / "old")
    with pytest.raises(ConfigError, match="got a run without this option"):
        check_earlier(Results.read(tmp_path / "old"), records, [0, 1], [0])


def test_an_earlier_run_on_other_data_seeds_or_layers_is_refused() -> None:
    earlier = make()
    record = earlier.tasks["task"]
    check_earlier(earlier, {"task": record, "new": record}, [0, 1], [2, 3])
    other = TaskRecord(record.description | {"data_hash": "more pairs"}, record.queries)
    with pytest.raises(
        ConfigError,
        match=r"compare: task: expected .* the same pairs, .* \(data hash more pairs\), got data; "
        "set data, split, max_pairs",
    ):
        check_earlier(earlier, {"task": other}, [0, 1], [2])
    with pytest.raises(ConfigError, match=r"compare: task: .* seeds=\[0, 2\], got \[0, 1\]"):
        check_earlier(earlier, {"task": record}, [0, 2], [2])
    with pytest.raises(ConfigError, match=r"compare: task: .* layers \[3\], got \[0, 1, 2\]"):
        check_earlier(earlier, {"task": record}, [0, 1], [3])
    with pytest.raises(ConfigError, match="compare: expected an earlier run of one of new, got task"):
        check_earlier(earlier, {"new": record}, [0, 1], [2])


def test_heat_map_shows_each_number_greys_ties_and_boxes_the_best() -> None:
    values = {"a": {0: 1.0, 1: 2.0}, "b": {1: -0.25}}
    figure = heat_map(values, "title", signed=True, tied={"a": {0: True}}, boxed={"a": [1]})
    axes = figure.axes[0]
    assert {text.get_text(): text.get_position() for text in axes.texts} == {
        "+1.00": (0, 0),
        "+2.00": (1, 0),
        "-0.25": (1, 1),
    }
    kinds = [(round(patch.get_x() + 0.47), to_hex(patch.get_facecolor(), keep_alpha=True)) for patch in axes.patches]
    assert kinds == [(0, "#ddddddff"), (1, "#00000000")]
    (image,) = axes.images
    assert (image.norm.vmin, image.norm.vmax) == (-2, 2), "white is 0"
    shape = (
        heat_map({"a": {0: 1.0, 1: 2.0, 2: 1.5}, "b": {0: 5.0, 1: 5.0, 2: 5.0}}, "title", by_row=True).axes[0].images[0]
    )
    assert shape.get_array().tolist() == [[0, 1, 0.5], [0, 0, 0]], "each task by its own range"


def test_report_holds_the_numbers_and_shows_every_picture(tmp_path: Path) -> None:
    results = make()
    shown = write_report(tmp_path, results, ["a warning"], ["a note"])
    text = (tmp_path / "report.md").read_text()
    for name in re.findall(r"\(pictures/(\w+)\.png\)", text):
        assert (tmp_path / f"pictures/{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (tmp_path / f"pictures/{name}.svg").read_text()
    assert (
        set(re.findall(r"\(pictures/(\w+)\.png\)", text))
        == set(shown)
        == {
            "heat_0",
            "heat_1",
            "heat_by_row_0",
            "heat_by_row_1",
            "selectivity_0",
            "selectivity_1",
            "online_0",
            "online_1",
            "lines",
            "difference",
        }
    )
    assert "- a warning" in text
    assert "- a note" in text
    after, before = (results.compression(model, "task")[2] for model in ("tuned", "base"))
    assert f"| task | 2 | {after - before:+.3f} | -0.4500 |" in text
    assert "| task | 0 | +0.000 | +0.0000 |" in text
    prior, shuffled = (results.value("base", "task", control) for control in ("label_prior", "shuffled"))
    controls = text.split("## Against the controls")[1]
    for model in ("base", "tuned"):
        best = results.compression(model, "task")[1 if model == "base" else 2]
        assert f"| task | {model} | {best:.3f} | {prior:.3f} | {shuffled:.3f} |" in controls
    assert "| shuffled labels, its best layer |" in controls
    assert text.rstrip().endswith("differences between layers may be chance."), (
        "30 queries are few, and the report says so"
    )


def test_a_control_counts_at_its_best_layer() -> None:
    """Lengths of 12 x 2 and 108 x 2 or 1 bits: compressions 240/240 and 240/132, averaged over two seeds of layer 2."""
    lengths = [(1, 0, 216.0), (2, 0, 108.0), (2, 1, 216.0)]
    rows = [
        replace(result("base", layer, seed, "random_encoder", 1.0), code=CodeLength(4, 12, 120, later))
        for layer, seed, later in lengths
    ]
    results = Results(rows, {})
    assert results.value("base", "task", "random_encoder") == pytest.approx((1 + 240 / 132) / 2)
    assert math.isnan(results.value("base", "task", "surface"))


def test_shuffled_labels_are_held_against_the_uniform_code_where_the_prior_costs_more(tmp_path: Path) -> None:
    """A few balanced labels: counting them costs more than the uniform code, from which every probe starts."""
    results = make()
    results.all = [
        result(row.model, None, 0, "label_prior", 2.2) if row.control == "label_prior" else row for row in results.all
    ]
    write_report(tmp_path, results, [])
    shuffled = results.value("base", "task", "shuffled")
    assert f"| {shuffled - 1:+.3f} |" in (tmp_path / "report.md").read_text()


def test_queries_that_a_ranker_was_trained_on_are_reported(tmp_path: Path) -> None:
    splits = mini_splits()
    assert splits.val is not None
    splits = replace(splits, train=splits.val)
    texts = set(list(splits.val.queries.values())[:5]) | {"a new one"}
    data = {"_target_": "ranker.data.sources.files.Files", "path": "mini"}
    ranker = tmp_path / "ranker"
    ranker.mkdir()
    (ranker / "ranker.yaml").write_text(
        "data: {_target_: ranker.data.sources.files.Files, path: mini, teacher: null}\n"
    )
    (told,) = seen_in_training(ranker, data, splits, {"bm25": texts, "rel": {"a new one"}})
    assert told.startswith("ranker was trained on 5 of the 6 queries of bm25")
    (ranker / "ranker.yaml").write_text("{}\n")
    assert "not known what it was trained on" in seen_in_training(ranker, data, splits, {"bm25": texts})[0]


def test_what_a_ranker_saw_is_told_by_texts_not_by_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trained on one collection, probed on another: queries are looked up in the training collection, by any path."""
    trained = tmp_path / "trained"
    trained.mkdir()
    (trained / "docs.jsonl").write_text(
        "".join(json.dumps({"id": f"d{i}", "text": f"doc {i}"}) + "\n" for i in range(4))
    )
    (trained / "queries.tsv").write_text("".join(f"{name}\tquery {name}\n" for name in "abcd"))
    for part, names in (("train", "ab"), ("dev", "c"), ("test", "d")):
        (trained / f"qrels.{part}.txt").write_text("".join(f"{name} 0 d0 1\n" for name in names))
    ranker = tmp_path / "ranker"
    ranker.mkdir()
    here = {"_target_": "ranker.data.sources.cwe.CWE"}
    queries = {"fact": {"query a", "query b", "query c", "query e"}, "bm25": {"query d"}}
    monkeypatch.chdir(tmp_path)
    for path in ("trained", str(trained)):
        (ranker / "ranker.yaml").write_text(f"data: {{_target_: ranker.data.sources.files.Files, path: {path}}}\n")
        (told,) = seen_in_training(ranker, here, mini_splits(), queries)
        assert told.startswith("ranker was trained on 2 of the 4 queries of fact")
    (ranker / "ranker.yaml").write_text("data: {_target_: ranker.data.sources.files.Files, path: gone}\n")
    (told,) = seen_in_training(ranker, here, mini_splits(), queries)
    assert told.startswith("ranker: its training data was not compared (data.path: expected a folder")
    (ranker / "ranker.yaml").write_text("data: {_target_: ranker.data.sources.msmarco_passage.MsMarcoPassage}\n")
    (told,) = seen_in_training(ranker, here, mini_splits(), queries)
    assert told.startswith("ranker: its training data was not compared (msmarco_passage may download it)")


def test_a_code_of_one_block_has_a_picture_without_lines(tmp_path):
    """`portions=[1.0]`: nothing was sent before the only block."""
    made = make()
    rows = [replace(one, block_ends=[120], block_bits=[sum(one.block_bits)]) for one in made.all]
    assert save(online_curves(Results(rows, made.tasks, made.units), "base"), tmp_path, "online").is_file()
