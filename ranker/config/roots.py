"""Typed roots of the configuration: the keys of each command and their types; conf/ explains them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

# The folder of the configuration files: in the package if it was installed from a wheel, else at the top of the
# repository.
CONF = next(path for parent in Path(__file__).resolve().parents[1:3] if (path := parent / "conf").is_dir())
# A text that may look like a number. Typed as `str`, OmegaConf would turn 007 of a yaml into "7"; typed as `Any`, the
# check sees the number and asks for quotes.
Text = Any


@dataclass
class BatchConfig:
    """Sizes of a step and of a micro-batch; conf/train.yaml explains the keys."""

    queries: int = 32
    docs: int = 8
    positives: int = 1
    depth: int = 100
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
class ReportConfig:
    """The page of a run; conf/report/page.yaml explains the keys."""

    write: bool = True
    queries: int = 2000
    depth: int = 10
    text_length: int = 500
    megabytes: float = 5.0


@dataclass
class TrainConfig:
    """Root of train.py."""

    name: Text = MISSING
    model: Any = MISSING
    encoder: Any = MISSING
    loss: Any = MISSING
    data: Any = MISSING
    suite: Any = None
    passages: Any = None
    optim: Any = MISSING
    schedule: Any = MISSING
    callbacks: Any = None
    logger: Any = None
    report: ReportConfig = field(default_factory=ReportConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    max_query_tokens: int = 64
    max_doc_tokens: int = 256
    max_pair_tokens: int | None = None
    measures: list[str] = field(default_factory=list)
    length_buckets: list[int] | None = None
    monitor: Text | None = None
    depth: int = 100
    val_depth: int | None = None
    seed: int = 0
    checkpoint: Text | None = None
    resume: bool = False
    save_every_steps: int = 500
    nonfinite: Text = "stop"
    cache_dir: Text = ".cache"


@dataclass
class EvaluateConfig:
    """Root of evaluate.py."""

    name: Text = "evaluate"
    checkpoint: Text | None = None
    weights: Text = "best"
    trust_remote_code: bool = False
    data: Any = None
    suite: Any = None
    run: Text | None = None
    qrels: Text | None = None
    baseline: Text | None = None
    relevance: int = 1
    split: Text = "test"
    measures: list[str] = field(default_factory=list)
    length_buckets: list[int] | None = None
    depth: int | None = None
    candidates: Text | None = None
    add_positives: bool = False
    report: ReportConfig = field(default_factory=ReportConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    cache_dir: Text = ".cache"


@dataclass
class EncodeConfig:
    """Vectors on disk; conf/search.yaml explains the keys."""

    folder: Text | None = None
    dtype: Text = "float32"
    shard_docs: int = 10000


@dataclass
class LateConfig:
    """Search for docs of several vectors; see LateOptions in ranker/retrieval/search.py."""

    token_depth: int = 256
    candidates: int = 1000


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


@dataclass
class SearchConfig:
    """Root of search.py."""

    name: Text = "search"
    checkpoint: Text | None = None
    weights: Text = "best"
    trust_remote_code: bool = False
    model: Any = None
    data: Any = None
    index: Any = MISSING
    split: Text | None = "test"
    mine: Text | None = None
    measures: list[str] = field(default_factory=list)
    depth: int = 100
    baseline: Text | None = "bm25"
    latency_queries: int = 100
    candidates: Text | None = None
    explain: Text | None = None
    max_query_tokens: int | None = None
    max_doc_tokens: int | None = None
    encode: EncodeConfig = field(default_factory=EncodeConfig)
    late: LateConfig = field(default_factory=LateConfig)
    mining: MiningConfig = field(default_factory=MiningConfig)
    report: ReportConfig = field(default_factory=ReportConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    seed: int = 0
    cache_dir: Text = ".cache"


@dataclass
class ReaderConfig:
    """The reader of `ranker label teacher=reader`; conf/label.yaml explains the keys."""

    name: Text | None = None
    answers: Text | None = None
    prompt: Text = "{doc}\n\nQuestion: {query}\nAnswer:"


@dataclass
class LabelConfig:
    """Root of `ranker label`."""

    name: Text = "label"
    teacher: Any = MISSING
    reader: ReaderConfig = field(default_factory=ReaderConfig)
    scale: Text = "auto"
    weights: Text = "best"
    trust_remote_code: bool = False
    data: Any = None
    split: Text = "train"
    candidates: Text | None = None
    depth: int | None = None
    add_positives: bool = True
    keep: int | None = None
    measures: list[str] = field(default_factory=list)
    max_query_tokens: int | None = None
    max_doc_tokens: int | None = None
    shard_queries: int = 100
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    cache_dir: Text = ".cache"


@dataclass
class RerankConfig:
    """Root of `ranker rerank`."""

    name: Text = "rerank"
    checkpoint: Text = MISSING
    weights: Text = "best"
    trust_remote_code: bool = False
    run: Text | None = None
    queries: Text | None = None
    docs: Text | None = None
    depth: int | None = None
    top_k: int | None = None
    max_query_tokens: int | None = None
    max_doc_tokens: int | None = None
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)


@dataclass
class MergeConfig:
    """Root of `ranker merge`."""

    name: Text = "merge"
    runs: Any = MISSING
    shares: Any = None
    interpolation: Text = "linear"
    weights: Text = "best"
    trust_remote_code: bool = False


@dataclass
class CompressConfig:
    """Root of `ranker compress`."""

    name: Text = "compress"
    checkpoint: Text = MISSING
    weights: Text = "best"
    trust_remote_code: bool = False
    data: Any = None
    layers: Any = None
    drop: Text = "top"
    units: float = 1.0
    multiple: int = 8
    pairs: int = 128
    split: Text = "train"
    candidates: Text | None = None
    depth: int | None = None
    add_positives: bool = False
    batch: BatchConfig = field(default_factory=BatchConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    cache_dir: Text = ".cache"


@dataclass
class ExportConfig:
    """Root of `ranker export`."""

    name: Text = "export"
    checkpoint: Text = MISSING
    weights: Text = "best"
    trust_remote_code: bool = False
    format: Text = MISSING
    dtype: Text = "float32"
    to: Text | None = None
    max_gap: float | None = None
    max_loss: float = 0.01
    data: Any = None
    split: Text = "test"
    candidates: Text | None = None
    depth: int | None = None
    max_queries: int | None = None
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    cache_dir: Text = ".cache"


@dataclass
class CompareConfig:
    """Root of `ranker compare`."""

    name: Text = "compare"
    runs: Any = MISSING
    labels: Any = None
    sets: Any = None
    qrels: Text | None = None
    queries: Text | None = None
    docs: Text | None = None
    data: Any = None
    split: Text = "test"
    relevance: int = 1
    measures: list[str] = field(default_factory=list)
    report: ReportConfig = field(default_factory=ReportConfig)
    cache_dir: Text = ".cache"


@dataclass
class PublishConfig:
    """Root of `ranker publish`."""

    name: Text = "publish"
    checkpoint: Text = MISSING
    to: Text = MISSING
    private: bool = True
    license: Text | None = None
    data: Any = None
    cache_dir: Text = ".cache"


@dataclass
class LimitsConfig:
    """Bounds on requests; conf/serve.yaml explains the keys."""

    docs: int = 1000
    text_chars: int = 100000
    body_bytes: int = 10485760
    queue_pairs: int = 20000
    connections: int = 1024
    request_seconds: float = 30.0
    stop_seconds: float = 30.0


@dataclass
class ServeConfig:
    """Root of `ranker serve`."""

    name: Text = "serve"
    checkpoint: Text = MISSING
    weights: Text = "best"
    trust_remote_code: bool = False
    host: Text = "127.0.0.1"
    port: int = 8000
    token_env: Text | None = None
    token_file: Text | None = None
    scores: Text = "raw"
    log_requests: bool = False
    max_query_tokens: int | None = None
    max_doc_tokens: int | None = None
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)


@dataclass
class TuningConfig:
    """Search for the weights of a fusion; conf/fuse.yaml explains the keys."""

    qrels: Text | None = None
    runs: Any = None
    measure: Text = "nDCG@10"
    relevance: int = 1
    step: float = 0.1


@dataclass
class FuseConfig:
    """Root of `ranker fuse`."""

    name: Text = "fuse"
    runs: Any = MISSING
    method: Text = "rrf"
    k: float = 60.0
    scaling: Text = "minmax"
    weights: Any = None
    depth: int = 1000
    tune: TuningConfig = field(default_factory=TuningConfig)


@dataclass
class ProbeTrainingConfig:
    """Training of a probe; conf/probe.yaml explains the keys."""

    lr: float = 1e-3
    batch_pairs: int = 64
    max_rounds: int = 50
    round_steps: int = 5
    patience: int = 2
    small_val_pairs: int | None = 2000
    lr_factor: float = 0.5
    clip: float = 5.0
    hidden: int = 256
    dropout: float = 0.3
    head: Text = "edge"


@dataclass
class ProbeCacheConfig:
    """The encoder's states on disk; conf/probe.yaml explains the keys."""

    dtype: Text = "float16"
    tokens: Text = "all"
    max_bytes: float = 2e10
    max_tokens: int = 8192


@dataclass
class ProbeConfig:
    """Root of probe.py."""

    name: Text = "probe"
    encoder: Any = MISSING
    checkpoint: Text | None = None
    weights: Text = "best"
    reads: Text = "pairs"
    compare: Text | None = None
    data: Any = MISSING
    probe: Any = MISSING
    logger: Any = None
    split: Text = "val"
    max_pairs: int = 2000
    docs_per_query: int = 10
    depth: int = 100
    group_by: Text = "query"
    val_fraction: float = 0.1667
    test_fraction: float = 0.1667
    max_query_tokens: int = 64
    max_doc_tokens: int = 256
    layers: list[int] | None = None
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])
    controls: list[str] = field(default_factory=list)
    control_seeds: int = 1
    portions: list[float] = field(default_factory=list)
    validation: Text = "fixed"
    units: Text = "bits"
    batching: Text = "auto"
    device: Text = "auto"
    workers: int | None = None
    seed: int = 0
    skip_unavailable: bool = False
    reuse: bool = True
    training: ProbeTrainingConfig = field(default_factory=ProbeTrainingConfig)
    cache: ProbeCacheConfig = field(default_factory=ProbeCacheConfig)
    cache_dir: Text = ".cache"


ROOTS: dict[str, type] = {
    "train": TrainConfig,
    "evaluate": EvaluateConfig,
    "search": SearchConfig,
    "probe": ProbeConfig,
    "label": LabelConfig,
    "rerank": RerankConfig,
    "merge": MergeConfig,
    "compress": CompressConfig,
    "export": ExportConfig,
    "publish": PublishConfig,
    "serve": ServeConfig,
    "compare": CompareConfig,
    "fuse": FuseConfig,
}


def register(command: str | None = None) -> None:
    """Register the typed root of a command, or of all commands, with Hydra, as `train_schema` and so on."""
    for name, root in ROOTS.items() if command is None else [(command, ROOTS[command])]:
        ConfigStore.instance().store(name=f"{name}_schema", node=root)


def root_of(keys: Iterable[Any]) -> type:
    """The typed root that lacks the fewest of a configuration's top-level keys; in a tie, that of train.py."""
    given = set(map(str, keys))
    return min(ROOTS.values(), key=lambda root: len(given - {entry.name for entry in fields(root)}))


def known_keys(root: type, prefix: str = "") -> list[str]:
    """All dotted keys of a typed root."""
    keys = []
    for entry in fields(root):
        keys.append(prefix + entry.name)
        factory = entry.default_factory
        if is_dataclass(factory):
            keys += known_keys(factory, f"{prefix}{entry.name}.")  # type: ignore[arg-type]
    return keys
