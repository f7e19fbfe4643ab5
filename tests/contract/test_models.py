"""What every trainable model of conf/model must do, tested with the tiny random encoder or language model.

A new model is tested as soon as its yaml exists.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.errors import InstantiationException
from omegaconf import OmegaConf

from ranker.assembly.data import build_data
from ranker.assembly.scorer import build_scorer
from ranker.checkpoint import load_scorer, save_model
from ranker.cli import entry
from ranker.config.signatures import attribute_of
from ranker.data.collection import Splits
from ranker.data.sources.files import Files
from ranker.losses.lce import LCE
from ranker.retrieval.first_stage import with_candidates

ROOT = Path(__file__).resolve().parents[2]
MODELS = [
    path.stem for path in sorted((ROOT / "conf/model").glob("*.yaml")) if not OmegaConf.load(path).get("_partial_")
]


def encoder_for(model):
    """The random encoder that a model takes."""
    target = OmegaConf.load(ROOT / f"conf/model/{model}.yaml")._target_
    needs = {"decoder_only": "tiny_lm", "sequence_to_sequence": "tiny_t5"}
    return next((name for key, name in needs.items() if attribute_of(target, key, default=False)), "tiny")


@cache
def composed(model, data):
    """The configuration of a training of the model."""
    small = ["depth=6", "batch.docs=4", "batch.queries=4", f"name={model}"]
    entry.register()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return compose(
            "train", [f"model={model}", f"encoder={encoder_for(model)}", "data=files", f"data.path={data}", *small]
        )


@pytest.fixture(params=MODELS)
def cfg(request, small_files, tmp_path):
    """A copy of the configuration, with a cache of its own."""
    torch.manual_seed(0)
    copied = composed(request.param, small_files).copy()
    copied.cache_dir = str(tmp_path)
    return copied


@pytest.fixture
def splits(cfg, tmp_path):
    loaded = with_candidates(Files(cfg.data.path).load(), 20, tmp_path)
    return Splits(loaded.train, None, loaded.tests)


def scores(cfg, splits, scorer, max_tokens=8192):
    """The scores of all candidates, one per slot, and the number of batches."""
    data = build_data(cfg, splits, scorer)
    data.batch_options = replace(data.batch_options, eval_max_tokens=max_tokens)
    (collection,) = splits.tests.values()
    batches = data.score_batches(collection)
    values = np.full(batches.num_slots, np.nan)
    scorer.eval()
    with torch.no_grad():
        for i in range(len(batches)):
            batch = batches[i]
            values[batch.slots.numpy()] = scorer(batch.batch)[batch.batch.doc_mask].numpy()
    return values, len(batches)


def test_a_score_is_the_same_in_any_batch(cfg, splits):
    scorer = build_scorer(cfg).double()
    together, one = scores(cfg, splits, scorer)
    apart, many = scores(cfg, splits, scorer, max_tokens=1)
    assert one < many >= len(apart) / 6 and together.std() > 0
    np.testing.assert_allclose(apart, together, rtol=0, atol=1e-6 * together.std())  # scores are float32


def test_ragged_and_padded_batches_give_the_same_scores(cfg, splits):
    torch.manual_seed(1)
    ragged = build_scorer(cfg)
    values, _ = scores(cfg, splits, ragged)
    cfg.encoder.ragged = False
    if attribute_of(cfg.model._target_, "needs_ragged", default=False):
        with pytest.raises(InstantiationException, match=r"expected encoder\.ragged=true"):
            build_scorer(cfg)
        return
    torch.manual_seed(1)
    padded = build_scorer(cfg)
    assert not padded.encoder.execution.ragged
    padded.load_state_dict(ragged.state_dict())
    np.testing.assert_allclose(scores(cfg, splits, padded)[0], values, rtol=0, atol=1e-5 * max(1, np.abs(values).max()))


def test_thirty_steps_learn_four_queries_by_heart(cfg, splits):
    scorer = build_scorer(cfg)
    (batch,) = build_data(cfg, splits, scorer).train_steps()[0, 0].micro_batches
    optimizer = torch.optim.AdamW(scorer.parameters(), lr=3e-3)
    loss = LCE()
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        value = loss(scorer(batch), batch.labels, batch.doc_mask)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    assert losses[-1] < 0.3 * losses[0]
    with torch.no_grad():
        assert torch.equal(scorer(batch).masked_fill(~batch.doc_mask, -torch.inf).argmax(1), batch.labels.argmax(1))


def test_a_saved_model_comes_back_with_the_same_scores(cfg, splits, tmp_path):
    scorer = build_scorer(cfg)
    before, _ = scores(cfg, splits, scorer)
    save_model(tmp_path / "model", scorer, cfg)
    loaded = load_scorer(tmp_path / "model")
    assert type(loaded) is type(scorer)
    np.testing.assert_array_equal(scores(cfg, splits, loaded)[0], before)
