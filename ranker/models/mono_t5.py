"""A sequence-to-sequence model as a reranker: the logits of two words at the decoder's first step.

Nogueira et al., 2020 (arXiv:2003.06713) rank by the logits of "true" and "false" (monoT5). RankT5 (Zhuang et al., 2022,
arXiv:2210.10634) ranks by the logit of one word that no text contains.
"""

from __future__ import annotations

from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn

from ranker.data.template import Template
from ranker.encoders.decoder_step import DecoderStep
from ranker.encoders.encoder import Encoder
from ranker.encoders.execution import DEFAULT, Execution
from ranker.encoders.lora_layers import has_adapter
from ranker.errors import ConfigError
from ranker.export import sequence_to_sequence
from ranker.export._prompt import trained_prompt
from ranker.interactions.grid import to_grid
from ranker.interactions.maxsim import full_precision
from ranker.models._pair_prompt import filled, pair_layout, token_of
from ranker.types import RankBatch

DEFAULT_PROMPT = "Query: {query} Document: {doc} Relevant:"


class MonoT5(nn.Module):
    r"""Score a query and a doc in one prompt, by the decoder's first step.

    .. math:: s(q, d) = \mathrm{logit}_{true}(h) - \mathrm{logit}_{false}(h) \quad\text{or}\quad
        \mathrm{logit}_{true}(h)

    where h is the decoder's state after its start token. The encoder reads `Query: q Document: d Relevant:</s>`.

    Args:
        encoder: The encoder of a T5, mT5, umT5, Flan-T5 or LongT5; the decoder is read from the same folder. With
            adapters in the encoder, the decoder is frozen.
        prompt: Template with `{query}`, `{doc}` and optionally `{instruction}`. None: the stored prompt if
            `encoder.name` is the folder of a trained reranker, else `DEFAULT_PROMPT`.
        instruction: Text for `{instruction}`.
        true_word: The word for a relevant doc; it must be one token.
        false_word: The word for a doc that is not relevant. None: the score is the logit of `true_word` alone, as in
            RankT5 with `<extra_id_10>`.

    Raises:
        ConfigError: A template lacks a field, or a word is not one token.
        CheckpointError: The family has no decoder of T5's kind.
    """

    reads = "pairs"
    sequence_to_sequence = True
    default_prompt = DEFAULT_PROMPT
    text_limits: tuple[int, int] | None = None

    def __init__(
        self,
        encoder: Encoder,
        prompt: str | None = None,
        instruction: str = "",
        true_word: str = "true",
        false_word: str | None = "false",
    ) -> None:
        super().__init__()
        self.encoder, self.words = encoder, (true_word, false_word)
        given = None if prompt is None and not instruction else filled(prompt or DEFAULT_PROMPT, instruction)
        self.prompt = trained_prompt(encoder, given) or DEFAULT_PROMPT
        self._layout = pair_layout(encoder.tokenizer, self.prompt, ends=True)
        named = {"model.true_word": true_word} | ({} if false_word is None else {"model.false_word": false_word})
        words = [token_of(encoder.tokenizer, word, "", key) for key, word in named.items()]
        if len(set(words)) < len(words):
            raise ConfigError(f"model.false_word: expected another word than model.true_word, got {false_word!r}")
        self.head = DecoderStep(encoder, words)
        if has_adapter(encoder.model):
            self.head.requires_grad_(False)

    def pair_layout(self) -> Template:
        """Return the layout of a query and a doc in the prompt."""
        return self._layout

    def prompted_layout(self, prompt: str | None, instruction: str | None, _chat: bool | str = "auto") -> Template:
        """Return the layout of a pair in another prompt.

        Args:
            prompt: Template; None: the model's own prompt, in which the instruction is already filled in.
            instruction: Text for `{instruction}`.

        Raises:
            ConfigError: The template lacks a field.
        """
        return pair_layout(self.encoder.tokenizer, filled(prompt or self.prompt, instruction or ""), ends=True)

    def forward(self, batch: RankBatch) -> Tensor:
        """Return scores [batch, docs]; 0 in cells without a doc."""
        assert batch.pairs is not None
        states = self.head(self.encoder(batch.pairs), batch.pairs, self.encoder.dropout_seed)
        # no autocast, because bf16 scores above 2 are 1/64 apart, so that good candidates would tie
        with torch.autocast(states.device.type, enabled=False):
            logits = full_precision(self.head.logits(full_precision(states)))
        scores = logits[:, 0] if logits.shape[1] == 1 else logits[:, 0] - logits[:, 1]
        return to_grid(scores, batch.doc_mask)

    def save(self, folder: Path, max_tokens: int) -> None:
        """Write a folder that transformers loads as a `ForConditionalGeneration` model.

        Args:
            folder: Where to write.
            max_tokens: Longest pair, special tokens included; stored with the tokenizer.
        """
        sequence_to_sequence.write(folder, self.encoder, self.head, max_tokens, self.prompt, self.words)

    @classmethod
    def load(cls, folder: Path, execution: Execution = DEFAULT) -> Self:
        """Load a folder that `save` wrote, or a `ForConditionalGeneration` model of transformers.

        Raises:
            CheckpointError: The folder is of neither kind.
        """
        encoder, options = sequence_to_sequence.read(Path(folder), execution)
        return cls(encoder, **options)
