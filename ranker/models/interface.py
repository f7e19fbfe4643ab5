"""The protocols `Scorer` and `BiEncoder`, which every model must follow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, Protocol, Self, TypeGuard

import torch
from torch import Tensor, nn

from ranker.data.template import Template
from ranker.encoders.encoder import Encoder
from ranker.encoders.execution import Execution
from ranker.interactions.maxsim import TextVectors
from ranker.types import RankBatch, TokenBatch


class Scorer(Protocol):
    """A model that scores the docs of each query group: an `nn.Module` with these attributes and methods.

    A cross-encoder with a layout of its own has a method `pair_layout`, which returns a `Template`. The following class
    attributes are optional. `training_keys` is a tuple of the keys of the model's yaml that affect only its training; a
    training from a stored model may change these keys. `program_keys` is a tuple of the keys that the program reads
    itself and does not pass to the constructor. `takes_windows = True` means that the scorer can score each window of a
    doc as a row of its own (`ranker.passages.windowed`). Such a scorer has `vector_dim` for aggregations of window
    vectors; a cross-encoder also has `row_vectors` and `vector_scores` (see `MonoBERT`), a bi-encoder also has
    `score_grid` (see `DPR`).

    `reads_lists = True` means that the score of a doc depends on the query's other docs, so that a list is never split
    between batches. Such a scorer may read `lists`. Then it has `layouts` like a `BiEncoder`. It also has `list_rows`,
    a description of the rows that it builds from a list (`ranker.data.list_rows`). `needs_ragged = True` means that an
    encoder that pads is refused. `scoring_keys` names the attributes that, besides the weights, decide the scores
    (`scoring_options`).

    Attributes:
        reads: `pairs` (a cross-encoder reads query and doc in one sequence), `texts` (a `BiEncoder` reads each text
            alone) or `lists` (a scorer reads single texts and builds rows with several docs).
        encoder: The encoder of pairs, or of queries. Its tokenizer and its number of positions decide the token stores
            and the batches.
        text_limits: Longest query and longest doc in tokens, special tokens not counted, if the scorer was loaded from
            a folder with these limits; else None.
    """

    @property
    def reads(self) -> str: ...
    @property
    def encoder(self) -> Encoder: ...
    @property
    def text_limits(self) -> tuple[int, int] | None: ...

    def __call__(self, batch: RankBatch) -> Tensor:
        """Return scores [batch, docs], float32, higher is better; cells where `doc_mask` is False are 0."""
        ...

    def save(self, folder: Path, max_tokens: int) -> None:
        """Write weights, tokenizer and everything else that `load` needs into a folder.

        Args:
            folder: An empty folder.
            max_tokens: Longest sequence of the training (a pair, or a doc), special tokens included.
        """
        ...

    @classmethod
    def load(cls, folder: Path, execution: Execution) -> Self:
        """Load a folder that `save` wrote. The loaded scorer gives bit-identical scores.

        Args:
            folder: The folder.
            execution: How the encoder computes.
        """
        ...

    # of nn.Module
    @property
    def training(self) -> bool: ...
    def modules(self) -> Iterator[nn.Module]: ...
    def parameters(self) -> Iterator[nn.Parameter]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def train(self, mode: bool = True) -> Self: ...
    def eval(self) -> Self: ...
    def to(self, device: torch.device) -> Self: ...


class BiEncoder(Scorer, Protocol):
    """A scorer that encodes queries and docs separately, so that it can search a collection of encoded docs.

    Attributes:
        vectors: `one` (a vector per text), `tokens` (a vector per token), `windows` (a vector per window of a doc) or
            `terms` (a sparse vector per text, with a weight of at least 0 for each word of the vocabulary).
        similarity: `cosine` or `dot`. Both are inner products; for `cosine`, vectors have length 1.
        dim: Size of a vector.
        doc_encoder: Encoder of docs; None: `encoder`.
    """

    @property
    def vectors(self) -> str: ...
    @property
    def similarity(self) -> str: ...
    @property
    def dim(self) -> int: ...
    @property
    def doc_encoder(self) -> Encoder | None: ...

    def save(self, folder: Path, max_tokens: int, max_query_tokens: int | None = None) -> None:
        """Write the scorer, see `Scorer.save`; without `max_query_tokens`, `max_tokens` also limits queries."""
        ...

    def layouts(self) -> tuple[Template, Template]:
        """The special tokens and prompts around a query and around a doc."""
        ...

    def settings(self) -> dict[str, Any]:
        """Return the options that change the vectors, besides weights and tokenizer; a hash of all is stored."""
        ...

    def encode_queries(self, batch: TokenBatch) -> TextVectors:
        """Return the vectors of queries, float32."""
        ...

    def encode_docs(self, batch: TokenBatch) -> TextVectors:
        """Return the vectors of docs, float32."""
        ...

    def doc_vector_counts(self, batch: TokenBatch) -> Tensor:
        """Return the number of vectors of each doc, int64 [docs], without encoding the docs."""
        ...

    def score_block(self, queries: TextVectors, docs: TextVectors) -> Tensor:
        """Score every query with every doc, [queries, docs], from their vectors."""
        ...

    def scoring_parameters(self) -> list[nn.Parameter]:
        """The trained parameters that `score_block` reads, such as a temperature."""
        ...

    def divisor(self) -> Tensor | float:
        """The number by which `score_block` divides inner products: a temperature, or 1."""
        ...


def is_bi_encoder(scorer: Scorer) -> TypeGuard[BiEncoder]:
    """Whether a scorer reads queries and docs separately."""
    return scorer.reads == "texts"


def scoring_options(scorer: Any) -> dict[str, Any]:
    """Return what decides a scorer's scores besides its weights: its class and the attributes in `scoring_keys`.

    The result is empty for a scorer without such attributes.
    """
    keys = getattr(scorer, "scoring_keys", ())
    values: dict[str, Any] = {key: getattr(scorer, key) for key in keys}
    plain = {
        key: asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
        for key, value in values.items()
    }
    return {"scorer": type(scorer).__name__, **plain} if keys else {}
