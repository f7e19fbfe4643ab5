"""Parse a GGUF file once. transformers would parse it for the configuration, the tokenizer and the weights."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

Load = TypeVar("Load", bound=Callable[..., Any])


@contextlib.contextmanager
def parsed_once() -> Iterator[None]:
    """Let all reads by transformers in the block share a file's `gguf.GGUFReader` and metadata: each takes seconds.

    Raises:
        ImportError: The package gguf is not installed.
    """
    gguf: Any = importlib.import_module("gguf")
    files: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
    reader, load = gguf.GGUFReader, files.load_gguf_checkpoint
    metadata = functools.cache(load)

    def loaded(path: Any, return_tensors: bool = False, **options: Any) -> dict[str, Any]:
        if return_tensors or options:
            return load(path, return_tensors=return_tensors, **options)
        return copy.deepcopy(metadata(path))

    gguf.GGUFReader, files.load_gguf_checkpoint = functools.cache(reader), loaded
    try:
        yield
    finally:
        gguf.GGUFReader, files.load_gguf_checkpoint = reader, load


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
