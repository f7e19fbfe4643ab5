"""Mistakes in a multitask configuration are answered in one line each, without torch; `layer: auto` reads a probing report."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from ranker import config, entry
from ranker.data.collection import Candidates, Collection, Doc, MemoryDocs
from ranker.data.multitask import AutoLayers, Head, TaskLabels
from ranker.data.multitask_check import auto_layers
from ranker.data.task_rows import label_tasks, refuse_held_out
from ranker.errors import ConfigError, DataError
from ranker.probing.examples import whole_text_example
from ranker.probing.tasks.tf import TermFrequency

ROOT = Path(__file__).resolve().parents[3]


def composed(*overrides):
    entry.register()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return compose("train", ["model=multitask", "name=x", *overrides])


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model.heads=[]", "model.heads: expected at least one head as [{task: bm25, layer: 5}], got none; model=monobert trains without"),
        ("model.heads=bm25", "model.heads: expected list or null, got 'bm25'"),
        ("model.heads=null", "model.heads: expected a list as [{task: bm25, layer: 5}], got null"),
        ("model.heads=[{task: bm52}]", "model.heads[0].task: expected one of bm25, coref, fact, fact_synth, gap, jsonl, ner, ner_rules, rel, sem, tf; got 'bm52'"),
        ("model.heads=[{task: bm25, layr: 5}]", "model.heads[0].layr: unknown key; did you mean layer?"),
        ("model.heads=[{task: bm25, layer: -1}]", "model.heads[0].layer: expected a layer from 0 (the embeddings), a list of them, middle, last or auto; got -1"),
        ("model.heads=[{task: bm25, layer: []}]", "model.heads[0].layer: expected a layer from 0"),
        ("model.heads=[{task: bm25, layer: auto}]", "model.auto.report: expected the folder of a probing run for layer: auto, got none; run probe.py"),
        ("model.heads=[{task: bm25}, {task: bm25}]", "model.heads: expected each name once, got 'bm25' twice; give one of them another name="),
        ("model.heads=[{task: bm25, name: ranking}]", "model.heads[0].name: expected letters, digits and _ (and not 'ranking'), got 'ranking'"),
        ("model.heads=[{task: bm25, pooling: max}]", "model.heads[0].pooling: expected one of cls, mean, span; got 'max'"),
        ("model.heads=[{task: bm25, options: {bin: 3}}]", "model.heads[0].options.bin: unknown key for bm25; did you mean bins?"),
        ("model.heads=[{task: bm25, weight: much}]", "model.heads[0].weight: expected float, got 'much'"),
        ("model.sampling.mode=even", "model.sampling.mode: expected one of proportional, uniform, temperature, annealed; got 'even'"),
        ("model.sampling.main_fraction=1.5", "model.sampling.main_fraction: expected a number above 0 and below 1, or null; got 1.5"),
        ("model.weighting.surgery=gard", "model.weighting.surgery: expected one of none, pcgrad, guard; got 'gard'"),
        ("model.labels.max_pairs=0", "model.labels.max_pairs: expected a number of at least 1, got 0"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(override, said):
    with pytest.raises(ConfigError) as raised:
        config.check(composed(override))
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_several_mistakes_come_together_and_steps_of_one_task_can_not_be_compared():
    with pytest.raises(ConfigError) as raised:
        config.check(
            composed("model.sampling.composition=homogeneous", "model.weighting.surgery=guard", "model.heads=[{task: bm25, layer: x}]")
        )
    assert len(str(raised.value).split("\n")) == 2
    assert (
        "model.weighting.surgery: guard compares the tasks of a step, got steps of one task; set model.sampling.composition=mixed"
        in str(raised.value)
    )


def test_no_other_model_takes_them():
    entry.register()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = compose("train", ["model=monobert", "name=x", "+model.sampling={mode: uniform}"])
    with pytest.raises(ConfigError, match=r"model.sampling: unknown key for ranker.models.monobert.MonoBERT"):
        config.check(cfg)


def test_options_are_read_without_torch():
    code = "import sys; import ranker.data.multitask_check; assert 'torch' not in sys.modules"
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


def test_auto_takes_the_layer_of_the_highest_compression(tmp_path):
    (tmp_path / "probe_results.csv").write_text(REPORT)
    heads = "model.heads=[{task: bm25, layer: auto}, {task: sem, layer: auto}, {task: tf, layer: 0}]"
    for last, expected in (("true", [1, 2, 0]), ("false", [1, 1, 0])):
        cfg = composed(heads, f"model.auto.report={tmp_path}", f"model.auto.last_layer={last}")
        config.check(cfg)
        config.set_layers(cfg)
        assert [head.layer for head in cfg.model.heads] == expected
    # a report has the task's own name: that of its rule, its vectors or its file
    heads = [Head(task="coref"), Head(task="gap", name="who"), Head(task="jsonl", name="mine", options={"path": "labels.jsonl"})]
    heads = [dataclasses.replace(head, layer="auto") for head in heads]
    assert auto_layers(heads, AutoLayers(report=str(tmp_path))) == {"coref": 0, "who": 2, "mine": 1}
    for head, name in (("task: ner", "ner"), ("task: sem, options: {vectors: glove.6B.txt}", "sem_glove"), ("task: jsonl", "jsonl")):
        cfg = composed(f"model.heads=[{{{head}, layer: auto}}]", f"model.auto.report={tmp_path}")
        known = "bm25, coref_gap, coref_head, mine, sem_svd"
        with pytest.raises(ConfigError, match=rf"\.layer: expected {name} in .*probe_results.csv, got {known}; probe it, or give a layer"):
            config.check(cfg)


def collection(name: str, queries: dict[str, str]) -> Collection:
    docs = MemoryDocs([Doc("d0", "red apples and pears"), Doc("d1", "blue sky")])
    run = {query_id: {"d0": 2.0, "d1": 1.0} for query_id in queries}
    return Collection(name, docs, queries, {query_id: {"d0": 1} for query_id in queries}, Candidates.from_run(run))


def test_labels_on_queries_that_are_evaluated_on_are_refused(tmp_path):
    train = collection("train", {"1": "red apples", "2": "blue sky"})
    made = label_tasks(train, [TermFrequency()], TaskLabels(), {"test": collection("test", {"1": "green pears"})}, 0, tmp_path)
    assert {example.query_id for example in made[0]} == {"1", "2"}  # an equal id of another text is another query
    for name in ("val", "dl19"):
        held_out = {"other": collection("other", {"8": "pears"}), name: collection(name, {"9": "Blue  sky"})}
        with pytest.raises(DataError, match=rf"model.heads.tf: expected labels on training queries only, got 1 queries of {name}, as '2'"):
            label_tasks(train, [TermFrequency()], TaskLabels(), held_out, 0, tmp_path)


def test_triples_serve_where_there_are_no_candidates(tmp_path):
    whole = collection("train", {"1": "red apples", "2": "blue sky"})
    train = dataclasses.replace(whole, candidates=None, triples=[("1", "d0", "d1"), ("1", "d0", "d1"), ("2", "d1", "d0")])
    (made,) = label_tasks(train, [TermFrequency()], TaskLabels(max_pairs=3), {}, 0, tmp_path)
    assert {(example.query_id, example.doc_id) for example in made} < {(query, doc) for query in "12" for doc in ("d0", "d1")}
    assert len(made) == 3


def test_records_from_a_file_are_checked_as_well():
    example = whole_text_example(("x", "d0", "green pears", "red apples"), label="A")
    with pytest.raises(DataError, match="training queries only"):
        refuse_held_out("jsonl", [example], {"test": collection("test", {"1": "green pears"})})
