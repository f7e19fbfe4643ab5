"""`ranker calibrate`: fit a map from a model's scores to probabilities of relevance; measure it on held-out queries."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf

from ranker.assembly.labelling import docs_to_score
from ranker.assembly.probabilities import FILE
from ranker.assembly.run import one_run, open_run, quiet_libraries
from ranker.assembly.scored import run_of
from ranker.checkpoint import load_scorer, read_description
from ranker.data.trec import write_run
from ranker.errors import DataError
from ranker.evaluation.calibration import Calibration, judged_pairs, quality, write_calibration, write_picture

log = logging.getLogger(__name__)


@one_run()
def calibrate(cfg: DictConfig) -> None:
    """Write `calibration.json` with the fitted map and its quality, the runs behind this map, and a picture.

    Raises:
        RankerError: The checkpoint or the data is wrong, or a split has no judged queries.
    """
    quiet_libraries()
    path = Path(cfg.checkpoint)
    trained = OmegaConf.create(read_description(path))
    parts = {}
    for split in (cfg.split, cfg.test):
        part: Any = OmegaConf.merge(cfg, {"split": split})
        parts[split] = docs_to_score(part, trained)
    for split, collection in parts.items():
        if not collection.qrels:
            raise DataError(f"split: expected judged queries in {split}, got none; name another split or data")
    scorer = load_scorer(path, cfg.weights, trust_remote_code=cfg.trust_remote_code)
    folder = open_run(cfg)
    pairs: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for split, collection in parts.items():
        run = run_of(cfg, scorer, trained, collection, f"score {split}" if cfg.trainer.enable_progress_bar else None)
        write_run(folder / f"{split}.trec", run, cfg.name)
        pairs[split] = judged_pairs(run, dict(collection.qrels), collection.relevance)
    fitted = Calibration.fit(cfg.map, *pairs[cfg.split])
    scores, relevant = pairs[cfg.test]
    curves = {"sigmoid of the score": 1 / (1 + np.exp(-scores)), cfg.map: fitted(scores)}
    content: dict[str, Any] = {
        "checkpoint": str(path),
        "weights": cfg.weights,
        "map": fitted.record(),
        "fitted": {"split": cfg.split, "pairs": len(pairs[cfg.split][0])},
        "tested": {"split": cfg.test, "pairs": len(scores)},
        **{
            name: quality(curve, relevant)
            for name, curve in zip(("sigmoid", "calibrated"), curves.values(), strict=True)
        },
    }
    write_calibration(folder / FILE, content)
    write_picture(folder, curves, relevant, f"{cfg.test}, {len(scores)} pairs")
    before, after = content["sigmoid"], content["calibrated"]
    for key, name in (("ece", "calibration error"), ("brier", "Brier score"), ("nll", "negative log-likelihood")):
        log.info("%s on %s: %.4f, of the sigmoid of the score %.4f", name, cfg.test, after[key], before[key])
    log.info("calibration: %s", folder / FILE)
    if cfg.store:
        write_calibration(path / FILE, content)
        log.info("stored: %s", path / FILE)
