"""The parts of a whole training: the best weights reach model/, and the seed reaches every draw."""

import csv
import json

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from commands import run_folder
from hydra.utils import instantiate
from omegaconf import OmegaConf

from ranker.assembly.data import build_data, load_splits
from ranker.assembly.scorer import build_optimizer, build_scorer
from ranker.checkpoint import load_scorer
from ranker.training.options import Optimization
from ranker.training.rerank_module import RerankModule

SMALL = [
    "encoder=tiny",
    "data=files",
    "batch.queries=8",
    "batch.docs=4",
    "optim.lr=3e-3",
    "depth=20",
    "trainer.log_every_n_steps=1",
    "trainer.enable_progress_bar=false",
    "report=none",
    "name=wiring",
]


def column(folder, name):
    with (folder / "metrics.csv").open() as lines:
        return [float(row[name]) for row in csv.DictReader(lines) if row.get(name)]


def scores_of(scorer, folder):
    """A scorer's scores of the test candidates, in the order of the run file, and the scores in the run file."""
    cfg = OmegaConf.load(folder / "config.yaml")
    splits = load_splits(cfg)
    ((name, collection),) = splits.tests.items()
    batches = build_data(cfg, splits, scorer).score_batches(collection)
    values = np.zeros(batches.num_slots, dtype=np.float32)
    with torch.no_grad():
        for batch in (batches[i] for i in range(len(batches))):
            values[batch.slots.numpy()] = scorer.eval()(batch.batch)[batch.batch.doc_mask].numpy()
    rows = [line.split() for line in (folder / f"evaluation/{name}/run.trec").read_text().splitlines()]
    run = batches.run(values)
    return [run[row[0]][row[2]] for row in rows], [float(row[4]) for row in rows]


@pytest.fixture(scope="module")
def worse(forks, small_files, tmp_path_factory):
    """A training that gets worse: in validation every doc but the one trained on is relevant."""
    where = tmp_path_factory.mktemp("worse")
    data = where / "data"
    data.mkdir()
    (data / "docs.jsonl").write_text((small_files / "docs.jsonl").read_text())
    for split in ("train", "test"):
        (data / f"qrels.{split}.txt").write_text((small_files / f"qrels.{split}.txt").read_text())
    queries = (small_files / "queries.tsv").read_text()
    texts = dict(line.split("\t") for line in queries.splitlines())
    (data / "queries.tsv").write_text(queries + "".join(f"v{i}\t{texts[f'q{i}']}\n" for i in range(24)))
    (data / "qrels.dev.txt").write_text("".join(f"v{i} 0 d{j} 1\n" for i in range(24) for j in range(60) if j != i))
    done = forks.run(
        "train.py",
        *SMALL,
        f"data.path={data}",
        "trainer.max_epochs=6",
        "batch.queries=24",
        "schedule=constant",
        cwd=where,
    )
    assert done.code == 0, done.out
    return run_folder(where)


def test_the_best_weights_are_those_that_are_exported_and_tested(worse):
    folder = worse
    measures = column(folder, "val/nDCG@10")
    assert measures[-1] < max(measures), "the last validation is worse than the best"
    result = json.loads((folder / "result.json").read_text())
    assert result["best_step"] == 1 + measures.index(max(measures)) < result["steps"] == 6
    assert result["objective"] == pytest.approx(max(measures))
    best, last = (
        torch.load(folder / f"checkpoints/{name}.ckpt", weights_only=True)["state_dict"] for name in ("best", "last")
    )  # fmt: skip
    scorer = load_scorer(folder / "model")
    exported = {f"scorer.{name}": value for name, value in scorer.state_dict().items()}
    assert exported.keys() == best.keys()
    assert all(torch.equal(value, best[name]) for name, value in exported.items())
    assert not all(torch.equal(value, last[name]) for name, value in exported.items())
    expected, written = scores_of(scorer, folder)
    assert written == pytest.approx(expected, abs=1e-5)
    others, _ = scores_of(load_scorer(folder, "last"), folder)
    assert not np.allclose(others, written, atol=1e-3)


@pytest.mark.parametrize("seed", [0, 1])
def test_the_seed_decides_first_weights_order_draws_and_dropout(forks, small_files, tmp_path, seed):
    done = forks.run(
        "train.py",
        *SMALL,
        f"data.path={small_files}",
        f"seed={seed}",
        "encoder.dropout=0.2",
        "model.dropout=0.2",
        "optim.lr=0",
        "trainer.max_steps=1",
        f"cache_dir={tmp_path / 'cache'}",
        cwd=tmp_path,
    )
    assert done.code == 0, done.out
    assert "optim.lr: 0, so the training changes no weight" in done.out
    folder = run_folder(tmp_path)
    # the same parts built here, each with the seed itself
    cfg = OmegaConf.load(folder / "config.yaml")
    splits = load_splits(cfg)
    pl.seed_everything(seed, verbose=False)
    scorer = build_scorer(cfg)
    saved = load_scorer(folder / "model").state_dict()
    assert all(torch.equal(value, saved[name]) for name, value in scorer.state_dict().items())
    data = build_data(cfg, splits, scorer)
    data.seed = seed
    steps = data.train_steps()
    assert steps.plan.groups(0, 0).tolist() == np.random.default_rng([seed, 0]).permutation(24)[:8].tolist()
    options = Optimization(build_optimizer(cfg), seed=seed)
    module = RerankModule(scorer, [], loss=instantiate(cfg.loss), optimization=options).train()
    step = steps[0, 0]
    (batch,) = step.micro_batches
    module._seed_dropout(step, 0)
    assert column(folder, "train/loss") == pytest.approx([module.micro_batch_loss(batch).item()], rel=1e-5)
