"""How an encoder computes: one object for all options of execution, so that none is lost where an encoder is built, saved or copied."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ranker.errors import ConfigError


@dataclass(frozen=True)
class Execution:
    """Options of execution; they change the speed, and the result by rounding only.

    Args:
        ragged: Run without padding where the family can; False takes transformers' own forward.
        compile: Compile layers on CUDA in half precision that are not `fused`; `auto` does it where the tools are
            available, True insists on them.
        attention: Kernel on CUDA in half precision: `short`, `library` or `auto` (short where it serves).
        fused: Run embeddings and layers through this package's kernels on CUDA in half precision; `auto` does it where
            they serve (Triton, GELU, rows that the short kernel takes), True insists on the first two.
        graphs: Replay training passes through these kernels as CUDA graphs; `auto` does it on one device, for
            micro-batches that are small enough to gain by it, True for all.

    Raises:
        ConfigError: A value that an option does not have.
    """

    ragged: bool = True
    compile: bool | str = "auto"
    attention: str = "auto"
    fused: bool | str = "auto"
    graphs: bool | str = "auto"

    def __post_init__(self) -> None:
        if self.ragged not in (True, False):
            raise ConfigError(f"encoder.ragged: expected true or false; got {self.ragged!r}")
        for key in ("compile", "fused", "graphs"):
            value = getattr(self, key)
            if value not in (True, False, "auto"):
                raise ConfigError(f"encoder.{key}: expected auto, true or false; got {value!r}")
        if self.attention not in ("auto", "short", "library"):
            raise ConfigError(f"encoder.attention: expected auto, short or library; got {self.attention!r}")

    @classmethod
    def of(cls, encoder: Mapping[str, Any]) -> Execution:
        """The options in the `encoder` node of a configuration; defaults for those that it lacks.

        >>> Execution.of({"name": "tiny", "graphs": False}).graphs, Execution.of({}).graphs
        (False, 'auto')
        """
        return cls(**{option.name: encoder[option.name] for option in fields(cls) if option.name in encoder})


DEFAULT = Execution()
