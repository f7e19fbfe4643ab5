"""What every probing task must hold. Tasks are found through `conf/probe/*.yaml`; a new task needs only its yaml."""

import doctest
import inspect
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import OmegaConf

from ranker.cli import entry
from ranker.config.check import check
from ranker.encoders.tiny import tiny_tokenizer
from ranker.errors import DataError
from ranker.probing.examples import (
    PARTS,
    ProbeExample,
    ProbeTask,
    TaskUnavailable,
    check_example,
    from_record,
    to_record,
)
from ranker.probing.label_store import build_data, span_tokens
from ranker.probing.pairs import assign_parts
from ranker.probing.sequences import Sequences
from ranker.probing.spacy_model import missing
from tests.unit.probing.mini import mini_sample

ROOT = Path(__file__).resolve().parents[2]
YAMLS = {path.stem: path for path in sorted((ROOT / "conf/probe").glob("*.yaml")) if path.stem != "all"}
SEVEN = ["bm25", "tf", "sem", "ner", "coref", "fact", "rel"]
NEEDS_SPACY = ("ner", "coref")
SAMPLE = mini_sample()
# a setting of each task that changes its labels, and so must change its labeller
CHANGES = {
    "bm25": {"k1": 0.5}, "tf": {"legacy_case": True}, "sem": {"similarity": "mean_vec"}, "ner": {"max_targets": 1},
    "coref": {"exclude_copies": True}, "rel": {"pool": 3}, "gap": {"max_pairs": 1},
    "tfidf": {"analyzer": "stemmed"}, "ner_rules": {"max_targets": 1}, "fact_synth": {"max_words": 7},
}  # fmt: skip


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """Files for the tasks that read labels made elsewhere."""
    collection = SAMPLE.collection
    (tmp_path / "docs.jsonl").write_text(
        "".join(json.dumps({"id": doc.doc_id, "text": doc.text, "title": doc.title}) + "\n" for doc in collection.docs)
    )
    (tmp_path / "queries.tsv").write_text(
        "".join(f"{query_id}\t{text}\n" for query_id, text in collection.queries.items())
    )
    lines = [
        f"{query_id}\t{doc_id}\t{'SUPPORT' if i % 3 else 'REFUTE'}" for i, (query_id, doc_id) in enumerate(SAMPLE.pairs)
    ]
    (tmp_path / "labels.tsv").write_text("query_id\tdoc_id\tlabel\n" + "\n".join(lines) + "\n")
    columns = "ID\tText\tPronoun\tPronoun-offset\tA\tA-offset\tA-coref\tB\tB-offset\tB-coref\tURL\n"
    rows = "".join(f"{{}}-{i}\tAnn said Bea lost her bag.\ther\t18\tAnn\t0\tFALSE\tBea\t9\tTRUE\t\n" for i in range(4))
    for part in ("development", "validation", "test"):
        (tmp_path / f"gap-{part}.tsv").write_text(columns + rows.replace("{}", part))
    records = [to_record(example, "x") for example in _load("tf").examples(SAMPLE)]
    for record in records:
        record["targets"][0]["label"] = str(record["targets"][0].pop("value") > 0.05)
    (tmp_path / "labels.jsonl").write_text("\n".join(map(json.dumps, records)))
    return {"fact": str(tmp_path), "gap": str(tmp_path), "jsonl": str(tmp_path / "labels.jsonl")}


def _load(name: str, **changes: object) -> ProbeTask:
    node = OmegaConf.create({**OmegaConf.to_container(OmegaConf.load(YAMLS[name]), resolve=True), **changes})
    return instantiate(node, _convert_="all")


@pytest.fixture(params=list(YAMLS))
def task(request: pytest.FixtureRequest, files: dict[str, str]) -> Iterator[tuple[str, ProbeTask]]:
    if request.param in NEEDS_SPACY and missing():
        pytest.skip(missing())
    yield request.param, _load(request.param, **({"path": files[request.param]} if request.param in files else {}))


def test_all_names_the_seven_tasks() -> None:
    assert OmegaConf.load(ROOT / "conf/probe/all.yaml").defaults == SEVEN
    assert set(SEVEN) <= set(YAMLS)


@pytest.mark.parametrize("chosen", [*YAMLS, "all", "[tf,rel]"])
def test_a_task_composes_under_its_own_name(chosen: str) -> None:
    entry.register()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = compose("probe", [f"probe={chosen}"])
    check(cfg)
    names = SEVEN if chosen == "all" else chosen.strip("[]").split(",")
    assert list(cfg.probe) == names
    assert cfg.skip_unavailable == (chosen == "all"), "a task that was asked for by name is not left out silently"


def test_examples_are_whole_and_repeatable(task: tuple[str, ProbeTask]) -> None:
    name, made = task
    examples = list(made.examples(SAMPLE))
    assert examples
    assert list(made.examples(SAMPLE)) == examples
    for example in examples:
        assert example.targets, "pairs without a target are left out"
        check_example(example, name)
        assert from_record(json.loads(json.dumps(to_record(example, made.labeller))), name) == example
        for target in example.targets:
            assert (target.label is None) != (target.value is None)
            for span in target.spans:
                assert example.text_of(span).strip()
    assert len({len(target.spans) for example in examples for target in example.targets}) == 1
    if made.whole_text:
        assert all(len(example.targets) == 1 and example.targets[0].spans[0].start is None for example in examples)
    if made.classes:
        assert {target.label for example in examples for target in example.targets} <= set(made.classes)
    if made.ranks:
        assert made.classes == ("0", "1")
    assert {example.part for example in examples} <= {None, *PARTS}
    pairs = [(example.query_id, example.doc_id) for example in examples if example.query]
    assert len(set(pairs)) == len(pairs)


def test_examples_become_data(task: tuple[str, ProbeTask]) -> None:
    name, made = task
    examples = list(made.examples(SAMPLE))
    parts = assign_parts(examples, SAMPLE, "query", 0.2, 0.2)
    pairs = list(dict.fromkeys((example.query, example.doc) for example in examples))
    pair_index = {pair: place for place, pair in enumerate(pairs)}
    sequences = Sequences.of(pairs, tiny_tokenizer(), "pairs", 512, 64, 256)
    data = build_data(made, examples, parts, [span_tokens(examples, sequences, pair_index)])
    assert data.num_cut == 0, name
    assert len(data.labels) == data.pair_starts[-1] == sum(len(example.targets) for example in examples)
    assert data.labels.min() >= 0
    assert data.labels.max() < len(data.classes)
    assert 2 <= len(data.classes) <= 18


def test_labeller_tells_what_made_the_labels(task: tuple[str, ProbeTask], files: dict[str, str]) -> None:
    name, made = task
    path = {"path": files[name]} if name in files else {}
    assert "@" in made.labeller, "id and version"
    assert _load(name, **path).labeller == made.labeller
    if name in CHANGES:
        changed = _load(name, **path, **CHANGES[name])
        assert changed.labeller != made.labeller
        # the words that stemming leaves out are in all docs of the sample, with TF-IDF 0
        assert name == "tfidf" or list(changed.examples(SAMPLE)) != list(made.examples(SAMPLE))
    else:
        target = Path(files[name])
        target = target if target.is_file() else target / "labels.tsv"
        target.write_text(target.read_text().replace("SUPPORT", "AFFIRM").replace('"True"', '"Yes"'))
        assert _load(name, **path).labeller != made.labeller, "a file's content counts"


@pytest.mark.parametrize("name", ["fact", "gap", "jsonl"])
def test_a_missing_file_says_which_key_to_set(name: str) -> None:
    for path in (None, "/does/not/exist"):
        with pytest.raises(TaskUnavailable, match=rf"probe\.{name}\.path"):
            made = _load(name, path=path)
            _ = made.labeller
            list(made.examples(SAMPLE))


# seeded faults: the checks above must see them
# --------------------------------------------------------------------------------------------------------------


def _shifted(example: ProbeExample) -> ProbeExample:
    """Spans one character beyond the text."""
    target = example.targets[0]
    return replace(
        example,
        targets=(replace(target, spans=(replace(target.spans[0], start=0, end=len(example.doc) + 1, side="doc"),)),),
    )


@pytest.mark.parametrize(
    "fault", [_shifted, lambda example: replace(example, targets=()), lambda example: replace(example, part="dev")]
)
def test_seeded_faults_are_seen(fault, monkeypatch: pytest.MonkeyPatch) -> None:
    made = _load("tf")
    real = type(made).examples
    monkeypatch.setattr(type(made), "examples", lambda self, sample: map(fault, real(self, sample)))
    with pytest.raises((AssertionError, DataError)):  # a check here, or one of the program's own
        test_examples_are_whole_and_repeatable(("tf", made))


# the guide
# --------------------------------------------------------------------------------------------------------------


def test_documented_example_is_a_task(follow_guide) -> None:
    """Follow docs/add_a_probe.md: write its three files, run the value test, the doctest and the contract."""
    module, yaml_path = follow_guide("add_a_probe.md", "ranker.probing.tasks")
    name = yaml_path.stem
    assert doctest.testmod(module) == (0, 1)
    assert (
        yaml_path.read_text().splitlines()[0]
        == f"# @package probe.{name}"
        == f"# @package probe.{module.__name__.rpartition('.')[2]}"
    )
    node = OmegaConf.to_container(OmegaConf.load(yaml_path))
    constructor = inspect.signature(module.Coverage.__init__).parameters
    assert {key: value for key, value in node.items() if key != "_target_"} == {
        key: parameter.default for key, parameter in constructor.items() if key != "self"
    }
    made = instantiate(node, _convert_="all")
    test_examples_are_whole_and_repeatable((name, made))
    test_examples_become_data((name, made))
    changed = instantiate({**node, "stemmed": False}, _convert_="all")
    assert changed.labeller != made.labeller
    assert changed.name != made.name
