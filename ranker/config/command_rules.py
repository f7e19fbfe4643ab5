"""Rules between the keys of one command: evaluate, label, rerank, merge, pretrain."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from ranker.config.groups import is_set
from ranker.config.paths import READER


def evaluation_faults(cfg: DictConfig) -> list[str]:
    """Check what evaluate.py needs: a run file with its judgements, or a checkpoint."""
    if "qrels" not in cfg or "run" not in cfg:
        return []
    faults = []
    if (cfg.run is None) == (cfg.checkpoint is None):
        faults.append(
            "run: expected either run=FILE qrels=FILE or checkpoint=RUN_FOLDER, got "
            + ("both" if cfg.run else "neither")
        )
    if cfg.run is not None and cfg.qrels is None:
        faults.append("qrels: expected the judgements for the file of run=, got none; set qrels=FILE")
    if cfg.run is not None and cfg.orders > 1:
        faults.append(f"orders: expected 1 with run=, whose scores are fixed, got {cfg.orders}; set checkpoint=")
    for key, least in (("window", 2), ("stride", 1)):
        value = cfg.lists[key]
        if not (value is None or value == "auto" or (isinstance(value, int) and value >= least)):
            faults.append(f"lists.{key}: expected auto, null or at least {least}; got {value!r}")
    if cfg.run is not None and cfg.length_buckets is not None:
        faults.append("length_buckets: expected none with run=, which has no texts of docs; set checkpoint= or null")
    return faults


def teacher_faults(cfg: DictConfig) -> list[str]:
    """Check `teacher` of `ranker label`: a path, or a list of paths."""
    if not is_set(cfg, "teacher"):
        return []
    value: Any = cfg.get("teacher")
    if value == READER:
        return [
            f"reader.{key}: expected {what} with teacher=reader, got null"
            for key, what in (("name", "a folder or a name on the hub"), ("answers", "a file of query ids and answers"))
            if not cfg.reader.get(key)
        ]
    paths = list(value) if isinstance(value, ListConfig) else [value]
    if paths and all(isinstance(path, str) and path for path in paths):
        return []
    return [f"teacher: expected a run folder, a model folder, a TREC run, or a list of these; got {value!r}"]


def reranking_faults(cfg: DictConfig) -> list[str]:
    """Check that `ranker rerank` has, besides `run`, the files with the texts of the run's queries and docs."""
    if "top_k" not in cfg or cfg.run is None:
        return []
    return [
        f"{key}: expected the file with the {key} of run={cfg.run}, got none; set {key}=FILE"
        for key in ("queries", "docs")
        if cfg.get(key) is None
    ]


def merging_faults(cfg: DictConfig) -> list[str]:
    """Check `runs` and `shares` of `ranker merge`."""
    if "shares" not in cfg or not is_set(cfg, "runs"):
        return []
    runs, shares = cfg.runs, cfg.shares
    faults = []
    if not isinstance(runs, ListConfig) or len(runs) < 2 or not all(isinstance(run, str) and run for run in runs):
        faults.append(f"runs: expected a list of at least two folders, runs=[A,B]; got {runs!r}")
    if shares is not None and (
        not isinstance(shares, ListConfig)
        or not all(isinstance(share, (int, float)) and 0 <= share < float("inf") for share in shares)
        or not any(shares)
        or (isinstance(runs, ListConfig) and len(shares) != len(runs))
    ):
        faults.append(f"shares: expected a number of at least 0 for each run, not all 0, or null; got {shares!r}")
    if shares is not None and OmegaConf.select(cfg, "tune.measure") is not None:
        faults.append(f"shares: expected null with tune.measure, which searches for the shares, got {shares!r}")
    if cfg.interpolation == "slerp" and isinstance(runs, ListConfig) and len(runs) != 2:
        faults.append(f"interpolation: slerp takes two runs, got {len(runs)} runs; set linear, which takes any number")
    return faults


def pretraining_faults(cfg: DictConfig) -> list[str]:
    """Check the start of `ranker pretrain`: an encoder without adapters, or a run to continue."""
    if "objective" not in cfg:
        return []
    faults = []
    if OmegaConf.select(cfg, "encoder.lora") is not None:
        faults.append("encoder.lora: expected null, since a pretraining trains all weights of the encoder")
    if cfg.get("checkpoint") is not None and not cfg.get("resume"):
        faults.append(
            f"checkpoint: expected resume=true beside it, got false; encoder.name={cfg.checkpoint} starts from a model"
        )
    return faults
