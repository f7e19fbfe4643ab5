"""monoBERT: query and document in one sequence, scored by a head on its first token (Nogueira and Cho, 2019, arXiv:1901.04085)."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

from ranker.encoders.encoder import Encoder
from ranker.encoders.execution import DEFAULT, Execution
from ranker.encoders.families import families, family_of
from ranker.encoders.fit import check_config, check_layout, check_tokens
from ranker.encoders.loading import load_encoder
from ranker.encoders.model_folder import check_model_folder
from ranker.errors import CheckpointError, ConfigError
from ranker.interactions.grid import to_grid
from ranker.interactions.pooling import POOLINGS
from ranker.types import RankBatch

log = logging.getLogger(__name__)

SMALL = 2.0**-12  # see MonoBERT.save
HEAD_FILE = "head.safetensors"
# of older checkpoints: a constant, and a layer that RoBERTa's never reads
UNUSED = ("position_ids", "pooler.dense.weight", "pooler.dense.bias")


class MonoBERT(nn.Module):
    """Score `[CLS] query [SEP] doc [SEP]`, segments 0 and 1, by a linear head.

    Args:
        encoder: The encoder.
        pooling: What the head reads: `cls`, `mean` or `max` over the last layer's tokens.
        pooler: Put BERT's dense + tanh (random at the start) between pooling and head.
        num_labels: 1 (one logit is the score) or 2 (the original: the score is the log-odds, logit 1 - logit 0).
        dropout: Dropout before the head.
    """

    reads = "pairs"

    def __init__(
        self, encoder: Encoder, pooling: str = "cls", pooler: bool = False, num_labels: int = 1, dropout: float = 0.0
    ) -> None:
        super().__init__()
        if pooling not in POOLINGS:
            raise ConfigError(f"model.pooling: expected one of {', '.join(POOLINGS)}; got {pooling!r}")
        if num_labels not in (1, 2):
            raise ConfigError(f"model.num_labels: expected 1 or 2, got {num_labels}")
        check_layout(encoder, 2, pooling)
        self.encoder, self.pooling = encoder, pooling
        self.pooler = nn.Sequential(nn.Linear(encoder.dim, encoder.dim), nn.Tanh()) if pooler else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(encoder.dim, num_labels)
        for linear in (part for part in (*self.pooler.modules(), self.head) if isinstance(part, nn.Linear)):
            nn.init.normal_(linear.weight, std=getattr(encoder.config, "initializer_range", 0.02))
            nn.init.zeros_(linear.bias)

    def logits(self, batch: RankBatch) -> Tensor:
        """Return one row of logits per real doc, float32, [rows, num_labels]."""
        assert batch.pairs is not None
        return self.read(self.encoder.pooled(batch.pairs, self.pooling))

    def read(self, pooled: Tensor) -> Tensor:
        """Return the logits of rows from their pooled states [rows, dim], float32, [rows, num_labels]."""
        with torch.autocast(
            pooled.device.type, enabled=False
        ):  # in bf16 good candidates would tie: its scores are 1/64 apart above 2
            logits = self.head(self.dropout(self.pooler(pooled)))
        return logits if logits.dtype == torch.float64 else logits.float()

    def forward(self, batch: RankBatch) -> Tensor:
        """Return scores [batch, docs]; 0 where no doc is."""
        return self.scores(self.logits(batch), batch.doc_mask)

    def scores(self, logits: Tensor, doc_mask: Tensor) -> Tensor:
        """Return the scores [batch, docs] of logits [rows, num_labels]; 0 where no doc is."""
        scores = logits[:, 0] if logits.shape[1] == 1 else logits[:, 1] - logits[:, 0]
        return to_grid(scores, doc_mask)

    # the Hugging Face folder
    # -------------------------------------------------------------------------------------------------------

    def save(self, folder: Path, max_tokens: int) -> None:
        """Write config.json, model.safetensors and the tokenizer, as a sequence classification model where the family has one that fits.

        transformers' BERT and RoBERTa classifiers put a dense layer and tanh between the first token and the logits. A
        scorer without a pooler is written with the dense layer `2^-12 I` and the head times `2^12`: tanh is the
        identity there up to 1e-7, and powers of two scale without rounding, so other programs give the same scores and
        `load` gives the same weights back. For other families and poolings the encoder is written by itself, with the
        head beside it in `head.safetensors`, which only `load` reads.

        A tokenizer's files hold the pair's length alone, not the limits of query and doc. Other programs shorten the
        longer text first, so they give the same scores for the pairs of which `ranker.data.pair_cuts` says that they
        are cut alike.

        Args:
            folder: Where to.
            max_tokens: Longest pair, recorded with the tokenizer.
        """
        tokenizer = copy.deepcopy(self.encoder.tokenizer)
        tokenizer.model_max_length = max_tokens
        tokenizer.save_pretrained(folder)
        model = self._classifier()
        if model is not None:
            model.save_pretrained(folder)
            return
        log.warning(
            "model/: %s with %s pooling has no such classifier in transformers; the head lies in head.safetensors",
            self.encoder.config.model_type,
            self.pooling,
        )
        self.encoder.model.save_pretrained(folder)
        own = {key: value.contiguous() for key, value in self.state_dict().items() if not key.startswith("encoder.")}
        save_file(own, folder / HEAD_FILE, metadata={"pooling": self.pooling, "dropout": str(self.dropout.p)})

    def _classifier(self) -> PreTrainedModel | None:
        """The same scorer as a sequence classification model; None where the family has none that fits."""
        config = copy.deepcopy(self.encoder.config)
        config.num_labels = self.head.out_features
        config.classifier_dropout = self.dropout.p
        config.architectures = None
        if self.head.out_features == 1:
            # sentence-transformers would otherwise put a sigmoid on the logit
            config.sentence_transformers = {"activation_fn": "torch.nn.modules.linear.Identity"}
        if self.pooling != "cls" or family_of(config).classifier is None:
            return None
        model = AutoModelForSequenceClassification.from_config(config)
        dense, out = _classifier_of(model)
        model.base_model.load_state_dict(self.encoder.model.state_dict(), strict=False)
        pooler: Any = self.pooler
        with torch.no_grad():
            if not isinstance(pooler, nn.Identity):
                dense.weight.copy_(pooler[0].weight)
                dense.bias.copy_(pooler[0].bias)
                out.weight.copy_(self.head.weight)
            else:
                dense.weight.copy_(torch.eye(self.encoder.dim) * SMALL)
                dense.bias.zero_()
                out.weight.copy_(self.head.weight / SMALL)
            out.bias.copy_(self.head.bias)
        return model

    @classmethod
    def load(cls, folder: Path, execution: Execution = DEFAULT) -> MonoBERT:
        """Load a sequence classification folder: one written by `save`, or any of the same families with 1 or 2 labels.

        Raises:
            CheckpointError: The folder has no trained head, or one of another size; a weight is missing or has no
                place.
        """
        if (Path(folder) / HEAD_FILE).is_file():
            return cls._load_apart(Path(folder), execution)
        check_model_folder(folder)
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        check_config(config, str(folder))
        if not any("ForSequenceClassification" in name for name in config.architectures or []):
            raise CheckpointError(
                f"{folder}: expected a trained reranker (a sequence classification model), got {config.architectures}; "
                "its head would be random: train it first with encoder.name=..."
            )
        if family_of(config).classifier is None:
            known = sorted(name for name, family in families().items() if family.classifier)
            raise CheckpointError(
                f"{folder}: expected a classifier of one of {', '.join(known)}, got {config.model_type!r}"
            )
        if config.num_labels not in (1, 2):
            raise CheckpointError(
                f"{folder}: expected a head of 1 or 2 labels, got {config.num_labels}; train a new one with encoder.name=..."
            )
        model, info = AutoModelForSequenceClassification.from_pretrained(
            folder, output_loading_info=True, dtype=torch.float32, trust_remote_code=False
        )
        if info["missing_keys"]:
            raise CheckpointError(
                f"{folder}: expected all weights, {', '.join(sorted(info['missing_keys']))} are missing"
            )
        unknown = sorted(key for key in info["unexpected_keys"] if not key.endswith(UNUSED))
        if unknown:
            raise CheckpointError(
                f"{folder}: expected the weights that its config.json describes, got {', '.join(unknown)} as well"
            )
        dense, out = _classifier_of(model)
        plain = torch.equal(dense.weight, torch.eye(config.hidden_size) * SMALL)
        base = model.base_model
        if getattr(base, "pooler", None) is not None:
            base.pooler = None
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        dropout = getattr(config, "classifier_dropout", None) or 0.0
        encoder = Encoder(base, tokenizer, execution)
        check_tokens(encoder)
        scorer = cls(encoder, pooler=not plain, num_labels=config.num_labels, dropout=dropout)
        with torch.no_grad():
            pooler: Any = scorer.pooler
            if not plain:
                pooler[0].weight.copy_(dense.weight)
                pooler[0].bias.copy_(dense.bias)
            scorer.head.weight.copy_(out.weight * SMALL if plain else out.weight)
            scorer.head.bias.copy_(out.bias)
        return scorer

    @classmethod
    def _load_apart(cls, folder: Path, execution: Execution) -> MonoBERT:
        with safe_open(folder / HEAD_FILE, "pt") as stored:
            about, state = stored.metadata(), {key: stored.get_tensor(key) for key in stored.keys()}  # noqa: SIM118
        scorer = cls(
            load_encoder(str(folder), **vars(execution)), about["pooling"], pooler="pooler.0.weight" in state,
            num_labels=len(state["head.bias"]), dropout=float(about.get("dropout", 0)),
        )  # fmt: skip
        scorer.load_state_dict(state, strict=False)
        return scorer


def _classifier_of(model: Any) -> tuple[nn.Linear, nn.Linear]:
    """Return the dense layer before tanh and the output layer, see `ranker.encoders.families.Classifier`."""
    classifier = family_of(model.config).classifier
    assert classifier is not None
    return model.get_submodule(classifier.dense), model.get_submodule(classifier.output)
