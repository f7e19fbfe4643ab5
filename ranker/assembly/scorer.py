"""Build the scorer, the module that trains it, and its optimizer from the configuration."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from ranker.checkpoint import built_for, load_scorer, read_description
from ranker.config.sets import sets_of, source_nodes
from ranker.config.targets import constructor_keys
from ranker.distillation.layers import Layers
from ranker.distillation.module import DistillationModule
from ranker.encoders.alignment import align
from ranker.encoders.encoder import Encoder
from ranker.encoders.execution import Execution
from ranker.errors import CheckpointError, ConfigError
from ranker.exits.early_exit import EarlyExit
from ranker.exits.module import EarlyExitModule, ExitTraining
from ranker.export import sentence_transformers
from ranker.models.dpr import DPR
from ranker.models.interface import Scorer, is_bi_encoder
from ranker.multitask.module import MultitaskModule
from ranker.passages.build import with_passages
from ranker.passages.windowed import scorer_of_windows
from ranker.probing.profile import check_encoder
from ranker.training.contrastive_module import ContrastiveModule
from ranker.training.matryoshka import MatryoshkaModule, OwnDocsMatryoshkaModule, Sizes
from ranker.training.options import Optimization
from ranker.training.rerank_module import RerankModule
from ranker.training.set_losses import SetLosses
from ranker.training.sparse_module import SparseModule, Sparsity
from ranker.types import Loss

log = logging.getLogger(__name__)


def build_scorer(cfg: DictConfig) -> Scorer:
    """Return a new scorer, or the checkpoint's scorer; `model` then only sets how the scorer is trained.

    Raises:
        ConfigError: The checkpoint contains another model than `model` names, or `model` can't be trained.
    """
    if cfg.checkpoint is not None and not cfg.resume:
        scorer = load_scorer(Path(cfg.checkpoint), "best", Execution.of(cfg.get("encoder") or {}))
        name, configured = type(scorer_of_windows(scorer)).__name__, cfg.model._target_.rpartition(".")[2]
        if configured != name:
            raise ConfigError(
                f"model: expected model={name.lower()}, which {cfg.checkpoint} holds, got {configured.lower()}"
            )
        if isinstance(scorer, EarlyExit) and (cfg.model.exit is not None or cfg.model.margin is not None):
            scorer.leave(cfg.model.exit, cfg.model.margin, cfg.model.center)
        _drop_layers(scorer, cfg)
        # from_pretrained returns a model in evaluation mode, and Lightning keeps the mode: dropout would stay off
        return with_passages(scorer, cfg.get("passages")).train()
    if cfg.model.get("_partial_"):
        raise ConfigError(
            f"model: expected one that can be trained, got {cfg.model._target_}; "
            "python search.py model=... searches with it"
        )
    if cfg.get("resume"):
        scorer = built_for(Path(cfg.checkpoint), cfg, Execution.of(cfg.encoder)).train()
        align(scorer)  # type: ignore[arg-type]
        _drop_layers(scorer, cfg)
        return scorer
    scorer = instantiate(
        constructor_keys("model", cfg.model), encoder=instantiate(constructor_keys("encoder", cfg.encoder))
    )
    align(scorer)
    if is_bi_encoder(scorer):
        _warn_of_parts_left_behind(scorer)
    return with_passages(scorer, cfg.get("passages"))


def _drop_layers(scorer: Any, cfg: DictConfig) -> None:
    """Set `encoder.layer_drop`, which is an option of a training and is not stored with a model."""
    rate = (cfg.get("encoder") or {}).get("layer_drop", 0.0)
    for module in scorer.modules():
        if isinstance(module, Encoder):
            module.drop_layers(rate)


def _warn_of_parts_left_behind(scorer: Any) -> None:
    """Warn if `encoder.name` is a trained bi-encoder's folder with parts that the new scorer does not have."""
    if scorer.encoder.source is None:
        return
    folder = Path(scorer.encoder.source)
    same = {"pooling": getattr(scorer, "pooling", None), "Normalize": scorer.similarity == "cosine"}
    same["SpladePooling"] = scorer.vectors == "terms"
    try:
        parts = sentence_transformers.parts_beside_encoder(folder)
    except CheckpointError as error:
        parts = {"modules that are not known": str(error)}
    left = {name: text for name, text in parts.items() if same.get(name) not in (True, text)}
    if left:
        log.warning(
            "encoder.name: only the encoder of %s is used; left out: %s; checkpoint=%s continues with the whole model",
            folder,
            ", ".join(f"{name} ({text})" if text else name for name, text in left.items()),
            folder,
        )


def in_batch_negatives(cfg: DictConfig) -> bool:
    """Return whether the docs of other queries of a step are negatives of each query.

    Raises:
        ConfigError: In-batch negatives are set, but a step has a single doc, or the labels are a teacher's scores,
            which exist only for a query's own docs. Or `model.symmetric` is set without in-batch negatives.
    """
    wanted = cfg.model.get("in_batch_negatives", False)
    taught = any(node.get("teacher") is not None for node in source_nodes(cfg).values())
    if wanted and taught:
        raise ConfigError(
            "model.in_batch_negatives: expected false or null with data.teacher, "
            "which has no scores for other queries' docs"
        )
    if wanted is False or (wanted is None and taught):
        if cfg.model.get("symmetric", False):
            raise ConfigError(
                "model.symmetric: expected false without in-batch negatives; set model.in_batch_negatives=true"
            )
        return False
    if cfg.batch.queries * cfg.batch.docs == 1:
        raise ConfigError(
            "batch.queries: expected several queries or docs in a step with in-batch negatives, got one of each"
        )
    return True


def has_penalties(cfg: DictConfig) -> bool:
    """Return whether the loss has penalties, which depend on all texts of a step; the model's yaml has their keys."""
    return "doc_penalty" in (cfg.get("model") or {})


def training_module(cfg: DictConfig, scorer: Scorer | None = None) -> Callable[..., RerankModule]:
    """Return the class of the Lightning module; call it with the arguments of `RerankModule`.

    The class depends on the loss: on each query's own docs, on the score matrix of a step, or on several tasks.

    Args:
        cfg: The configuration.
        scorer: The scorer; None: it is not built yet, and Matryoshka sizes and layers are not checked.

    Raises:
        ConfigError: Options of Matryoshka training do not fit the scorer.
    """
    if "heads" in cfg.model:
        return partial(MultitaskModule, weighting=instantiate(cfg.model.weighting))
    if cfg.get("distill") is not None:
        options: Layers = instantiate(cfg.distill)
        if options.layers == "auto":
            check_encoder(
                str(options.report), read_description(Path(options.teacher)).get("encoder") or {}, "distill.report"
            )
        teacher = load_scorer(Path(options.teacher), execution=_as_student(cfg))
        return partial(DistillationModule, teacher=teacher, options=options, fresh=cfg.get("checkpoint") is None)
    if "exits" in cfg.model:
        exits = ExitTraining(**{field.name: cfg.model[field.name] for field in fields(ExitTraining)})
        return partial(EarlyExitModule, options=exits)
    if has_penalties(cfg):
        sparsity = Sparsity(**{field.name: cfg.model[field.name] for field in fields(Sparsity)})
        sparsity.check()
        return partial(SparseModule, sparsity=sparsity, symmetric=cfg.model.symmetric)
    sizes = _matryoshka_sizes(cfg, scorer)
    if sizes is not None:
        if in_batch_negatives(cfg):
            return partial(MatryoshkaModule, sizes=sizes, symmetric=cfg.model.symmetric)
        return partial(OwnDocsMatryoshkaModule, sizes=sizes)
    return partial(ContrastiveModule, symmetric=cfg.model.symmetric) if in_batch_negatives(cfg) else RerankModule


def _matryoshka_sizes(cfg: DictConfig, scorer: Any) -> Sizes | None:
    """Return the vector sizes and layers of Matryoshka training; None if the configuration names none."""
    dims, layers = cfg.model.get("matryoshka_dims"), cfg.model.get("matryoshka_layers")
    if dims is None and layers is None:
        return None
    if scorer is None:
        return None
    if not isinstance(scorer, DPR):
        raise ConfigError(
            "model.matryoshka_dims and model.matryoshka_layers: expected null with passages, whose docs have several "
            f"vectors, got {dims} and {layers}; set passages=none"
        )
    per_step, weight = cfg.model.matryoshka_layers_per_step, cfg.model.matryoshka_alignment
    return Sizes.of(scorer, dims and list(dims), layers and list(layers), per_step, weight)


def _as_student(cfg: DictConfig) -> Execution:
    """Return how a teacher is run: like the student, but without gradient checkpointing and `trust_remote_code`."""
    return replace(Execution.of(cfg.encoder), checkpointing=False, graphs=False, trust_remote_code=False)


def build_loss(cfg: DictConfig) -> Loss:
    """Return the loss. For a mix, it holds one loss for each set with training data: the set's own loss, or `loss`."""
    sets = {name: node for name, node in sets_of(cfg.get("data")).items() if node.get("weight", 1) > 0}
    if not sets:
        loss: Loss = instantiate(cfg.loss)
        return loss
    return SetLosses({name: instantiate(node.get("loss") or cfg.loss) for name, node in sets.items()})


def build_optimizer(cfg: DictConfig) -> Any:
    """Return a function from parameter groups to the optimizer, which is fused unless `optim.fused` is set."""
    unset = OmegaConf.select(cfg, "optim.fused", default=False) is None
    return instantiate(cfg.optim, **({"fused": True} if unset else {}))


def optimization_of(cfg: DictConfig, steps_per_epoch: int) -> Optimization:
    """Return the optimizer, the schedule and the options of optimizer steps."""
    return Optimization(
        build_optimizer(cfg),
        instantiate(cfg.schedule),
        total_steps(cfg, steps_per_epoch),
        cfg.optim.weight_decay,
        cfg.trainer.gradient_clip_val,
        cfg.seed,
    )


def epoch_steps(cfg: DictConfig, steps_per_epoch: int) -> int:
    """Return the number of optimizer steps of an epoch, at most `trainer.limit_train_batches`."""
    limit = cfg.trainer.limit_train_batches
    if limit is None:
        return steps_per_epoch
    return min(steps_per_epoch, limit) if isinstance(limit, int) else int(steps_per_epoch * limit)


def total_steps(cfg: DictConfig, steps_per_epoch: int) -> int:
    """Return the optimizer steps of the whole training: the smaller of `max_steps` and the steps of `max_epochs`."""
    ends = []
    if cfg.trainer.max_epochs is not None and cfg.trainer.max_epochs >= 0:
        ends.append(cfg.trainer.max_epochs * epoch_steps(cfg, steps_per_epoch))
    if cfg.trainer.max_steps >= 0:
        ends.append(cfg.trainer.max_steps)
    return min(ends)
