"""States of all layers, computed once: a memory-mapped file [layers, tokens, dim], resumable chunk by chunk.

Layer after layer, not token after token: a probe reads one layer, and then its pages are all it touches.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor

from ranker.errors import ConfigError, DataError
from ranker.probing.sequences import Sequences
from ranker.probing.states import TensorStates
from ranker.probing.subject import Subject
from ranker.training.run_writer import write_json

log = logging.getLogger(__name__)

FORMAT = 1
DTYPES = {"float16": torch.float16, "float32": torch.float32}
AT_ONCE = 8  # chunks that are in memory at a time on a CPU
SYNC_SECONDS = 20.0  # work that a kill can undo


class StateCache:
    """Where states are kept, and how.

    Args:
        folder: Folder of all caches.
        dtype: `float16` or `float32`.
        max_bytes: Refuse to write more than this for one subject and set of pairs.
        max_tokens: Tokens of a batch, padding counted.
        sync_seconds: How often finished chunks are made safe.
    """

    def __init__(
        self, folder: Path, dtype: str = "float16", max_bytes: float = 20e9, max_tokens: int = 8192, sync_seconds: float = SYNC_SECONDS
    ) -> None:
        if dtype not in DTYPES:
            raise ConfigError(f"cache.dtype: expected one of {', '.join(DTYPES)}; got {dtype!r}")
        self.folder, self.dtype, self.max_bytes, self.max_tokens, self.sync_seconds = folder, dtype, max_bytes, max_tokens, sync_seconds

    def states(self, subject: Subject, sequences: Sequences, layers: Sequence[int], device: torch.device) -> TensorStates:
        """Open the states of these layers, or compute what is missing: memory-mapped, in the order of `layers`.

        Raises:
            ConfigError: They would take more than `max_bytes`, or more than the disk has.
            DataError: The cached files are not those that were written.
        """
        identity = self.identity(subject, sequences, layers)
        digest = hashlib.blake2b(json.dumps(identity, sort_keys=True).encode(), digest_size=10).hexdigest()
        folder = self.folder / f"{subject.encoder.config.model_type}-{digest}"
        folder.mkdir(parents=True, exist_ok=True)
        shape = (len(layers), sequences.num_tokens, subject.encoder.dim)
        with FileLock(f"{folder}.lock"):
            if not (folder / "meta.json").is_file():
                self._write(folder, identity, shape, subject, sequences, layers, device)
        return self._open(folder, identity, shape)

    def identity(self, subject: Subject, sequences: Sequences, layers: Sequence[int]) -> dict[str, Any]:
        """Everything that the states depend on."""
        return {
            "format": FORMAT, "subject": subject.fingerprint, "sequences": sequences.fingerprint, "layers": list(layers), "dtype": self.dtype,
            "mode": "eval",
        }  # fmt: skip

    def _open(self, folder: Path, identity: dict[str, Any], shape: tuple[int, int, int]) -> TensorStates:
        try:
            meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(f"{folder}: expected a readable meta.json, got {error}; delete the folder, it is made anew") from error
        for key, expected in {**identity, "shape": list(shape), "complete": True}.items():
            if meta.get(key) != expected:
                raise DataError(f"{folder}: expected {key} {expected!r}, got {meta.get(key)!r}; delete the folder, it is made anew")
        path = folder / "states.bin"
        size = path.stat().st_size if path.is_file() else 0
        if size != self._bytes(shape):
            raise DataError(f"{path}: expected {self._bytes(shape)} bytes, got {size}; delete the folder, it is made anew")
        return TensorStates.mapped(path, self.dtype, shape)

    def _bytes(self, shape: tuple[int, int, int]) -> int:
        return int(np.prod(shape)) * np.dtype(self.dtype).itemsize

    def _write(
        self, folder: Path, identity: dict[str, Any], shape: tuple[int, int, int], subject: Subject, sequences: Sequences,
        layers: Sequence[int], device: torch.device,
    ) -> None:  # fmt: skip
        size = self._bytes(shape)
        path = folder / "states.bin"
        log.info("%s: states of %d sequences x %d tokens in all x %d layers x %d take %.2f GB in %s",
                 subject.name, sequences.num_rows, shape[1], shape[0], shape[2], size / 1e9, folder)  # fmt: skip
        if size > self.max_bytes:
            raise ConfigError(
                f"cache.max_bytes: expected at most {self.max_bytes:.3g} bytes of states, these would take {size:.3g}; "
                "lower max_pairs or max_doc_tokens, name fewer layers, or raise cache.max_bytes"
            )
        there = path.stat().st_size if path.is_file() else 0
        free = shutil.disk_usage(folder).free
        if size - there > free:
            raise ConfigError(f"cache_dir: expected room for {size:.3g} bytes of states, got {free:.3g} bytes free; set another cache_dir")
        chunks = sequences.chunks(self.max_tokens)
        done = self._progress(folder, chunks) if there == size else 0
        file = np.memmap(path, dtype=self.dtype, mode="r+" if there == size else "w+", shape=shape)
        encoders = [subject.frozen.to(device), subject.frozen_docs.to(device), subject.frozen.to(device)]
        started = synced = time.monotonic()

        def encode(chunk: tuple[int, int]) -> int:
            first, last = chunk
            own = slice(sequences.starts[first], sequences.starts[last])
            batch = sequences.batch(first, last).to(device)
            for layer, states in enumerate(encoders[sequences.kind(first)].layers(batch)):
                if layer in layers:
                    file[list(layers).index(layer), own] = _checked(states.to(DTYPES[self.dtype]), subject, layer).cpu().numpy()
                if layer == max(layers):
                    break
            return int(sequences.starts[last])

        with _side_by_side(device) as run:
            for number, tokens in enumerate(run(encode, chunks[done:]), done + 1):
                if time.monotonic() - synced >= self.sync_seconds:
                    self._sync(folder, file, chunks, number)
                    synced = time.monotonic()
                    log.info("%s: states of %.0f%% of the tokens", subject.name, 100 * tokens / shape[1])
        file.flush()
        seconds = time.monotonic() - started
        write_json(
            folder / "meta.json",
            {**identity, "shape": list(shape), "complete": True, "name": subject.name, "seconds": round(seconds, 3),
             "versions": {name: version(name) for name in ("torch", "transformers", "tokenizers", "numpy")}},
        )  # fmt: skip
        np.save(folder / "offsets.npy", sequences.starts)
        (folder / "progress.json").unlink(missing_ok=True)

    def _sync(self, folder: Path, file: np.memmap, chunks: list[tuple[int, int]], done: int) -> None:
        file.flush()  # the states first: a note of chunks that a crash lost would be believed
        write_json(folder / "progress.json", {"chunks": len(chunks), "max_tokens": self.max_tokens, "done": done, "process": os.getpid()})

    def _progress(self, folder: Path, chunks: list[tuple[int, int]]) -> int:
        """Chunks that a killed run finished, cut the same way."""
        try:
            noted = json.loads((folder / "progress.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return 0
        same = noted.get("chunks") == len(chunks) and noted.get("max_tokens") == self.max_tokens
        if same and noted["done"]:
            log.info("%s: going on after %d of %d chunks", folder, noted["done"], len(chunks))
        return int(noted["done"]) if same else 0


@contextmanager
def _side_by_side(device: torch.device) -> Iterator[Callable[..., Iterable[int]]]:
    """A `map`; on a CPU over chunks side by side, a thread each (or more, past `AT_ONCE`): a third faster than all on one chunk."""
    threads = torch.get_num_threads()
    if device.type != "cpu" or threads == 1:
        yield map
        return
    at_once = min(threads, AT_ONCE)
    torch.set_num_threads(threads // at_once)
    pool = ThreadPoolExecutor(at_once)
    try:
        yield pool.map
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)


def _checked(states: Tensor, subject: Subject, layer: int) -> Tensor:
    if not torch.isfinite(states).all():
        raise DataError(
            f"{subject.name}: expected finite states, got inf or NaN in layer {layer} as {states.dtype}; set cache.dtype=float32"
        )
    return states
