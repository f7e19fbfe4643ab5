"""TILDEv2: a weight for each token of a doc, without an encoder of queries (Zhuang and Zuccon, arXiv:2108.08513)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ranker.data.template import Template
from ranker.encoders.encoder import Encoder
from ranker.encoders.execution import DEFAULT, Execution
from ranker.encoders.fit import check_layout
from ranker.encoders.loading import load_encoder
from ranker.export._module_weights import write_tokenizer
from ranker.interactions.maxsim import TextVectors, full_precision
from ranker.models._terms import TermScorer, counted_tokens, row_of_each_token, token_counts
from ranker.types import TokenBatch


class TILDEv2(TermScorer):
    r"""Score a doc by the weights of its tokens that occur in the query (contextual exact match).

    .. math:: s(q, d) = \sum_{t \in q} \max_{j: d_j = t} \mathrm{relu}(w \cdot h_j + b)

    A token that occurs n times in the query counts n times. Queries are only tokenized. The data source may append the
    words of an expansion to docs (TILDE, docT5query).

    Args:
        encoder: The encoder of docs.
        in_batch_negatives: Whether the docs of a step's other queries are negatives in training; None: yes,
            unless the labels are a teacher's scores.
        symmetric: Whether each positive doc is also contrasted with the step's other queries.
    """

    reads = "texts"
    training_keys = ("in_batch_negatives", "symmetric")
    vectors = "terms"
    similarity = "dot"
    encodes_queries = False
    doc_encoder: Encoder | None = None

    def __init__(self, encoder: Encoder, in_batch_negatives: bool | None = None, symmetric: bool = False) -> None:
        super().__init__()
        check_layout(encoder, 1)
        self.encoder, self.head = encoder, nn.Linear(encoder.dim, 1)
        self.in_batch_negatives, self.symmetric = in_batch_negatives, symmetric
        self.dim = len(encoder.model.get_input_embeddings().weight)
        self._counted: Tensor
        self.register_buffer("_counted", counted_tokens(encoder, self.dim), persistent=False)
        self.text_limits: tuple[int, int] | None = None

    def layouts(self) -> tuple[Template, Template]:
        """Return the layouts of a query and of a doc: special tokens."""
        single = Template.of(self.encoder.tokenizer, 1)
        return single, single

    def settings(self) -> dict[str, Any]:
        """Return the options that change the vectors, besides weights and tokenizer; a hash of all is stored."""
        return {"scorer": "tildev2", "layouts": repr(self.layouts())}

    def encode_queries(self, batch: TokenBatch) -> TextVectors:
        """Return how often each token occurs in each query, float32 [queries, words]; no encoder runs."""
        dtype = torch.float64 if self.head.weight.dtype == torch.float64 else torch.float32
        return TextVectors(token_counts(batch, self._counted).to(dtype))

    def encode_docs(self, batch: TokenBatch) -> TextVectors:
        """Return the largest weight of each token in each doc, float32 [docs, words]."""
        states = full_precision(self.encoder(batch))
        with torch.autocast(states.device.type, enabled=False):
            weights = self.head(states)[:, 0].relu() * self._counted[batch.tokens]
        cells = row_of_each_token(batch) * self.dim + batch.tokens
        grid = weights.new_zeros(batch.num_rows * self.dim)
        return TextVectors(grid.scatter_reduce(0, cells, weights, "amax").view(batch.num_rows, -1))

    def save(self, folder: Path, max_tokens: int, max_query_tokens: int | None = None) -> None:  # noqa: ARG002
        """Write the encoder in transformers' format, and the weights of the head to head.safetensors.

        Args:
            folder: Where to write.
            max_tokens: Longest doc, special tokens included.
            max_query_tokens: Ignored, because `ranker.yaml` has the longest query.
        """
        write_tokenizer(folder, self.encoder, max_tokens)
        self.encoder.model.save_pretrained(folder)
        save_file(
            {name: value.contiguous().cpu() for name, value in self.head.state_dict().items()},
            folder / "head.safetensors",
        )

    @classmethod
    def load(cls, folder: Path, execution: Execution = DEFAULT) -> TILDEv2:
        """Load a folder that `save` wrote."""
        scorer = cls(load_encoder(str(folder), **vars(execution)))
        scorer.head.load_state_dict(load_file(folder / "head.safetensors"))
        scorer.encoder.source = None
        return scorer
