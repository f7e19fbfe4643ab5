"""Damaged stored files: the same result, or one line that names the folder; never other numbers or a traceback."""

import functools
import hashlib
import random
import shutil
import sqlite3
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as pl
import numpy as np
import optuna
import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from hydra_plugins.ranker_sweeps import OptunaSweeper
from ranker.assembly.scorer import build_scorer
from ranker.checkpoint import load_scorer, read_description, save_model
from ranker.cli import entry, sweep, sweep_table
from ranker.data.collection import Candidates, Collection, Doc, MemoryDocs, Splits
from ranker.data.datamodule import RankData
from ranker.data.options import BatchOptions
from ranker.data.scorer_inputs import ScorerInputs, TextLimits
from ranker.data.token_store import token_store
from ranker.data.triples import triple_rows
from ranker.encoders.loading import load_encoder
from ranker.encoders.tiny import tiny_tokenizer
from ranker.errors import DataError, RankerError
from ranker.evaluation.scoring import Devices, score_collection
from ranker.files.checksums import write_sums
from ranker.models.colbert import ColBERT
from ranker.models.monobert import MonoBERT
from ranker.probing.blocks import BlockStore
from ranker.probing.label_store import labelled_examples
from ranker.probing.results import Results
from ranker.probing.sequences import Sequences
from ranker.probing.state_cache import StateCache
from ranker.probing.subject import Subject
from ranker.probing.tasks.rel import Relevance
from ranker.retrieval.encode import Device, describe, encode_docs
from ranker.retrieval.first_stage import first_stage
from ranker.retrieval.index import VectorIndex
from ranker.retrieval.indexes.ivf_flat import IVFFlat
from ranker.retrieval.vector_folder import claim
from ranker.retrieval.vector_store import VectorStore
from ranker.training import loggers
from ranker.training.checkpoint_files import WholeFiles, read_checkpoint
from ranker.training.nonfinite import read_dump, write_dump
from ranker.training.options import NonFiniteOptions
from ranker.training.rerank_module import RerankModule
from ranker.training.run_writer import write_text
from ranker.types import RankBatch, TokenBatch, TrainStep
from tests.unit.probing.mini import mini_sample
from tests.unit.probing.test_results import make as probe_results

ROOT = Path(__file__).resolve().parents[2]
TOKENIZER = tiny_tokenizer()
FLIPS = 6  # bits of a file, and its first and last one


def hashed(*values) -> str:
    """Hash of arrays, tensors and plain values."""
    digest = hashlib.blake2b()
    for value in values:
        if isinstance(value, torch.Tensor):
            value = value.detach().contiguous().view(torch.uint8).numpy() if value.ndim else value.numpy()
        digest.update(value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode())
    return digest.hexdigest()


def weights(scorer) -> str:
    tokenizer = scorer.encoder.tokenizer
    return hashed(
        *scorer.state_dict().values(), sorted(tokenizer.get_vocab().items()), tokenizer("Some words, cut")["input_ids"]
    )


@functools.cache
def composed(model: str):
    entry.register()
    choices = ["encoder=tiny", f"model={model}", "data=files", "data.path=.", "name=x", "cache_dir=x"]
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return compose("train", choices)


# each of these makes a folder; `read` gives what is computed from it
class Model:
    """`model/` of a monoBERT, as a training leaves it."""

    kind = "monobert"

    def __init__(self, folder):
        cfg = composed(self.kind)
        torch.manual_seed(0)
        save_model(folder, build_scorer(cfg), cfg)

    def read(self, folder):
        description = read_description(folder)
        return (
            weights(load_scorer(folder)),
            description["depth"],
            description["max_doc_tokens"],
            repr(description["model"]),
        )


class BiEncoder(Model):
    """`model/` of a DPR, in the layout of sentence-transformers."""

    kind, flips = "dpr", 1


class Run:
    """A run folder whose training was not finished."""

    def __init__(self, folder):
        cfg = composed("monobert")
        torch.manual_seed(0)
        state = {f"scorer.{name}": value for name, value in build_scorer(cfg).state_dict().items()}
        WholeFiles().save_checkpoint({"state_dict": state}, folder / "checkpoints" / "last.ckpt")
        write_text(folder / "config.yaml", OmegaConf.to_yaml(cfg, resolve=True))
        write_sums(folder, ["config.yaml"])

    def read(self, folder):
        return weights(load_scorer(folder, "last")), repr(read_description(folder))


class SmallCheckpoint:
    """A checkpoint of which most is the archive's headers."""

    flips = 300

    def __init__(self, folder):
        WholeFiles().save_checkpoint(
            {"state_dict": {"weight": torch.arange(3.0)}, "global_step": 7}, folder / "last.ckpt"
        )

    def read(self, folder):
        found = read_checkpoint(folder / "last.ckpt")
        return found["state_dict"]["weight"].tolist(), found["global_step"]


class Vectors:
    """Shards of a bi-encoder of several vectors a doc."""

    def __init__(self, folder):
        torch.manual_seed(0)
        scorer = ColBERT(load_encoder("tiny"), projection=8, query_length=8)
        docs = MemoryDocs(Doc(f"d{i}", "some words of a doc " * (i % 7 + 1)) for i in range(60))
        collection = Collection("small", docs, {"q": "some words"}, {})
        data = RankData(
            Splits(None, None, {"small": collection}),
            ScorerInputs.of(scorer),
            BatchOptions(max_tokens=500),
            TextLimits(16, 64),
            cache_dir=folder.parent / "cache",
        )
        collator = data.collator(collection)
        self.description = describe(scorer, collator.docs, docs.fingerprint, 64, "float16", "32-true", 40)
        claim(folder, self.description)
        encode_docs(scorer, collator, folder, self.description, Device(max_tokens=500))

    def read(self, folder):
        claim(folder, self.description)
        encoded = VectorStore(folder)
        return hashed(encoded.doc_ids, encoded.counts, np.concatenate(list(encoded.chunks())))


class Index:
    """An index on disk."""

    def __init__(self, folder):
        pytest.importorskip("faiss")
        folder.mkdir(parents=True, exist_ok=True)
        self.read(folder)

    def read(self, folder):
        values = np.random.default_rng(0).normal(size=(120, 8)).astype(np.float32)
        encoded = SimpleNamespace(
            folder=folder,
            description=SimpleNamespace(dim=8, digest="made here"),
            num_vectors=120,
            ends=np.arange(1, 121),
            chunks=lambda: [values],
            sample=lambda count: values,
        )
        return hashed(*VectorIndex.over(encoded, IVFFlat(lists=3, probes=3)).search(values[:20], 9))


class Tokens:
    """A token store."""

    def __init__(self, folder):
        self.read(folder)

    def read(self, folder):
        texts = [(f"d{i}", "some words of a doc " * (i % 7 + 1)) for i in range(40)]
        store = token_store(folder, "docs", lambda: texts, "fingerprint", TOKENIZER, 12)
        return hashed(store.tokens, store.offsets, store.ids(), store.rows([text_id for text_id, _ in texts]))


class Triples(list):
    fingerprint = "some triples"


class TripleRows:
    """Training triples as rows; the token stores lie elsewhere."""

    def __init__(self, folder):
        self.stores = [
            token_store(
                folder.parent / "stores",
                name,
                lambda name=name: [(f"{name}{i}", "a text") for i in range(9)],
                name,
                TOKENIZER,
                4,
            )
            for name in "qd"
        ]
        self.read(folder)

    def read(self, folder):
        triples = Triples((f"q{i % 9}", f"d{i % 7}", f"d{i % 5}") for i in range(200))
        collection = SimpleNamespace(name="x", triples=triples)
        return hashed(np.array(triple_rows(collection, *self.stores, folder)))


class FirstStage:
    """BM25's candidates."""

    def __init__(self, folder):
        self.read(folder)

    def read(self, folder):
        docs = MemoryDocs(Doc(f"d{i}", f"word{i % 4} word{i % 3} other") for i in range(20))
        queries = {f"q{i}": f"word{i}" for i in range(4)}
        return hashed(first_stage(Collection("small", docs, queries, {}), 5, folder).to_run())


class States:
    """Cached states in int8, with their scales."""

    def __init__(self, folder):
        torch.manual_seed(0)
        self.subject = Subject("tiny", load_encoder("tiny"))
        self.sequences = Sequences.of([(f"query {i}", "a doc") for i in range(5)], TOKENIZER, "pairs", 512, 64, 256)
        self.read(folder)

    def read(self, folder):
        states = StateCache(folder, dtype="int8").states(self.subject, self.sequences, [0, 2], torch.device("cpu"))
        return hashed(states.data, states.scales)


class Labels:
    """A probing task's examples."""

    def __init__(self, folder):
        self.read(folder)

    def read(self, folder):
        return hashed(labelled_examples(Relevance(pool=6), mini_sample(), folder))


class Blocks:
    """Finished blocks of the online code: one that is lost is computed anew."""

    flips = 60

    def __init__(self, folder):
        store = BlockStore(folder / "blocks.sqlite")
        store.put([(f"key{i}", {"bits": np.arange(50.0) + i, "more": np.ones(3)}) for i in range(4)])
        store.close()

    def read(self, folder):
        store = BlockStore(folder / "blocks.sqlite")
        try:
            found = [store.get(f"key{i}") for i in range(4)]
        finally:
            store.close()
        anew = [{"bits": np.arange(50.0) + i, "more": np.ones(3)} for i in range(4)]
        return hashed(
            *(value for own, new in zip(found, anew, strict=True) for value in (new if own is None else own).values())
        )


class Probe:
    """A finished probing run."""

    def __init__(self, folder):
        probe_results().write(folder)

    def read(self, folder):
        results = Results.read(folder)
        return hashed(
            [replace(result, bits=None) for result in results.all],
            *(result.bits for result in results.all),
            results.tasks,
        )


class Dump:
    """A step that was not finite."""

    def __init__(self, folder):
        write_text(folder.parent / "config.yaml", "seed: 1\n")
        strategy = SimpleNamespace(broadcast=lambda value, src: value, reduce_boolean_decision=bool)
        trainer = SimpleNamespace(
            global_rank=0, is_global_zero=True, world_size=1, precision="32-true", strategy=strategy
        )
        module = SimpleNamespace(
            trainer=trainer,
            nonfinite=NonFiniteOptions(folder=folder),
            micro_batch_seed=lambda step, i: 3,
            state_dict=lambda: {"w": torch.arange(40.0)},
        )
        tokens = TokenBatch(torch.arange(6), torch.zeros(6, dtype=torch.int64), torch.tensor([0, 2, 6]), 4)
        batch = RankBatch(
            torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool), torch.zeros(1, dtype=torch.int64), 1.0, tokens
        )
        assert write_dump(module, TrainStep(0, 0, (batch,), 1, 2), 5, float("nan"), 1.0, ["q1"]) == folder / "step-5"

    def read(self, folder):
        step, state, about = read_dump(folder / "step-5")
        return hashed(
            step.micro_batches[0].labels, step.seeds, state["w"], about, (folder / "step-5/config.yaml").read_text()
        )


STORED = {
    "model": Model,
    "bi_encoder": BiEncoder,
    "run": Run,
    "checkpoint": SmallCheckpoint,
    "vectors": Vectors,
    "index": Index,
    "tokens": Tokens,
    "triples": TripleRows,
    "bm25": FirstStage,
    "states": States,
    "labels": Labels,
    "blocks": Blocks,
    "probe": Probe,
    "dump": Dump,
}


def damages(content: bytes, flips: int):
    """(What happened, content): flipped bits, half of it, nothing, something else of the same size."""
    rng = random.Random(len(content))
    for bit in (0, 8 * len(content) - 1, *(rng.randrange(8 * len(content)) for _ in range(flips))):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        yield f"bit {bit}", bytes(flipped)
    yield "half", content[: len(content) // 2]
    yield "empty", b""
    yield "garbage", rng.randbytes(len(content))


@pytest.fixture
def stored(request, tmp_path):
    """Makes one of `STORED` in a folder `whole`."""
    return STORED[request.param](tmp_path / "whole")


@pytest.mark.parametrize("stored", STORED, indirect=True)
def test_damage_gives_the_same_result_or_one_line(stored, tmp_path, caplog):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    expected = stored.read(whole)
    names = [
        path.relative_to(whole) for path in sorted(whole.rglob("*")) if path.is_file() and ".lock" not in path.name
    ]
    assert names
    refused = 0
    for name in names:
        for what, content in damages((whole / name).read_bytes(), getattr(stored, "flips", FLIPS)):
            shutil.copytree(whole, broken)
            (broken / name).write_bytes(content)
            try:
                assert stored.read(broken) == expected, f"{name}, {what}: other numbers"
            except RankerError as error:
                refused += 1
                assert all(str(broken) in line for line in str(error).split("\n")), f"{name}, {what}: {error}"
            shutil.rmtree(broken)
    assert refused or "is made anew" in caplog.text or "computed anew" in caplog.text


@pytest.mark.parametrize("stored", ["model", "bi_encoder"], indirect=True)
def test_a_damaged_folder_of_another_program_is_refused_in_one_line(stored, tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for own in ("checksums.json", "ranker.yaml"):
        (whole / own).unlink()
    expected = weights(load_scorer(whole))
    for name in [path.relative_to(whole) for path in sorted(whole.rglob("*")) if path.is_file()]:
        for what, content in list(damages((whole / name).read_bytes(), 0))[-3:]:
            shutil.copytree(whole, broken)
            (broken / name).write_bytes(content)
            try:
                assert weights(load_scorer(broken)) == expected, f"{name}, {what}: other numbers"
            except RankerError as error:
                assert all(str(broken) in line for line in str(error).split("\n")), f"{name}, {what}: {error}"
            shutil.rmtree(broken)


@pytest.mark.parametrize("content", [b"", b"no database at all", None])
def test_a_damaged_study_is_refused_and_its_jobs_stay(tmp_path, content):
    storage = f"sqlite:///{tmp_path}/study.db"
    study = optuna.create_study(storage=storage, study_name="sweep", direction="maximize")
    study.tell(study.ask({"lr": optuna.distributions.FloatDistribution(0.0, 1.0)}), 0.5)
    sweep.run_job(tmp_path, tmp_path / "0", 0, ["lr=0.5"], lambda: 0.5)
    database = tmp_path / "study.db"
    database.write_bytes(database.read_bytes()[:20_000] if content is None else content)
    sweeper = OptunaSweeper(2, 1, "maximize", storage, "sweep", optuna.samplers.RandomSampler(0), None, None)
    sweeper._lock = tmp_path / ".sweeper-0.lock"
    with pytest.raises(
        RankerError, match=r"hydra.sweeper.storage: expected Optuna's study in .*study.db, got"
    ) as raised:
        sweeper._study(tmp_path)
    assert "\n" not in str(raised.value)
    assert sweep_table.read_jobs(tmp_path)[0]["objective"] == 0.5


@pytest.mark.parametrize("content", ["", "{", "[]", '{"measures": 3}', '{"measures": {"AP": "x"}}', '{"other": {}}'])
def test_a_damaged_evaluation_is_left_out_of_a_sweeps_table(tmp_path, caplog, content):
    sweep.run_job(tmp_path, tmp_path / "0", 0, ["lr=0.5"], lambda: 0.5)
    metrics = tmp_path / "0/evaluation/small/metrics.json"
    metrics.parent.mkdir(parents=True)
    metrics.write_text(content)
    assert [(row["status"], row["measures"]) for row in sweep_table.read_jobs(tmp_path)] == [("ok", {})]
    assert str(metrics) in caplog.text
    (tmp_path / "0/job.json").write_text(content)
    assert sweep_table.read_jobs(tmp_path)[0]["status"] == "killed"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"no": "id"}'])
def test_a_damaged_note_of_a_wandb_run_is_named(tmp_path, content):
    (tmp_path / "wandb.json").write_text(content)
    with pytest.raises(RankerError, match=r"expected a readable wandb\.json and wandb\.jsonl"):
        loggers._read(tmp_path)
    (tmp_path / "wandb.json").write_text('{"id": "abc"}')
    (tmp_path / "wandb.jsonl").write_text(content + "\n" if content else "3\n")
    with pytest.raises(RankerError, match=r"expected a readable wandb\.json and wandb\.jsonl"):
        loggers._read(tmp_path)


@pytest.mark.parametrize("value", [float("nan"), 3e38])  # the second overflows float32 within the scorer
@pytest.mark.parametrize("phase", ["validate", "test"])
def test_a_model_whose_scores_are_not_finite_has_no_evaluation(tmp_path, value, phase):
    scorer = MonoBERT(load_encoder("tiny"))
    with torch.no_grad():
        scorer.head.weight.fill_(value)
    docs = MemoryDocs(Doc(f"d{i}", f"some words of doc {i}") for i in range(6))
    candidates = Candidates.from_lists([(f"q{i}", [f"d{i}", f"d{i + 1}"], [2.0, 1.0]) for i in range(3)])
    collection = Collection(
        "small", docs, {f"q{i}": "some words" for i in range(3)}, {f"q{i}": {f"d{i}": 1} for i in range(3)}, candidates
    )
    data = RankData(
        Splits(None, collection, {"small": collection}), ScorerInputs.of(scorer),
        BatchOptions(max_tokens=500), TextLimits(16, 64), cache_dir=tmp_path / "cache",
    )  # fmt: skip
    trainer = pl.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with pytest.raises(DataError, match=r"got 6 of 6 that are not, the first (nan|-?inf) for query 'q0' and doc 'd0'"):
        if phase == "validate":
            trainer.validate(RerankModule(scorer, ["AP"]), datamodule=data, verbose=False)
        else:
            score_collection(scorer, data.score_batches(collection), Devices(torch.device("cpu")))


def test_a_token_store_in_the_other_byte_order_is_refused(tmp_path):
    stored = Tokens(tmp_path / "cache")
    (meta,) = (tmp_path / "cache").glob("*/meta.json")
    assert '"dtype": "<u2"' in meta.read_text()  # one bit away
    meta.write_text(meta.read_text().replace('"dtype": "<u2"', '"dtype": ">u2"'))
    with pytest.raises(DataError, match=r"expected a token store's meta.json with dtype <u2 or <i4, got '>u2'"):
        stored.read(tmp_path / "cache")


def test_a_block_of_another_key_is_not_taken(tmp_path, caplog):
    Blocks(tmp_path)
    with sqlite3.connect(tmp_path / "blocks.sqlite") as connection:
        connection.execute(
            "UPDATE blocks SET arrays = (SELECT arrays FROM blocks WHERE key = 'key1') WHERE key = 'key0'"
        )
    store = BlockStore(tmp_path / "blocks.sqlite")
    assert store.get("key0") is None and "those of another block" in caplog.text
    assert store.get("key1")["bits"].tolist() == [1.0 + i for i in range(50)]
    store.close()
