"""A validation and a test by hand: the number of scored candidates, the relevant grade, errors of other processes."""

from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from hydra import compose, initialize_config_dir
from torch import nn

from ranker.assembly.data import build_data, load_splits
from ranker.assembly.scorer import build_scorer
from ranker.cli import entry
from ranker.data.collection import Candidates, Collection, Doc, MemoryDocs, Splits
from ranker.data.datamodule import RankData
from ranker.data.options import BatchOptions
from ranker.data.scorer_inputs import ScorerInputs, TextLimits
from ranker.encoders.tiny import tiny_tokenizer
from ranker.errors import DataError, RankerError
from ranker.evaluation.scoring import Devices, score_collection
from ranker.interactions.grid import to_grid
from ranker.training.rerank_module import RerankModule
from ranker.types import RankBatch

CONF = Path(__file__).resolve().parents[3] / "conf"


@pytest.mark.parametrize(("val_depth", "expected"), [(3, 3), (1, 1), ("null", 6)])
def test_exactly_the_first_val_depth_candidates_are_scored(small_files, tmp_path, val_depth, expected):
    entry.register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose(
            "train",
            [
                "encoder=tiny",
                "data=files",
                f"data.path={small_files}",
                "depth=6",
                "name=x",
                f"cache_dir={tmp_path}",
                f"val_depth={val_depth}",
            ],
        )
    splits = load_splits(cfg)
    cfg.val_depth = None
    ranking = load_splits(cfg).val.candidates
    batches = build_data(cfg, splits, build_scorer(cfg)).score_batches(splits.val)
    assert sorted(torch.cat([batches[i].slots for i in range(len(batches))]).tolist()) == list(range(batches.num_slots))
    assert len(ranking["q24"]) > 6
    assert {query_id: list(docs) for query_id, docs in batches.run(torch.zeros(batches.num_slots).numpy()).items()} == {
        query_id: ranking[query_id][:expected] for query_id in ranking.query_ids
    }


class ByLength(nn.Module):
    """The shorter a doc, the better."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, batch: RankBatch) -> torch.Tensor:
        return to_grid(-self.weight * batch.pairs.cu_seqlens.diff(), batch.doc_mask)


@pytest.fixture
def graded():
    """Two queries with docs of 1 to 4 words: grade 1 is ranked first, grade 2 second and third."""

    def make(relevance: int) -> Collection:
        docs = MemoryDocs(Doc(f"d{i}", "bab " * i) for i in range(1, 5))
        run = {query: {f"d{i}": float(i) for i in range(1, 5)} for query in ("q1", "q2")}
        qrels = {"q1": {"d1": 1, "d2": 2}, "q2": {"d1": 1, "d3": 2}}
        return Collection(
            "graded", docs, {"q1": "cel", "q2": "dir"}, qrels, Candidates.from_run(run), relevance=relevance
        )

    return make


def data_of(collection, tmp_path):
    return RankData(
        Splits(None, collection, {"graded": collection}),
        ScorerInputs(tiny_tokenizer(), "pairs", 64),
        BatchOptions(max_tokens=20),
        TextLimits(8, 8),
        cache_dir=tmp_path,
    )


@pytest.mark.parametrize(("relevance", "name", "expected"), [(1, "RR", 1.0), (2, "RR(rel=2)", (1 / 2 + 1 / 3) / 2)])
def test_the_collection_s_relevance_is_the_grade_from_which_a_doc_counts(graded, tmp_path, relevance, name, expected):
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    data = data_of(graded(relevance), tmp_path)
    (measures,) = trainer.validate(RerankModule(ByLength(), ["RR"]), datamodule=data, verbose=False)
    # under the measure's whole name, and under the one that `monitor` asks for
    assert measures == {f"val/{name}": pytest.approx(expected), "val/RR": pytest.approx(expected)}


def test_a_collection_s_run_has_the_scores_of_each_query(graded, tmp_path, capsys):
    collection, scorer = graded(1), nn.Sequential(ByLength(), nn.Dropout(0.5)).train()
    scorer[0].eval()
    batches = data_of(collection, tmp_path).score_batches(collection)
    run = score_collection(scorer, batches, Devices(torch.device("cpu")), progress="test graded")
    # a pair has a query of 2 tokens, 3 special ones, and 2 tokens for each word of the doc
    assert run == {query: {f"d{i}": -(5.0 + 2 * i) for i in range(1, 5)} for query in ("q1", "q2")}
    assert [part.training for part in (scorer, scorer[0], scorer[1])] == [True, False, True]
    assert "test graded" in capsys.readouterr().out


def test_an_error_on_the_first_process_reaches_all_and_has_a_text_once(monkeypatch):
    sent = []

    def broadcast(values, src):
        sent.extend(values if not sent else [])
        values[:] = sent

    def fail():
        raise DataError("a broken file")

    monkeypatch.setattr(torch.distributed, "broadcast_object_list", broadcast)
    with pytest.raises(DataError, match="a broken file"):
        Devices(torch.device("cpu"), rank=0, world_size=2).on_first(fail)
    with pytest.raises(RankerError) as raised:
        Devices(torch.device("cpu"), rank=1, world_size=2).on_first(fail)
    assert str(raised.value) == ""
