"""Build `RefreshedNegatives`, which mines negatives during a training, from the `mining` node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from ranker.assembly.scorer import epoch_steps
from ranker.data.datamodule import RankData
from ranker.data.refreshed import Rounds
from ranker.data.trec import read_run
from ranker.errors import ConfigError
from ranker.models.interface import Scorer, is_bi_encoder
from ranker.retrieval.mining import Mining
from ranker.retrieval.refresh import RefreshedNegatives

SCHEDULE = ("every", "unit", "teacher")  # keys of the node that `Mining` does not take
MINED = "mined"  # subfolder of the run folder for the mined negatives


def check_refresh(cfg: DictConfig, scorer: Scorer) -> None:
    """Check before the data is loaded that the model can mine negatives, that is, search a collection.

    Raises:
        ConfigError: The model is not a bi-encoder, it encodes a doc as several windows, or a value of the `mining`
            node is wrong.
    """
    if cfg.mining.every is None:
        return
    _mining(cfg)
    if not is_bi_encoder(scorer) or scorer.vectors == "windows":
        raise ConfigError(
            f"mining.every: expected null for {type(scorer).__name__}, which can't search a collection; mine with a "
            "bi-encoder (search.py mine=train) and set data.negatives"
        )


def build_refresh(cfg: DictConfig, data: RankData, folder: Path) -> RefreshedNegatives | None:
    """Return the callback that mines negatives, connected to the data; None if `mining.every` is null.

    Args:
        cfg: The configuration.
        data: The training's data module.
        folder: The run folder.

    Raises:
        ConfigError: The negatives of the training groups can't be replaced.
    """
    options = cfg.mining
    if options.every is None:
        return None
    data.rounds = Rounds(folder / MINED, options.every, 1)
    data.rounds.epoch_steps = epoch_steps(cfg, len(data.train_steps().plan))
    if options.unit == "epochs":
        data.rounds.every *= max(1, data.rounds.epoch_steps)
    teacher = read_run(Path(options.teacher), single=True) if options.teacher else None
    earlier = Path(cfg.checkpoint) / MINED if cfg.resume else None
    return RefreshedNegatives(data.rounds, _mining(cfg), data, teacher, earlier)


def _mining(cfg: DictConfig) -> Mining:
    options: dict[str, Any] = {key: value for key, value in cfg.mining.items() if key not in SCHEDULE}
    return Mining(**options, seed=cfg.seed)
