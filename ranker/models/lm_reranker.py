"""A language model as a reranker. The score is the difference of two words' logits, or comes from a linear head.

Nogueira et al., 2020 (arXiv:2003.06713) rank by the logits of two words; RankLLaMA (Ma et al., 2023, arXiv:2310.08319)
has a linear head on the last token's state.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from ranker.data.template import Template
from ranker.encoders.encoder import Encoder
from ranker.encoders.execution import DEFAULT, Execution
from ranker.encoders.fit import check_shared_prefix
from ranker.encoders.lora_layers import has_adapter
from ranker.encoders.word_head import WordHead
from ranker.errors import ConfigError
from ranker.export import language_model
from ranker.export._prompt import trained_prompt
from ranker.interactions.grid import to_grid
from ranker.interactions.maxsim import full_precision
from ranker.models._pair_prompt import filled, in_chat, pair_layout, token_of
from ranker.types import RankBatch, TokenBatch

DEFAULT_PROMPT = (
    "{instruction}\n\nQuery: {query}\n\nDocument: {doc}\n\nIs the document relevant to the query? Answer Yes or No.\n"
)
DEFAULT_INSTRUCTION = "Judge whether the document is relevant to the query."


class LMReranker(nn.Module):
    r"""Score a query and a doc in one prompt, by a decoder-only language model.

    .. math:: s(q, d) = \mathrm{logit}_{yes}(h) - \mathrm{logit}_{no}(h) \quad\text{or}\quad w \cdot h

    where h is the hidden state of the prompt's last token.

    Args:
        encoder: A decoder-only model; `encoder.causal=false` lets it read in both directions.
        head: `yes_no`: the logits of two words, from two rows of the output matrix; `linear`: a new linear layer
            without a bias (RankLLaMA).
        prompt: Template with `{query}`, `{doc}` and optionally `{instruction}`. None: the stored prompt if
            `encoder.name` is the folder of a trained reranker, else `DEFAULT_PROMPT`.
        instruction: Text for `{instruction}`; None: `DEFAULT_INSTRUCTION` if the template has `{instruction}`.
        chat: Whether the prompt is a user's message in the tokenizer's chat template; `auto`: true if there is one.
        yes_word: The word for a relevant doc; it must be one token after the prompt.
        no_word: The word for a doc that is not relevant.

    Raises:
        ConfigError: An option has an unknown value, a template lacks a field, or a word is not one token.
        CheckpointError: The family is not a language model.
    """

    reads = "pairs"
    decoder_only = True
    default_prompt = DEFAULT_PROMPT
    takes_windows = True
    text_limits: tuple[int, int] | None = None

    def __init__(
        self,
        encoder: Encoder,
        head: str = "yes_no",
        prompt: str | None = None,
        instruction: str | None = None,
        chat: bool | str = "auto",
        yes_word: str = "Yes",
        no_word: str = "No",
    ) -> None:
        super().__init__()
        if head not in ("yes_no", "linear"):
            raise ConfigError(f"model.head: expected yes_no or linear; got {head!r}")
        if chat not in (True, False, "auto"):
            raise ConfigError(f"model.chat: expected auto, true or false; got {chat!r}")
        self.encoder, self.words = encoder, (yes_word, no_word)
        given = None if prompt is None and instruction is None else _whole(encoder, prompt, instruction, chat)
        self.prompt = trained_prompt(encoder, given) or _whole(encoder, prompt, instruction, chat)
        self._layout = pair_layout(encoder.tokenizer, self.prompt, ends=False)
        if encoder.execution.share_prefix:
            check_shared_prefix(encoder)
            if self._layout.doc_first:
                raise ConfigError(
                    "encoder.share_prefix: expected false, since the prompt has the doc before the query; got true"
                )
        self.head: WordHead | nn.Linear
        if head == "linear":
            stored_head = language_model.stored_head(encoder)
            self.head = nn.Linear(encoder.dim, 1, bias=False) if stored_head is None else stored_head
            if stored_head is None:
                nn.init.normal_(self.head.weight, std=getattr(encoder.config, "initializer_range", 0.02))
        else:
            texts = self.prompt.replace("{query}", "a").replace("{doc}", "a")
            self.word_ids = tuple(
                token_of(encoder.tokenizer, word, texts, f"model.{key}")
                for key, word in (("yes_word", yes_word), ("no_word", no_word))
            )
            if self.word_ids[0] == self.word_ids[1]:
                raise ConfigError(f"model.no_word: expected another word than model.yes_word, got {no_word!r}")
            self.head = WordHead(encoder, self.word_ids)
            if has_adapter(encoder.model):
                self.head.requires_grad_(False)  # the head is part of the frozen base model

    def pair_layout(self) -> Template:
        """Return the layout of a query and a doc in the prompt."""
        return self._layout

    def prompted_layout(self, prompt: str | None, instruction: str | None, chat: bool | str = "auto") -> Template:
        """Return the layout of a pair in another prompt.

        Args:
            prompt: Template; None: `DEFAULT_PROMPT`.
            instruction: Text for `{instruction}`; None: `DEFAULT_INSTRUCTION` if the template has `{instruction}`.
            chat: See the class.

        Raises:
            ConfigError: The template lacks a field; or `encoder.share_prefix` is true, and the template has the doc
                before the query.
        """
        layout = pair_layout(self.encoder.tokenizer, _whole(self.encoder, prompt, instruction, chat), ends=False)
        if layout.doc_first and self.encoder.execution.share_prefix:
            raise ConfigError(
                "encoder.share_prefix: expected false, since a prompt has the doc before the query; got true"
            )
        return layout

    def forward(self, batch: RankBatch) -> Tensor:
        """Return scores [batch, docs]; 0 in cells without a doc."""
        assert batch.pairs is not None
        if self.encoder.execution.share_prefix:
            sizes = (batch.host or batch).doc_mask.sum(1).tolist()
            vectors = full_precision(self.encoder.last_of_groups(batch.pairs, sizes))
        else:
            vectors = self.row_vectors(batch.pairs)
        return to_grid(self.vector_scores(vectors), batch.doc_mask)

    @property
    def vector_dim(self) -> int:
        """Size of the vector that the head reads from a row."""
        return self.encoder.dim

    def row_vectors(self, rows: TokenBatch) -> Tensor:
        """Return the vectors [rows, dim] that the head reads: the state of each row's last token."""
        return full_precision(self.encoder.pooled(rows, "last"))

    def vector_scores(self, vectors: Tensor, *_rows: Any) -> Tensor:
        """Return the scores [vectors] of vectors [vectors, dim] in the form of `row_vectors`."""
        # no autocast, because bf16 scores above 2 are 1/64 apart, so that good candidates would tie
        with torch.autocast(vectors.device.type, enabled=False):
            logits = full_precision(self.head(vectors))
        return logits[:, 0] if logits.shape[1] == 1 else logits[:, 0] - logits[:, 1]

    def save(self, folder: Path, max_tokens: int) -> None:
        """Write a folder that transformers loads, see `ranker.export.language_model.write`.

        Args:
            folder: Where to write.
            max_tokens: Longest pair, special tokens included; stored with the tokenizer.
        """
        language_model.write(folder, self.encoder, self.head, max_tokens, self.prompt, self.words)

    @classmethod
    def load(cls, folder: Path, execution: Execution = DEFAULT) -> Self:
        """Load a folder that `save` wrote.

        Raises:
            CheckpointError: `save` has not written the folder.
        """
        encoder, options = language_model.read(Path(folder), execution)
        return cls(encoder, **options)


def _whole(encoder: Encoder, prompt: str | None, instruction: str | None, chat: bool | str) -> str:
    """Return the prompt with its instruction, inside the chat template if `chat` is set."""
    prompt = DEFAULT_PROMPT if prompt is None else prompt
    if instruction is None:
        instruction = DEFAULT_INSTRUCTION if "{instruction}" in prompt else ""
    text = filled(prompt, instruction)
    wanted = bool(encoder.tokenizer.chat_template) if chat == "auto" else chat
    return in_chat(encoder.tokenizer, text) if wanted else text
