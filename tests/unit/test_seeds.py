"""Every source of randomness follows its seed: pinned values at seed 0, to detect silent changes, others at seed 1."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir

from ranker.assembly.data import build_data, load_splits
from ranker.assembly.scorer import build_scorer
from ranker.cli import entry
from ranker.data.collection import Candidates, Collection, Doc, MemoryDocs
from ranker.data.judged_groups import JudgedGroups
from ranker.data.sampling import GroupOptions
from ranker.data.splits import hash_order
from ranker.data.step_plan import HashedOrder, StepPlan
from ranker.data.token_store import build_token_store
from ranker.encoders.loading import load_encoder
from ranker.encoders.tiny import tiny_tokenizer
from ranker.models.monobert import MonoBERT
from ranker.multitask.options import TaskSampling
from ranker.multitask.sampling import TaskPlan
from ranker.probing.controls import control_labels, shuffled_labels
from ranker.probing.online_code import permutation
from ranker.probing.optimizer import Dropout
from ranker.probing.probes import EdgeProbe
from ranker.training.options import Optimization
from ranker.training.rerank_module import RerankModule
from ranker.types import RankBatch, TokenBatch, TrainStep

CONF = Path(__file__).resolve().parents[2] / "conf"
NUMBERS = np.arange(20)


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """A collection of one query with 4 relevant docs and 12 candidates among 40 docs, and its token stores."""
    folder = tmp_path_factory.mktemp("seeds")
    ids = [f"d{i:02}" for i in range(40)]
    docs = MemoryDocs(Doc(name, f"text {name}") for name in ids)
    qrels = {"q": dict.fromkeys(ids[:4], 1)}
    candidates = Candidates.from_run({"q": {name: -float(rank) for rank, name in enumerate(ids[4:16])}})
    collection = Collection("seeds", docs, {"q": "query"}, qrels, candidates)
    queries = build_token_store([("q", "query")], folder / "queries", tiny_tokenizer(), 16, fingerprint="q")
    return (
        collection,
        queries,
        build_token_store(((name, name) for name in ids), folder / "docs", tiny_tokenizer(), 16, fingerprint="d"),
    )


def drawn(stores, seed: int, epoch: int = 0, **options) -> list[int]:
    rows, _ = JudgedGroups(*stores, GroupOptions(**options, seed=seed)).draw(epoch, np.array([0]))
    return rows[0].tolist()


def plan(seed: int) -> TaskPlan:
    return TaskPlan(StepPlan(40, 4, 100, seed=seed), 2, (9, 9, 9), TaskSampling(main_fraction=0.5))


SOURCES = {
    "relevant docs": lambda stores, seed: drawn(stores, seed, num_docs=3, positives=2)[:2],
    "negatives": lambda stores, seed: drawn(stores, seed, num_docs=5)[1:],
    "random negatives": lambda stores, seed: drawn(stores, seed, num_docs=17, random_negatives=True)[13:],
    "order of groups": lambda _, seed: StepPlan(20, 6, 100, seed=seed).groups(0, 0).tolist(),
    "order of very many groups": lambda _, seed: StepPlan(2**24 + 1, 4, 100, seed=seed).groups(0, 0).tolist(),
    "hashed order": lambda _, seed: HashedOrder(1000, seed, 0)[:4].tolist(),
    "tasks and their rows": lambda _, seed: [rows.tolist() for rows in plan(seed).rows(0, 1)],
    "split by hash": lambda _, seed: hash_order("abcdef", seed),
    "control labels": lambda _, seed: control_labels(
        list("abcdefgh"), NUMBERS[:8] % 2, NUMBERS[:8] < 8, 2, seed
    ).tolist(),
    "shuffled labels": lambda _, seed: shuffled_labels(NUMBERS[:6], np.array(["train"] * 6), seed).tolist(),
    "a probe's order": lambda _, seed: permutation(seed, 8).tolist(),
    "a probe's weights": lambda _, seed: [round(x, 4) for x in EdgeProbe(8, 2, 1, hidden=4).initial(seed)[:3].tolist()],
    "a probe's dropout": lambda _, seed: Dropout([seed], 0.5, (1, 8), torch.device("cpu"))(1).flatten().tolist(),
}
PINNED = {
    "relevant docs": [0, 3],
    "negatives": [9, 13, 7, 10],
    "random negatives": [34, 37, 16, 32],
    "order of groups": [4, 19, 6, 2, 13, 16],
    "order of very many groups": [11012865, 8161003, 1077907, 11440679],
    "hashed order": [627, 365, 430, 53],
    "tasks and their rows": [[3, 4, 7, 8], [5], [0, 4, 5]],
    "split by hash": ["e", "c", "f", "b", "a", "d"],
    "control labels": [1, 0, 0, 1, 0, 0, 1, 0],
    "shuffled labels": [1, 4, 3, 0, 2, 5],
    "a probe's order": [4, 7, 0, 6, 5, 2, 3, 1],
    "a probe's weights": [-0.0026, 0.1897, -0.291],
    "a probe's dropout": [2.0, 0.0, 2.0, 0.0, 0.0, 0.0, 2.0, 2.0],
    "dropout": (2296417776773341989, 308076163979394524),
}


@pytest.mark.parametrize("source", SOURCES)
def test_a_draw_is_pinned_at_seed_0_and_another_at_seed_1(stores, source):
    draw = SOURCES[source]
    assert draw(stores, 0) == draw(stores, 0) == PINNED[source]
    assert draw(stores, 1) != PINNED[source]


@pytest.mark.parametrize("source", ["relevant docs", "negatives", "random negatives"])
def test_an_epoch_draws_anew(stores, source):
    options = {
        "relevant docs": {"num_docs": 3, "positives": 2},
        "negatives": {"num_docs": 5},
        "random negatives": {"num_docs": 17, "random_negatives": True},
    }[source]
    assert sorted(drawn(stores, 0, 0, **options)) != sorted(drawn(stores, 0, 1, **options))
    assert StepPlan(20, 6, 100).groups(0, 0).tolist() != StepPlan(20, 6, 100).groups(1, 0).tolist()


def test_the_configuration_s_seed_reaches_order_and_draws(small_files, tmp_path):
    entry.register()
    steps = []
    for seed in (0, 0, 1):
        with initialize_config_dir(str(CONF), version_base="1.3"):
            cfg = compose(
                "train",
                [
                    "encoder=tiny",
                    "data=files",
                    f"data.path={small_files}",
                    "batch.docs=4",
                    "batch.queries=4",
                    f"seed={seed}",
                    "name=x",
                    f"cache_dir={tmp_path}",
                ],
            )
        train = build_data(cfg, load_splits(cfg), build_scorer(cfg)).train_steps()
        steps.append(
            (train.plan.groups(0, 0).tolist(), train.sampler.draw(0, np.arange(len(train.sampler)))[0].tolist())
        )
    assert steps[0] == steps[1]
    assert steps[0][0] != steps[2][0]
    assert steps[0][1] != steps[2][1]


# dropout
# ----------------------------------------------------------------------------------------------------


def batch() -> RankBatch:
    tokens = torch.arange(5, 25)
    pairs = TokenBatch(
        tokens, torch.zeros_like(tokens), torch.tensor([0, 10, 20], dtype=torch.int32), 10, row_ids=torch.tensor([0, 1])
    )
    return RankBatch(torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool), torch.tensor([0]), 1.0, pairs=pairs)


def scores(
    where: str, seed: int = 0, rank: int = 0, epoch: int = 0, index: int = 0, micro_batch: int = 0
) -> list[float]:
    """Scores of a training pass with dropout in one part of the scorer, after the module has seeded it."""
    torch.manual_seed(0)
    encoder = load_encoder(
        "tiny", dropout=0.0 if where == "head" else 0.5, attention_dropout=0.0, ragged=where != "padded encoder"
    )
    scorer = MonoBERT(encoder, dropout=0.5 if where == "head" else 0.0)

    class OfRank(RerankModule):
        global_rank = rank

    module = OfRank(scorer, [], optimization=Optimization(seed=seed)).train()
    module._seed_dropout(TrainStep(epoch, index, (batch(),) * 3, 1, 2), micro_batch)
    return scorer(batch())[0].tolist()


OTHERS = [{"seed": 1}, {"epoch": 1}, {"index": 1}, {"micro_batch": 1}, {"rank": 1}]


def test_torch_s_dropout_is_another_for_each_seed_epoch_step_micro_batch_and_rank():
    draws = [scores("head", **other) for other in ({}, *OTHERS)]
    assert draws[0] == scores("head")
    assert len({tuple(draw) for draw in draws}) == len(draws)


@pytest.mark.parametrize("where", ["encoder", "padded encoder"])
def test_dropout_by_hash_is_another_for_each_seed_epoch_and_step_but_not_for_the_layout(where):
    draws = [scores(where, **other) for other in ({}, *OTHERS)]
    assert len({tuple(draw) for draw in draws[:4]}) == 4
    assert draws[0] == draws[4] == draws[5] == scores(where)


def test_dropout_s_seeds_are_pinned_at_seed_0():
    module = RerankModule(MonoBERT(load_encoder("tiny")), [], optimization=Optimization(seed=0))
    step = TrainStep(1, 2, (batch(),), 1, 2)
    module._seed_dropout(step, 0)
    assert (module.micro_batch_seed(step, 0), module.scorer.encoder.dropout_seed) == PINNED["dropout"]
