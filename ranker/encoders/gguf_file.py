"""Parse a GGUF file once. transformers would parse it three times: for configuration, tokenizer and weights."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

Load = TypeVar("Load", bound=Callable[..., Any])


@contextlib.contextmanager
def parsed_once() -> Iterator[None]:
    """Let all reads by transformers in the block share one `gguf.GGUFReader` per file: making one takes seconds.

    Raises:
        ImportError: The package gguf is not installed.
    """
    gguf: Any = importlib.import_module("gguf")
    reader = gguf.GGUFReader
    gguf.GGUFReader = functools.cache(reader)
    try:
        yield
    finally:
        gguf.GGUFReader = reader


def parses_once(load: Load) -> Load:
    """Decorate a function whose first argument may name a GGUF file: the call parses the file once."""

    @functools.wraps(load)
    def loaded(name: str, *arguments: Any, **options: Any) -> Any:
        with contextlib.ExitStack() as stack:
            if name.endswith(".gguf"):
                with contextlib.suppress(ImportError):  # transformers says what is missing
                    stack.enter_context(parsed_once())
            return load(name, *arguments, **options)

    return loaded  # type: ignore[return-value]
