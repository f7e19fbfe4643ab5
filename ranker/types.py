"""What flows through the program: texts, ragged token batches, rank batches, and the contracts of scorers, losses and sources.

Axis names, in this order: batch (query groups), docs (docs of a group), tokens, dim. Masks are True where something is
real.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeGuard

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from pathlib import Path

    from ranker.data.batching import Template
    from ranker.data.collection import Splits
    from ranker.encoders.encoder import Encoder
    from ranker.encoders.execution import Execution
    from ranker.interactions.maxsim import TextVectors

Qrels = dict[str, dict[str, int]]  # query_id -> doc_id -> relevance
Run = dict[str, dict[str, float]]  # query_id -> doc_id -> score


class Movable:
    """A dataclass of tensors (and of such dataclasses) that Lightning and a pinning DataLoader can move.

    Treat it as frozen. It is not, since Lightning's 64-true and bf16-true precision can't convert frozen dataclasses.
    """

    def _map(self, move: Callable[[Any], Any]) -> Self:
        changed: dict[str, Any] = {}
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if isinstance(value, (Tensor, Movable)):
                changed[field.name] = move(value)
            elif isinstance(value, tuple) and value and isinstance(value[0], Movable):
                changed[field.name] = tuple(move(part) for part in value)
        return replace(self, **changed)  # type: ignore[type-var]

    def to(self, device: torch.device | str, non_blocking: bool = True) -> Self:
        """Return a copy with every tensor on `device`; Lightning calls this without `non_blocking`, so it is on by default."""
        return self._map(lambda value: value.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """Return a copy in page-locked memory; without this method DataLoader leaves own types unpinned, silently."""
        return self._map(lambda value: value.pin_memory())


@dataclass
class TokenBatch(Movable):
    """Ragged token sequences: row r is `tokens[cu_seqlens[r]:cu_seqlens[r + 1]]`.

    Args:
        tokens: Token ids of all rows, one after another, int64 [tokens].
        segments: Segment (token type) ids, int64 [tokens].
        cu_seqlens: Cumulative row lengths, int32 [rows + 1], first 0, last the number of tokens.
        max_length: The longest row, a host number so that no kernel launch has to wait for the device.
        attended: Only the first so many tokens of each row are attended to, int32 [rows]; the others read them and are
            read by none (ColBERT's query expansion). None: every token is.
        num_attended: The sum of `attended`, a host number.
        names: Number of each row within the optimizer step, whatever part of the step this is, int64 [rows]: what
            dropout's masks hang on. None: the rows' numbers here.
    """

    tokens: Tensor
    segments: Tensor
    cu_seqlens: Tensor
    max_length: int
    attended: Tensor | None = None
    num_attended: int = 0
    names: Tensor | None = None

    @property
    def num_rows(self) -> int:
        """Number of sequences."""
        return self.cu_seqlens.shape[0] - 1

    @property
    def num_tokens(self) -> int:
        """Number of real tokens over all rows."""
        return self.tokens.shape[0]


@dataclass
class RankBatch(Movable):
    """A micro-batch of query groups. A cross-encoder reads `pairs`; a bi-encoder reads `queries` and `docs`.

    Args:
        labels: What the loss aims at, float32 [batch, docs]; 0 where `doc_mask` is False.
        doc_mask: True where a group has a doc, bool [batch, docs]. Rows of `pairs` and of `docs` are its True cells in
            row-major order.
        places: Each group's place in the optimizer step (in the evaluation: the query's number), int64 [batch].
        share: This micro-batch's groups over the groups of the whole step (all devices); shares of a step sum to 1.
        pairs: One row per real doc: query and doc in one sequence.
        queries: One row per group.
        docs: One row per real doc.
    """

    labels: Tensor
    doc_mask: Tensor
    places: Tensor
    share: float
    pairs: TokenBatch | None = None
    queries: TokenBatch | None = None
    docs: TokenBatch | None = None


@dataclass
class Contrast(Movable):
    """What in-batch negatives have to know of the whole step, the same on every device.

    `docs` are the step's real docs, group by group.

    Args:
        labels: What the loss aims at in each doc's own group, float32 [docs].
        owners: Each doc's group, ascending, int64 [docs].
        mask: True where a doc stands in a query's ranking, bool [groups, docs] (`ranker.data.contrast.contrast`).
        positive: True where a doc is relevant for its own group's query, bool [docs]; a lower grade may leave a
            negative a label above 0.
    """

    labels: Tensor
    owners: Tensor
    mask: Tensor
    positive: Tensor


@dataclass
class TrainStep(Movable):
    """All of one optimizer step's work on this device; `micro_batches` may be empty where another device got all groups.

    `seeds` are torch's seeds of the micro-batches where the step is repeated on another device than its own; else the
    module makes them.
    """

    epoch: int
    index: int
    micro_batches: tuple[RankBatch, ...]
    num_groups: int
    num_docs: int
    contrast: Contrast | None = None
    seeds: tuple[int, ...] = ()


class Scorer(Protocol):
    """A model that scores docs for a query: an `nn.Module` with these attributes and methods.

    Attributes:
        reads: `pairs` (query and doc in one sequence: a cross-encoder) or `texts` (each by itself: a `BiEncoder`).
        encoder: Encodes the pairs, or the queries. Its tokenizer and its number of positions decide the token stores
            and the batches.
        text_limits: Longest query and longest doc in tokens, special tokens not counted, where the folder that the
            scorer was loaded from gives them; else None.
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
        """Write weights, tokenizer and whatever else `load` needs into a folder.

        Args:
            folder: An empty folder.
            max_tokens: Longest sequence of the training (a pair, or a doc), special tokens included.
        """
        ...

    @classmethod
    def load(cls, folder: Path, execution: Execution) -> Self:
        """Load a folder that `save` wrote; its scores are the same, bit for bit.

        Args:
            folder: The folder.
            execution: How the encoder computes.
        """
        ...

    # of nn.Module
    def modules(self) -> Iterator[nn.Module]: ...
    def parameters(self) -> Iterator[nn.Parameter]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def train(self, mode: bool = True) -> Self: ...
    def eval(self) -> Self: ...
    def to(self, device: torch.device) -> Self: ...


class BiEncoder(Scorer, Protocol):
    """A scorer that encodes queries and docs separately, so that it can search a collection of encoded docs.

    Attributes:
        vectors: `one` (a vector per text) or `tokens` (a vector per token).
        similarity: `cosine` (vectors have length 1) or `dot`. Both are inner products.
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
        """Write the scorer as `Scorer.save` does; `max_tokens` is that of docs, and of queries unless given apart."""
        ...

    def layouts(self) -> tuple[Template, Template]:
        """The special tokens and prompts around a query and around a doc."""
        ...

    def settings(self) -> dict[str, Any]:
        """Return the options, beside weights and tokenizer, that change the vectors; stored vectors keep their hash."""
        ...

    def encode_queries(self, batch: TokenBatch) -> TextVectors:
        """Return the vectors of queries, float32."""
        ...

    def encode_docs(self, batch: TokenBatch) -> TextVectors:
        """Return the vectors of docs, float32."""
        ...

    def doc_vector_counts(self, batch: TokenBatch) -> Tensor:
        """Return the number of vectors of each doc, int64 [docs], without encoding it."""
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


class Loss(Protocol):
    """Scalar: the mean over groups of each group's own value. All inputs [batch, docs].

    With an attribute `pairwise = False` a loss says that it holds no [batch, docs, docs]; else in-batch negatives give
    it few groups at a time. With `needs_negatives = False` it says that it learns from a group of relevant docs alone;
    else `batch.docs` must leave room for others.
    """

    def __call__(self, scores: Tensor, labels: Tensor, doc_mask: Tensor) -> Tensor: ...


class Source(Protocol):
    """A source of collections: `conf/data/*.yaml`."""

    def load(self) -> Splits:
        """Read the collections.

        Raises:
            DataError: A file is missing, or its content is wrong.
        """
        ...
