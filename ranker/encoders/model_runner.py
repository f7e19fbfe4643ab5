"""Run a transformers model over ragged batches, on the fastest correct path."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from ranker.encoders import quantized
from ranker.encoders.alignment import align
from ranker.encoders.dropout import HashedDropout
from ranker.encoders.execution import DEFAULT, Execution
from ranker.encoders.family import family_of, first_position, max_positions
from ranker.encoders.graphs import Graphs
from ranker.encoders.lora_layers import has_adapter
from ranker.encoders.passes import Begin, Output
from ranker.encoders.ragged_forward import RaggedForward
from ranker.encoders.shared_prefix import SharedPrefixes
from ranker.encoders.stack import draw_seed, layers_to_skip
from ranker.encoders.traits import Traits, common_tokens, measure, one_row, reads_segments
from ranker.encoders.transformers_forward import NEAR, Request, TransformersForward
from ranker.errors import ConfigError
from ranker.types import TokenBatch

log = logging.getLogger(__name__)


@dataclass
class TokenCounts:
    """Counts of the tokens that an encoder processed in training passes.

    Args:
        computed_tokens: Number of tokens that went through the layers, padding included.
        last_layer_tokens: Number of real tokens that went through the last layer's weights.
    """

    computed_tokens: int = 0
    last_layer_tokens: int = 0


class ModelRunner(nn.Module):
    """A transformers model with its tokenizer, its family's properties, and its forward passes over ragged batches.

    A batch can run in several ways, called paths (`path`). Each family uses the fastest path on which a row's states
    do not depend on the other rows:

    - `bert`, `distilbert`, `modernbert`: layers of this package, without padding (`ragged_forward`), for families with
      these layers (`Family.layers`);
    - `packed`: transformers' own forward pass on one row that contains all texts, without padding;
    - `padded`: transformers' own forward pass on groups of rows of near lengths, each padded to its longest row;
    - `by_length`: transformers' own forward pass on groups of rows of equal length, for families whose states depend on
      padding.

    A family with layers of this package (`Family.layers`) uses their path, unless adapters or an option exclude it.
    Otherwise, the constructor runs a few short rows on the other paths, and takes the fastest path that gives correct
    states (`traits`).

    "Without padding" means that linear layers compute no padding token. On CUDA in half precision, attention computes
    none, either; it then applies no attention dropout.

    Args:
        model: The transformers model, without its pooler.
        tokenizer: Its fast tokenizer.
        execution: How the encoder computes.

    Attributes:
        path: The path, one of the names above.
        token_counts: Token counts of the training passes since the last reset, see `TokenCounts`.
        source: Folder or hub id of the weights; None: they are random, or were not loaded by `load_encoder`.
        adapter: Folder of an adapter that was added to these weights; None: no adapter was added.
        layer_drop: Probability with which a training step leaves out a layer, see `layers_to_skip`.
        dropout_seed: Seed of the dropout masks, set for each optimizer step; None: each forward pass draws a seed.

    Raises:
        CheckpointError: The model cannot run even a single row alone.
        ConfigError: The family does not support an option.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerFast,
        execution: Execution = DEFAULT,
    ) -> None:
        super().__init__()
        align(model)
        self.model: Any = model
        self.tokenizer = tokenizer
        self.execution = execution
        self.token_counts = TokenCounts()
        self.source: str | None = None
        self.adapter: str | None = None
        self._first_token_is_global = False
        self.layer_drop = 0.0
        self.dropout_seed: int | None = None
        words: Any = model.get_input_embeddings()
        self._ragged_forward = RaggedForward(execution, ids_in_table=len(tokenizer) <= len(words.weight))
        self._logged_path = False
        family = family_of(model.config)
        self._forward: TransformersForward | None = None
        plain = has_adapter(model) or execution.quantize_aware
        if execution.ragged and family.layers is not None and not plain:
            config = model.config
            self._traits = Traits(family.layers, first_position(config), config.hidden_size, config.num_hidden_layers)
        else:
            self.run_by_transformers()
        if execution.quantize_aware:
            if has_adapter(model):
                raise ConfigError(
                    "encoder.quantize_aware: expected false with adapters, got true; set it to false, or remove the "
                    "adapters with lora=none"
                )
            quantized.aware(model)

    def run_by_transformers(self) -> None:
        """Use transformers' own forward pass from now on, on the path that a short test run selects.

        This package's own layers read weights directly. The weights of sharded layers and of fp8 layers can be used
        only by calling the module that contains them, so these layers need transformers' own forward pass.
        """
        model, tokenizer, execution = self.model, self.tokenizer, self.execution
        words: Any = model.get_input_embeddings().weight
        ids = common_tokens(tokenizer, len(words))
        self._forward = TransformersForward(model, reads_segments(model.config, tokenizer))
        self._traits = measure(model, self._forward, ids, execution.ragged, family_of(model.config))
        self._forward.find_dropout(model, one_row(ids, words.device), self.path == "packed")
        if execution.checkpointing:
            self._forward.checkpoint_activations(model, self._traits.num_layers)

    def quantize(self, kind: str) -> None:
        """Switch the linear layers to 8 bits, for inference only.

        Args:
            kind: `int8` on a CPU, or `fp8` on CUDA. With fp8, layers run through transformers' own forward pass.

        Raises:
            ConfigError: The model has adapters, or the size of a layer is not supported by fp8 products.
        """
        if has_adapter(self.model):
            raise ConfigError(
                "inference.quantize: expected null with adapters, got a value; train with lora.merge=true"
            )
        if kind == "int8":
            quantized.to_int8(self.model)
            return
        if self._forward is None:
            self.run_by_transformers()
        quantized.to_fp8(self.model)

    @property
    def path(self) -> str:
        """The path of batches: `bert`, `distilbert`, `modernbert`, `packed`, `padded` or `by_length`."""
        return self._traits.path

    @property
    def ragged(self) -> bool:
        """Whether batches run without padding."""
        return self.path not in ("padded", "by_length")

    @property
    def by_transformers(self) -> bool:
        """Whether layers run through transformers' own forward pass."""
        return self._forward is not None

    @property
    def reads_segments(self) -> bool:
        """Whether states depend on segment ids."""
        return getattr(self.config, "type_vocab_size", 0) > 1 if self._forward is None else self._forward.reads_segments

    @property
    def why_float32(self) -> str:
        """Reason why the family does not run in half precision; empty if it does."""
        return family_of(self.config).why_float32

    @property
    def config(self) -> PretrainedConfig:
        """The transformers configuration."""
        return self.model.config

    @property
    def dim(self) -> int:
        """Size of a state."""
        return self._traits.dim

    @property
    def num_layers(self) -> int:
        """Number of transformer layers."""
        return self._traits.num_layers

    @property
    def max_tokens(self) -> int:
        """Number of tokens of the longest sequence for which the model has positions, special tokens included."""
        return max_positions(self.config, self.model)

    def drop_layers(self, rate: float) -> None:
        """In each training step, leave out every layer except the last one with this probability.

        Raises:
            ConfigError: The rate is out of range, or transformers runs the layers of the family.
        """
        if not 0 <= rate < 1:
            raise ConfigError(f"encoder.layer_drop: expected at least 0 and below 1, got {rate}")
        if rate and self._forward is not None:
            raise ConfigError(
                f"encoder.layer_drop: expected 0 where transformers runs the layers ({self.config.model_type}, path "
                f"{self.path}), got {rate}"
            )
        self.layer_drop = rate

    def make_first_token_global(self) -> None:
        """Let the first token and the other tokens of a row attend to each other, despite windows (Longformer)."""
        self._first_token_is_global = True
        for name, weight in self.model.named_parameters():
            if "_global." in name:
                weight.requires_grad_(True)

    def end_training(self) -> None:
        """Draw dropout seeds at random again, and free the memory of CUDA graphs."""
        self.dropout_seed, self._ragged_forward.graphs = None, Graphs()

    def _run(
        self,
        batch: TokenBatch,
        output: Output,
        prefixes: SharedPrefixes | None = None,
        begin: Begin | None = None,
        skipped: frozenset[int] = frozenset(),
    ) -> Iterator[Tensor]:
        """Yield the states of a forward pass (see `ForwardPass`), and add a training pass to `token_counts`."""
        self._log_path()
        if self._forward is None:
            if self.layer_drop and self.training:
                skipped = layers_to_skip(self.layer_drop, self.num_layers, draw_seed(self.dropout_seed))
            forward = self._ragged_forward(self.model, batch, output, self.training, self.dropout_seed, begin, skipped)
        else:
            every, weights = output in (Output.ALL_LAYERS, Output.ATTENTION), output is Output.ATTENTION
            request = Request(batch, every, self._mask_seed(), self._first_token_is_global, prefixes, weights)
            packs = batch.attended is None or self._traits.packs_unattended
            if self.path == "packed" and packs:
                forward = self._forward.packed(self.model, request, self.execution.compile)
            else:
                forward = self._forward.padded(self.model, request, 1.0 if self.path == "by_length" else NEAR)
        # a pass without gradients, such as the first pass of GradCache, is repeated later and counted then
        if self.training and torch.is_grad_enabled():
            self.token_counts.computed_tokens += forward.computed_tokens
            self.token_counts.last_layer_tokens += batch.num_rows if output is Output.FIRST_TOKENS else batch.num_tokens
        yield from forward.states

    def _mask_seed(self) -> int | None:
        """Return the seed of this pass's dropout masks; None if dropout is off."""
        dropouts = (module for module in self.model.modules() if isinstance(module, HashedDropout))
        if not any(module.p for module in dropouts if module.training):
            return None
        return int(torch.randint(2**62, ())) if self.dropout_seed is None else self.dropout_seed

    def _log_path(self) -> None:
        if not self._logged_path:
            self._logged_path = True
            if self._forward is not None:
                log.info("encoder: %s", self._traits.described(self.config.model_type))
