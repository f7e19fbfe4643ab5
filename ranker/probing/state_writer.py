"""Encode sequences and write the states of all layers to files. A killed run resumes after the last sync."""

from __future__ import annotations

import json
import logging
import os
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ranker.errors import DataError
from ranker.files.space import reserve
from ranker.probing.sequences import Sequences
from ranker.probing.state_readers import SCALES, quantised
from ranker.probing.subject import Subject
from ranker.training.run_writer import write_json

log = logging.getLogger(__name__)

STATES = "states.bin"
COMPUTED = {"float16": torch.float16, "float32": torch.float32, "int8": torch.float32}  # before quantisation
CPU_CHUNKS = 8  # maximum number of chunks in memory at a time on a CPU

Chunk = tuple[int, int]  # first row, and one past the last row


@dataclass(frozen=True)
class StateRequest:
    """The states to compute.

    Args:
        subject: The encoders.
        sequences: Token sequences to encode.
        layers: Layers to store, in this order.
        token_mask: True for the tokens to store, bool [tokens of all sequences]; None: all. Other tokens are left out
            of the token axis.
    """

    subject: Subject
    sequences: Sequences
    layers: Sequence[int]
    token_mask: np.ndarray | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Layers, tokens, dim."""
        mask = self.token_mask
        tokens = self.sequences.num_tokens if mask is None else int(mask.sum())
        return len(self.layers), tokens, self.subject.encoder.dim

    def row_starts(self) -> np.ndarray:
        """First stored token of each row on the files' token axis, int64 [rows + 1]."""
        starts, mask = self.sequences.starts, self.token_mask
        return starts if mask is None else np.concatenate([[0], np.cumsum(mask)])[starts]


def file_sizes(dtype: str, shape: tuple[int, int, int]) -> dict[str, int]:
    """Return the bytes of each file of states.

    Args:
        dtype: `float16`, `float32` or `int8`.
        shape: Layers, tokens, dim.
    """
    sizes = {STATES: int(np.prod(shape)) * np.dtype(dtype).itemsize}
    return sizes | {SCALES: 4 * shape[0] * shape[1]} if dtype == "int8" else sizes


def file_size(path: Path) -> int:
    """Return the size of a file in bytes; 0 if the file is missing."""
    return path.stat().st_size if path.is_file() else 0


class StateWriter:
    """Writes the files of a request.

    Args:
        folder: An existing folder.
        request: The states to compute.
        dtype: `float16`, `float32` or `int8`.
        max_tokens: Maximum tokens of a batch, padding included.
        sync_seconds: Seconds between two syncs, which limit the work that a kill can lose.
    """

    def __init__(self, folder: Path, request: StateRequest, dtype: str, max_tokens: int, sync_seconds: float) -> None:
        self.folder, self.request, self.dtype = folder, request, dtype
        self.max_tokens, self.sync_seconds = max_tokens, sync_seconds
        self.chunks = request.sequences.chunks(max_tokens)
        self._starts = request.row_starts()
        self._files: list[np.memmap] = []

    def write(self, device: torch.device) -> None:
        """Encode all chunks that are not on disk yet, then write `offsets.npy` with the first token of each row.

        Raises:
            DataError: A state is not finite.
        """
        subject, num_tokens = self.request.subject, self.request.shape[1]
        done = self._open()
        encoders = [subject.frozen.to(device), subject.frozen_docs.to(device), subject.frozen.to(device)]
        synced = time.monotonic()

        def encode(chunk: Chunk) -> int:
            states = encoders[self.request.sequences.row_type(chunk[0])].layers
            return self._encode(chunk, states, device)

        with _concurrent_map(device) as run:
            for number, tokens in enumerate(run(encode, self.chunks[done:]), done + 1):
                if time.monotonic() - synced >= self.sync_seconds:
                    self._sync(number)
                    synced = time.monotonic()
                    log.info("%s: states of %.0f%% of the tokens", subject.name, 100 * tokens / max(num_tokens, 1))
        for file in self._files:
            file.flush()
        np.save(self.folder / "offsets.npy", self._starts)

    def finish(self) -> None:
        """Remove the record of progress, when the folder is complete."""
        (self.folder / "progress.json").unlink(missing_ok=True)

    def _open(self) -> int:
        """Map the files, which are created if missing; return the number of chunks that an earlier run has finished."""
        shape = self.request.shape
        sizes = file_sizes(self.dtype, shape)
        complete = all(file_size(self.folder / name) == size for name, size in sizes.items())
        done = self._finished_chunks() if complete else 0
        if not done:  # remove the record of files that are gone
            (self.folder / "progress.json").unlink(missing_ok=True)
        if not complete:
            for name, size in sizes.items():
                reserve(self.folder / name, size)
        self._files = [np.memmap(self.folder / STATES, dtype=self.dtype, mode="r+", shape=shape)]
        if self.dtype == "int8":
            self._files.append(np.memmap(self.folder / SCALES, dtype="float32", mode="r+", shape=shape[:2]))
        return done

    def _encode(self, chunk: Chunk, encoder: Callable[..., Iterable[Tensor]], device: torch.device) -> int:
        """Encode a chunk and write its states; return the number of stored tokens up to the chunk's end."""
        first, last = chunk
        sequences, layers, mask = self.request.sequences, list(self.request.layers), self.request.token_mask
        stored = slice(self._starts[first], self._starts[last])
        chosen = None
        if mask is not None:
            indices = mask[sequences.starts[first] : sequences.starts[last]].nonzero()[0]
            chosen = torch.from_numpy(indices).to(device)
        for layer, states in enumerate(encoder(sequences.batch(first, last).to(device))):
            if layer in layers:
                computed = (states if chosen is None else states[chosen]).to(COMPUTED[self.dtype])
                _check_finite(computed, self.request.subject, layer)
                parts = quantised(computed) if self.dtype == "int8" else (computed,)
                for file, part in zip(self._files, parts, strict=True):
                    file[layers.index(layer), stored] = part.cpu().numpy()
            if layer == max(layers):
                break
        return int(self._starts[last])

    def _sync(self, done: int) -> None:
        for file in self._files:  # flush first, because the record must not count chunks that a crash can lose
            file.flush()
        record = {"chunks": len(self.chunks), "max_tokens": self.max_tokens, "done": done, "process": os.getpid()}
        write_json(self.folder / "progress.json", {**record, "crc32": _crc(record)})

    def _finished_chunks(self) -> int:
        """Return the number of chunks that a killed run has finished; 0 if that run had other chunks."""
        try:
            record = json.loads((self.folder / "progress.json").read_text(encoding="utf-8"))
            if record.pop("crc32") != _crc(record):
                raise ValueError
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            return 0
        same = record.get("chunks") == len(self.chunks) and record.get("max_tokens") == self.max_tokens
        if same and record["done"]:
            log.info("%s: continuing after %d of %d chunks", self.folder, record["done"], len(self.chunks))
        return int(record["done"]) if same else 0


def _crc(record: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(record, sort_keys=True).encode())


@contextmanager
def _concurrent_map(device: torch.device) -> Iterator[Callable[..., Iterable[int]]]:
    """Yield a `map`, which on a CPU runs up to `CPU_CHUNKS` chunks at a time, with equal shares of the threads.

    This is a third faster than one chunk at a time with all threads.
    """
    threads = torch.get_num_threads()
    if device.type != "cpu" or threads == 1:
        yield map
        return
    concurrent = min(threads, CPU_CHUNKS)
    torch.set_num_threads(threads // concurrent)
    pool = ThreadPoolExecutor(concurrent)
    try:
        yield pool.map
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)


def _check_finite(states: Tensor, subject: Subject, layer: int) -> None:
    if not torch.isfinite(states).all():
        raise DataError(
            f"{subject.name}: expected finite states, got inf or NaN in layer {layer} as {states.dtype}; "
            "set cache.dtype=float32"
        )
