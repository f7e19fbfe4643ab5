"""Rules for the query groups of a training step: the sizes and the labels of the groups."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from ranker.config.sets import source_nodes
from ranker.config.signatures import attribute_of
from ranker.config.targets import is_trusted


def faults_of(cfg: DictConfig) -> list[str]:
    """Return one fault for each of these rules that a configuration breaks."""
    batch = cfg.get("batch")
    if batch is None or "docs" not in batch or batch.docs < 1:
        return []
    faults = _novelty(cfg)
    top = (cfg.get("model") or {}).get("top")
    if isinstance(top, int) and top < batch.docs and "loss" in cfg:
        faults.append(f"model.top: expected at least batch.docs={batch.docs}, the docs of a group, got {top}")
    if batch.positives > batch.docs:
        faults.append(f"batch.positives: expected at most batch.docs={batch.docs}, got {batch.positives}")
    if "loss" in cfg and batch.positives >= batch.docs:
        taught = any(node.get("teacher") for node in source_nodes(cfg).values())
        other_labels = cfg.model.get("in_batch_negatives", False) is not False or taught
        losses = [node.get("loss") or cfg.loss for node in source_nodes(cfg).values()]
        if not other_labels and any(_needs_negatives(str(loss.get("_target_"))) for loss in losses):
            faults.append(
                f"batch.docs: expected more than batch.positives={batch.positives}, got {batch.docs}; "
                "without negatives nothing is learnt"
            )
    return faults


def _needs_negatives(loss: str) -> bool:
    """Return whether a loss needs docs that are not relevant; false if its class has `needs_negatives = False`."""
    return not is_trusted(loss, "loss") or attribute_of(loss, "needs_negatives", default=True) is not False


def _novelty(cfg: DictConfig) -> list[str]:
    """Check `batch.novelty`: this option gives label 0 to some docs, so 0 must be the lowest label of a group."""
    novelty = cfg.batch.get("novelty")
    if novelty is None:
        return []
    faults = []
    if not 0 < novelty <= 1:
        faults.append(f"batch.novelty: expected a share above 0 and at most 1, or null; got {novelty}")
    if OmegaConf.select(cfg, "mining.every") is not None:
        faults.append(f"batch.novelty: expected null with mining.every={cfg.mining.every}, got {novelty}")
    faults += [
        f"batch.novelty: expected null with {path}.teacher, got {novelty}; a doc that repeats another gets label 0, "
        "which must be the lowest label, but scores of a teacher may be below 0"
        for path, node in source_nodes(cfg).items()
        if node.get("teacher")
    ]
    return faults
