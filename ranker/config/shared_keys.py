"""Keys that several commands share, and the folder of the configuration files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The folder of the configuration files. A wheel has it in the package, a repository at its top.
CONF = next(path for parent in Path(__file__).resolve().parents[1:3] if (path := parent / "conf").is_dir())
# A text that may look like a number. With the type `str`, OmegaConf would turn 007 in a yaml into "7". With `Any`, the
# check sees the number and asks for quotes.
Text = Any


@dataclass
class BatchConfig:
    """Sizes of a step and of a micro-batch; conf/train.yaml explains the keys."""

    queries: int = 32
    docs: int = 8
    positives: int = 1
    depth: int = 100
    novelty: float | None = None
    max_tokens: int | None = None
    eval_max_tokens: int | None = None
    workers: int | None = None


@dataclass
class TrainerConfig:
    """The arguments of Lightning's Trainer, without those that the program builds (loggers, callbacks, folders)."""

    accelerator: str = "auto"
    strategy: str = "auto"
    devices: Any = "auto"
    num_nodes: int = 1
    precision: Any = None
    fast_dev_run: Any = False
    max_epochs: int | None = None
    min_epochs: int | None = None
    max_steps: int = -1
    min_steps: int | None = None
    max_time: Any = None
    limit_train_batches: Any = None
    limit_val_batches: Any = None
    limit_test_batches: Any = None
    limit_predict_batches: Any = None
    overfit_batches: float = 0.0
    val_check_interval: Any = None
    check_val_every_n_epoch: int | None = 1
    num_sanity_val_steps: int = 0
    log_every_n_steps: int = 10
    enable_checkpointing: bool = True
    enable_progress_bar: bool = True
    enable_model_summary: bool = False
    accumulate_grad_batches: int = 1
    gradient_clip_val: float | None = 1.0
    gradient_clip_algorithm: str | None = None
    deterministic: Any = None
    benchmark: bool | None = None
    inference_mode: bool = True
    use_distributed_sampler: bool = False
    profiler: str | None = None
    detect_anomaly: bool = False
    barebones: bool = False
    sync_batchnorm: bool = False
    reload_dataloaders_every_n_epochs: int = 0
    enable_autolog_hparams: bool = True
    model_registry: str | None = None


@dataclass
class InferenceConfig:
    """How a trained model computes; conf/evaluate.yaml explains the keys."""

    exit: int | None = None
    margin: float | None = None
    quantize: Text | None = None


@dataclass
class ReportConfig:
    """The page of a run; conf/report/page.yaml explains the keys."""

    write: bool = True
    queries: int = 2000
    depth: int = 10
    text_length: int = 500
    megabytes: float = 5.0


@dataclass
class MiningConfig:
    """Choice of hard negatives; see Mining in ranker/retrieval/mining.py."""

    first: int = 1
    last: int = 100
    count: int = 30
    order: Text = "top"
    margin: float | None = None
    teacher: Text | None = None
    teacher_margin: float = 0.0
