"""A stored model keeps its windows and trained aggregation; a warning says what other programs read instead."""

import logging
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from sentence_transformers import CrossEncoder

from ranker import Reranker
from ranker.assembly.data import build_data
from ranker.assembly.scorer import build_scorer
from ranker.checkpoint import load_scorer, save_model
from ranker.cli import entry
from ranker.data.collection import Splits
from ranker.data.sources.files import Files
from ranker.errors import CheckpointError, ConfigError
from ranker.passages.build import with_passages
from ranker.passages.parade_attention import ParadeAttention
from ranker.retrieval.first_stage import with_candidates

ROOT = Path(__file__).resolve().parents[3]
SHORT = ["passages.length=6", "passages.stride=4", "max_doc_tokens=30", "max_query_tokens=8"]


@pytest.fixture(scope="module")
def composed(small_files, tmp_path_factory):
    entry.register()
    cache = tmp_path_factory.mktemp("stored")

    def make(*choices):
        with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            fixed = ["data=files", f"data.path={small_files}", "depth=4", f"cache_dir={cache}", "name=stored"]
            return compose("train", [*fixed, *SHORT, *choices])

    return make


def scores(cfg, scorer):
    """The scores of the test set's candidates."""
    loaded = with_candidates(Files(cfg.data.path).load(), 4, Path(cfg.cache_dir))
    data = build_data(cfg, Splits(loaded.train, None, loaded.tests), scorer)
    (collection,) = loaded.tests.values()
    batches = data.score_batches(collection)
    scorer.eval()
    with torch.no_grad():
        return torch.cat([scorer(batches[i].batch)[batches[i].batch.doc_mask] for i in range(len(batches))])


@pytest.mark.parametrize(
    "choices",
    [
        ["model=monobert", "encoder=tiny", "passages=meanp", "passages.k=2"],
        ["model=monobert", "encoder=tiny", "passages=maxp", "passages.select=bm25", "passages.most=2"],
        ["model=dpr", "encoder=tiny", "passages=parade_transformer"],
        ["model=lm_reranker", "encoder=tiny_lm", "passages=parade_attention", "lora=default"],
    ],
    ids=["meanp", "bm25", "dpr", "lora"],
)
def test_the_scores_come_back_bit_for_bit(composed, tmp_path, choices):
    cfg = composed(*choices)
    scorer = build_scorer(cfg)
    for parameter in scorer.aggregation.parameters():
        parameter.data += torch.randn_like(parameter) / 10
    expected = scores(cfg, scorer)
    save_model(tmp_path / "model", scorer, cfg)
    loaded = load_scorer(tmp_path / "model")
    assert repr(loaded.aggregation) == repr(scorer.aggregation) and loaded.windows == scorer.windows
    assert torch.equal(scores(cfg, loaded), expected)


def test_another_program_scores_one_window(composed, tmp_path, caplog):
    """The folder says that a row has 8 + 6 + 3 tokens, which is a query and a window."""
    cfg = composed("model=monobert", "encoder=tiny", "passages=maxp")
    with caplog.at_level(logging.WARNING):
        save_model(tmp_path / "model", build_scorer(cfg), cfg)
    assert "score about the first window of a doc (6 tokens)" in caplog.text
    theirs, ours = CrossEncoder(str(tmp_path / "model"), device="cpu"), Reranker.load(tmp_path / "model")
    assert theirs.tokenizer.model_max_length == 17
    query, windows = "a b c", ["d e f g h i", "h i j k l m", "l m n"]  # of d to n, by 4
    parts = theirs.predict([(query, window) for window in windows], activation_fn=torch.nn.Identity())
    assert ours.score([(query, "d e f g h i j k l m n")])[0] == pytest.approx(parts.max(), abs=1e-6)


def test_a_missing_aggregation_is_one_line(composed, tmp_path):
    cfg = composed("model=monobert", "encoder=tiny", "passages=parade_attention")
    save_model(tmp_path / "model", build_scorer(cfg), cfg)
    (tmp_path / "model/passages.safetensors").unlink()
    (tmp_path / "model/sums.json").unlink(missing_ok=True)
    with pytest.raises(CheckpointError):
        load_scorer(tmp_path / "model")


def test_another_node_replaces_the_windows_and_keeps_equal_aggregations(composed):
    scorer = build_scorer(composed("encoder=tiny", "passages=parade_attention"))
    node = OmegaConf.create({"_target_": "ranker.passages.parade_attention.ParadeAttention", "length": 9})
    longer = with_passages(scorer, node)
    assert longer.windows.length == 9 and longer.scorer is scorer.scorer
    assert torch.equal(longer.aggregation.weight, scorer.aggregation.weight)
    assert with_passages(longer, None) is scorer.scorer
    fresh = with_passages(longer, OmegaConf.create({"_target_": "ranker.passages.maxp.MaxP", "length": 9}))
    assert not isinstance(fresh.aggregation, ParadeAttention)


def test_a_model_without_windows_is_refused(composed):
    cfg = composed("model=colbert", "encoder=tiny", "passages=maxp")
    with pytest.raises(ConfigError, match="passages: expected none with ColBERT"):
        build_scorer(cfg)
