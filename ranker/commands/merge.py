"""`ranker merge`: one model whose weights are a mean of several models' weights."""

from __future__ import annotations

import logging
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from ranker.assembly.merging import merge_scorers
from ranker.assembly.run import one_run, open_run, quiet_libraries
from ranker.checkpoint import load_scorer, read_description, save_model, without_adapters
from ranker.errors import ConfigError

log = logging.getLogger(__name__)


@one_run()
def merge(cfg: DictConfig) -> None:
    """Write `model/` with the merged weights into the run folder. Adapters are merged into their weights first.

    Raises:
        RankerError: A run can't be loaded, or the runs do not fit together.
    """
    quiet_libraries()
    paths = [Path(path) for path in cfg.runs]
    descriptions = [OmegaConf.create(read_description(path)) for path in paths]
    described = next((part for part in descriptions if part.get("encoder") and part.get("model")), None)
    if described is None:
        raise ConfigError("runs: expected at least one run of this program, got folders of other programs alone")
    scorers = []
    for path in paths:
        scorer = load_scorer(path, cfg.weights, trust_remote_code=cfg.trust_remote_code)
        scorers.append(without_adapters(scorer, described)[0])
    merged = merge_scorers(dict(zip(map(str, paths), scorers, strict=True)), cfg.shares, cfg.interpolation)
    folder = open_run(cfg)
    save_model(folder / "model", merged, without_adapters(merged, described)[1])
    log.info("merged model: checkpoint=%s", folder / "model")
