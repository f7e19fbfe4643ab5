"""The first step of T5's decoder over packed encoder states: one decoder token per row, and the logits of a few words.

The decoder reads only its start token, so its self-attention has a single token. In cross-attention, the key weights
multiply the query, and the value weights multiply the average of the encoder's states. So keys and values of the
encoder's tokens are never computed. Logits are computed for the given words only.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, AutoModelForSeq2SeqLM

from ranker.encoders.dropout import HashedDropout, dropout_hashes
from ranker.encoders.encoder import Encoder
from ranker.encoders.packing import Packing, Pass
from ranker.encoders.ragged import PaddedGroup, RaggedLayout
from ranker.encoders.text_model import keep_layers, place_of
from ranker.encoders.word_head import TOLERANCE, OutputRows, TiedRows
from ranker.errors import CheckpointError
from ranker.hashing import mix
from ranker.types import TokenBatch

log = logging.getLogger(__name__)

# weights that a step of a single token does not need, because the token attends only to itself
UNREAD = ("SelfAttention.q.", "SelfAttention.k.", "relative_attention_bias")
SEED = 1  # mixed into the encoder's dropout seed, so that the decoder's masks differ from the encoder's


class DecoderStep(nn.Module):
    """Compute the logits of some words after the decoder's start token, for each row of encoder states.

    Args:
        encoder: The encoder of a T5, mT5, umT5, Flan-T5 or LongT5. The folder of its weights must also contain the
            decoder. If the encoder's weights are random, so are the decoder's.
        words: Token ids of the words.

    Attributes:
        decoder: transformers' decoder without its embeddings.
        rows: The words' rows of the output matrix, or of the encoder's embeddings if the family ties both matrices.

    Raises:
        CheckpointError: The family has no such decoder, or the folder lacks its weights.
    """

    def __init__(self, encoder: Encoder, words: Sequence[int]) -> None:
        super().__init__()
        whole = _with_one_encoder_layer(encoder)
        decoder, output, table = whole.decoder, whole.lm_head, whole.get_input_embeddings()
        self.tied = output.weight is table.weight
        self.scale = whole.config.d_model**-0.5 if getattr(whole.config, "scale_decoder_outputs", False) else 1.0
        starts = (getattr(part, "decoder_start_token_id", None) for part in (whole.config, whole.generation_config))
        self.start: int = next((start for start in starts if start is not None), whole.config.pad_token_id)
        self.words = list(words)
        # the whole output matrix as it was loaded stays on the CPU; `output_state` returns it
        self._loaded = None if self.tied else output.weight.detach()
        self.rows = TiedRows(table, words) if self.tied else OutputRows(output.weight, words)
        self._table = [table]  # a list, because the embeddings are parameters of the encoder, not of this module
        self.decoder = decoder
        states = torch.randn(5, encoder.dim, generator=torch.Generator().manual_seed(0))
        first = torch.full((1, 1), self.start)
        decoder.eval()
        with torch.no_grad():
            expected = whole(encoder_outputs=(states.unsqueeze(0),), decoder_input_ids=first).logits[0, 0, self.words]
        decoder.embed_tokens = None
        self._packing = Packing.of(decoder)
        batch = TokenBatch(torch.zeros(5, dtype=torch.long), torch.zeros(5), torch.tensor([0, 5]).int(), 5)
        self._packing.find_dropout(decoder, lambda: self._checked(states, batch, expected))
        decoder.train()
        for name, weight in decoder.named_parameters():
            if any(part in name for part in UNREAD):
                weight.requires_grad_(False)
        self._table = [encoder.model.get_input_embeddings()]
        if isinstance(self.rows, TiedRows):
            self.rows.embeddings = self._table

    def _checked(self, states: Tensor, batch: TokenBatch, expected: Tensor) -> None:
        """Refuse a decoder for which this class computes other logits than transformers."""
        with torch.no_grad():
            got = self.logits(self(states, batch))[0]
        if (got - expected).abs().max() > TOLERANCE * expected.abs().max() + 1e-6:
            raise CheckpointError("model: expected a decoder that computes as T5's does, got another one")

    def forward(self, states: Tensor, batch: TokenBatch, seed: int | None = None) -> Tensor:
        """Return the decoder's states after its start token, [rows, dim].

        Args:
            states: The encoder's states [tokens, dim].
            batch: The rows of these states.
            seed: Seed of the dropout masks; None: a random one.
        """
        layout = RaggedLayout.of(batch)
        hashes, seed = None, int(torch.randint(2**62, ())) if seed is None else int(mix(seed, SEED) >> 1)
        if self.training and any(part.p for part in self.modules() if isinstance(part, HashedDropout)):
            row_ids = torch.arange(batch.num_rows, device=states.device) if batch.row_ids is None else batch.row_ids
            sites = self._packing.num_sites or 1
            hashes = dropout_hashes(seed, row_ids, torch.zeros_like(row_ids), sites).unsqueeze(2)
        memory = [(group, group.pad(_full(states))) for group in layout.groups]
        with self._packing.running(Pass(batch, layout, False, hashes, seed)):
            return self._decoded(memory, batch.num_rows)[:, 0]

    def _decoded(self, memory: list[tuple[PaddedGroup, Tensor]], num_rows: int) -> Tensor:
        """Return the last states [rows, 1, dim]; `memory` has the encoder's states, grouped by similar row lengths."""
        decoder: Any = self.decoder
        states = decoder.dropout(self._table[0].weight[self.start].expand(num_rows, 1, -1))
        for block in decoder.block:
            own, cross, feed_forward = block.layer[0], block.layer[1], block.layer[-1]
            attention = own.SelfAttention
            states = states + own.dropout(attention.o(attention.v(own.layer_norm(states))))
            mixed = _cross_attention(cross.EncDecAttention, cross.layer_norm(states), memory)
            states = states + cross.dropout(mixed)
            states = feed_forward(states)
        last: Tensor = decoder.dropout(decoder.final_layer_norm(states))
        return last

    def logits(self, states: Tensor) -> Tensor:
        """Return the words' logits [rows, words] from the decoder's states [rows, dim]."""
        logits: Tensor = self.rows(states * self.scale)
        return logits

    def output_state(self) -> dict[str, Tensor]:
        """Return the weights of the decoder and the output matrix by their names in the whole model.

        Rows of other words are not trained and are as they were loaded. A tied output matrix is left out.
        """
        state = {f"decoder.{name}": value for name, value in self.decoder.state_dict().items()}
        if self._loaded is not None:
            full = self._loaded.clone()
            full[self.words] = self.rows.matrix().detach().to(full)
            state["lm_head.weight"] = full
        return state


def _cross_attention(attention: Any, states: Tensor, memory: list[tuple[PaddedGroup, Tensor]]) -> Tensor:
    """Compute cross-attention [rows, 1, dim] of one token per row, [rows, 1, dim], to the row's encoder states."""
    heads, size, rows = attention.n_heads, attention.key_value_proj_dim, len(states)
    query = attention.q(states)
    # without autocast, which would round large logits to 1/32; T5's logits are not scaled
    with torch.autocast(states.device.type, enabled=False):
        key, value = (_full(part.weight).view(heads, size, -1) for part in (attention.k, attention.v))
        queries = torch.einsum("rhs,hsd->rhd", _full(query).view(rows, heads, size), key)
        averages = []
        for group, padded in memory:
            logits = queries.index_select(0, group.rows) @ padded.transpose(1, 2)  # [group rows, heads, length]
            logits = logits.masked_fill(~group.key_mask.unsqueeze(1), torch.finfo(logits.dtype).min)
            averages.append(logits.softmax(2) @ padded)
        order = torch.cat([group.rows for group, _ in memory]).argsort()
        average = torch.cat(averages).index_select(0, order)
        mixed = torch.einsum("rhd,hsd->rhs", average, value).reshape(rows, 1, -1)
    projected: Tensor = attention.o(mixed)
    return projected


def _with_one_encoder_layer(encoder: Encoder) -> Any:
    """Return the whole model to which an encoder belongs, with only one of the encoder's layers.

    Raises:
        CheckpointError: The family has no decoder like T5's, or the folder lacks its weights.
    """
    config = whole_config(encoder)
    where = config.name_or_path or f"{config.model_type} encoder"
    known = type(config) in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING and hasattr(config, "num_decoder_layers")
    if not known or encoder.model.__class__.__name__ not in ENCODERS:
        raise CheckpointError(
            f"model: expected the encoder of a T5, mT5, umT5 or LongT5 for model=mono_t5, got {where!r} "
            f"({config.model_type}); use model=monobert or model=lm_reranker"
        )
    keep_layers(config, 1, where)
    if encoder.source is None:
        whole = AutoModelForSeq2SeqLM.from_config(config, trust_remote_code=encoder.execution.trust_remote_code)
        whole.get_input_embeddings().load_state_dict(encoder.model.get_input_embeddings().state_dict())
        return whole.eval()
    folder, file = place_of(encoder.source)
    whole, info = AutoModelForSeq2SeqLM.from_pretrained(
        folder, config=config, dtype=torch.float32, local_files_only=True, output_loading_info=True,
        trust_remote_code=encoder.execution.trust_remote_code, **file,
    )  # fmt: skip
    missing = sorted(key for key in info["missing_keys"] if key.startswith("decoder.block"))
    if missing:
        raise CheckpointError(
            f"{where}: expected the weights of a decoder beside those of the encoder, but {len(missing)}, such as "
            f"{missing[0]}, are missing and would be random; use the whole model's folder"
        )
    return whole.eval()


ENCODERS = ("T5EncoderModel", "MT5EncoderModel", "UMT5EncoderModel", "LongT5EncoderModel")


def whole_config(encoder: Encoder) -> Any:
    """Return the configuration of the whole model to which an encoder belongs."""
    config = copy.deepcopy(encoder.config)
    config._attn_implementation = None
    config.is_encoder_decoder, config.architectures = True, None
    return config


def _full(values: Tensor) -> Tensor:
    """Return values in float32, or in float64 if they are in float64."""
    return values if values.dtype == torch.float64 else values.float()
