"""Score the candidates of a collection with a loaded scorer, on one device."""

from __future__ import annotations

from typing import Any

import torch
from omegaconf import DictConfig

from ranker.assembly.data import batch_options, text_limits
from ranker.data.collection import Collection, Splits
from ranker.data.datamodule import RankData
from ranker.data.scorer_inputs import ScorerInputs
from ranker.evaluation.scoring import Devices, score_collection
from ranker.models.interface import Scorer
from ranker.types import Run


def run_of(cfg: DictConfig, scorer: Scorer, trained: Any, collection: Collection, progress: str | None = None) -> Run:
    """Return the run of a scorer over the candidates of a collection.

    Args:
        cfg: Has `batch` and `cache_dir`.
        scorer: The scorer. It is moved to the GPU if there is one.
        trained: Description of the scorer's training, which contains its text limits.
        collection: The collection.
        progress: Name on the progress bar; None: no progress bar.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    module: Any = scorer.to(device).eval()
    data = RankData(
        Splits(None, None, {}),
        ScorerInputs.of(scorer),
        batch_options(cfg),
        text_limits(scorer, trained),
        depth=None,
        cache_dir=cfg.cache_dir,
    )
    run = score_collection(module, data.score_batches(collection), Devices(device), progress=progress)
    assert run is not None
    return run
