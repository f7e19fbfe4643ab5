"""How an encoder computes. All options are in one object, so none is lost when an encoder is built, saved or copied."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ranker.errors import ConfigError


@dataclass(frozen=True)
class Execution:
    """Options that change how fast an encoder computes. Unless stated otherwise, they change results only by rounding.

    Args:
        ragged: Run without padding if the family can. False: run transformers' own forward pass over padded rows.
        compile: Compile layers on CUDA in half precision, unless they run `fused`. `auto`: if the tools are available;
            True: required.
        attention: Attention kernel on CUDA in half precision: `short` (this package's), `library` (torch's), or `auto`
            (short if it supports the sizes).
        fused: Run embeddings and layers through this package's kernels on CUDA in half precision. `auto`: if they
            support the batch (Triton, GELU, rows that the short kernel supports); True: Triton and GELU are required.
        graphs: Replay training passes through these kernels as CUDA graphs. `auto`: only for micro-batches small enough
            to gain from it; True: for all.
        checkpointing: Recompute the activations of each layer in the backward pass instead of storing them: a third
            more work for a fraction of the memory.
        share_prefix: For `LMReranker`: if the prompts of a query's docs begin with the same tokens, compute these
            tokens only once. Their dropout masks are then those of the query's first doc.
        quantize_aware: Round the weights and inputs of linear layers to int8 in each forward pass, as int8 inference
            does (`ranker.encoders.quantized`). This changes results by more than rounding in full precision.
        trust_remote_code: Whether to allow running code that comes with weights. Never read from a stored
            configuration.

    Raises:
        ConfigError: An option has an unknown value.
    """

    ragged: bool = True
    compile: bool | str = "auto"
    attention: str = "auto"
    fused: bool | str = "auto"
    graphs: bool | str = "auto"
    checkpointing: bool = False
    share_prefix: bool = False
    quantize_aware: bool = False
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        for key in ("ragged", "checkpointing", "share_prefix", "quantize_aware", "trust_remote_code"):
            if getattr(self, key) not in (True, False):
                raise ConfigError(f"encoder.{key}: expected true or false; got {getattr(self, key)!r}")
        for key in ("compile", "fused", "graphs"):
            value = getattr(self, key)
            if value not in (True, False, "auto"):
                raise ConfigError(f"encoder.{key}: expected auto, true or false; got {value!r}")
        if self.attention not in ("auto", "short", "library"):
            raise ConfigError(f"encoder.attention: expected auto, short or library; got {self.attention!r}")

    @classmethod
    def of(cls, encoder: Mapping[str, Any]) -> Execution:
        """Return the options in the `encoder` node of a configuration; missing options have their defaults.

        >>> Execution.of({"name": "tiny", "graphs": False}).graphs, Execution.of({}).graphs
        (False, 'auto')
        """
        return cls(**{option.name: encoder[option.name] for option in fields(cls) if option.name in encoder})


DEFAULT = Execution()
