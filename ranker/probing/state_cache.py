"""States of all layers, computed once: a memory-mapped file [layers, tokens, dim], resumable chunk by chunk.

Layer after layer, not token after token: a probe reads one layer, and then its pages are all it touches. A cache is as
large as its states in full, unless only the tokens of spans are kept (the same numbers come out) or each number is a
byte (nearly the same).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import time
import zlib
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
from ranker.files import checksum, verify
from ranker.probing.sequences import Sequences
from ranker.probing.states import SCALES, TensorStates, quantised
from ranker.probing.subject import Subject
from ranker.training.run_writer import write_json

log = logging.getLogger(__name__)

FORMAT = 1
DTYPES = {
    "float16": torch.float16,
    "float32": torch.float32,
    "int8": torch.float32,
}  # what is checked, and rounded if it is int8
TOKENS = ("all", "spans")
STATES = "states.bin"
AT_ONCE = 8  # chunks that are in memory at a time on a CPU
SYNC_SECONDS = 20.0  # work that a kill can undo


class StateCache:
    """Where states are kept, and how.

    Args:
        folder: Folder of all caches.
        dtype: `float16`, `float32`, or `int8` (one scale a token).
        max_bytes: Refuse to write more than this for one subject and set of pairs.
        max_tokens: Tokens of a batch, padding counted.
        tokens: `all`, or `spans`: whoever asks for states should name the tokens of its spans.
        sync_seconds: How often finished chunks are made safe.
    """

    def __init__(
        self, folder: Path, dtype: str = "float16", max_bytes: float = 20e9, max_tokens: int = 8192, tokens: str = "all",
        sync_seconds: float = SYNC_SECONDS,
    ) -> None:  # fmt: skip
        for key, value, known in (("dtype", dtype, tuple(DTYPES)), ("tokens", tokens, TOKENS)):
            if value not in known:
                raise ConfigError(f"cache.{key}: expected one of {', '.join(known)}; got {value!r}")
        self.folder, self.dtype, self.max_bytes, self.max_tokens, self.tokens = (
            folder,
            dtype,
            max_bytes,
            max_tokens,
            tokens,
        )
        self.sync_seconds = sync_seconds

    def states(
        self,
        subject: Subject,
        sequences: Sequences,
        layers: Sequence[int],
        device: torch.device,
        kept: np.ndarray | None = None,
    ) -> TensorStates:
        """Open the states of these layers, or compute what is missing: memory-mapped, in the order of `layers`.

        Args:
            subject: Whose.
            sequences: Of what.
            layers: Which.
            device: Where to compute.
            kept: True at the tokens whose states are wanted, bool [tokens]; None: all. The others are left out of the
                token axis.

        Raises:
            ConfigError: They would take more than `max_bytes`, or more than the disk has.
            DataError: The cached files are not those that were written.
        """
        identity = self.identity(subject, sequences, layers, kept)
        digest = hashlib.blake2b(json.dumps(identity, sort_keys=True).encode(), digest_size=10).hexdigest()
        folder = self.folder / f"{subject.encoder.config.model_type}-{digest}"
        folder.mkdir(parents=True, exist_ok=True)
        shape = (len(layers), sequences.num_tokens if kept is None else int(kept.sum()), subject.encoder.dim)
        with FileLock(f"{folder}.lock"):
            if not (folder / "meta.json").is_file():
                self._write(folder, identity, shape, subject, sequences, layers, device, kept)
        return self._open(folder, identity, shape)

    def identity(
        self, subject: Subject, sequences: Sequences, layers: Sequence[int], kept: np.ndarray | None = None
    ) -> dict[str, Any]:
        """Everything that the states depend on."""
        identity = {
            "format": FORMAT,
            "subject": subject.fingerprint,
            "sequences": sequences.fingerprint,
            "layers": list(layers),
            "dtype": self.dtype,
            "mode": "eval",
        }
        return (
            identity
            if kept is None
            else identity | {"kept": hashlib.blake2b(np.packbits(kept).tobytes(), digest_size=16).hexdigest()}
        )

    def _open(self, folder: Path, identity: dict[str, Any], shape: tuple[int, int, int]) -> TensorStates:
        try:
            meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
            if not isinstance(meta, dict) or not isinstance(meta.get("files", {}), dict):
                raise ValueError("no JSON object")
        except (OSError, ValueError) as error:
            raise DataError(
                f"{folder}: expected a readable meta.json, got {error}; delete the folder, it is made anew"
            ) from error
        for key, expected in {**identity, "shape": list(shape), "complete": True}.items():
            if meta.get(key) != expected:
                raise DataError(
                    f"{folder}: expected {key} {expected!r}, got {meta.get(key)!r}; delete the folder, it is made anew"
                )
        for name, expected in self._sizes(shape).items():
            size = _size(folder / name)
            if size != expected:
                raise DataError(
                    f"{folder / name}: expected {expected} bytes, got {size}; delete the folder, it is made anew"
                )
        verify(folder, meta.get("files", {}))  # an earlier version wrote no checksums
        return TensorStates.mapped(folder / STATES, self.dtype, shape)

    def _sizes(self, shape: tuple[int, int, int]) -> dict[str, int]:
        """Bytes of each file."""
        sizes = {STATES: int(np.prod(shape)) * np.dtype(self.dtype).itemsize}
        return sizes | {SCALES: 4 * shape[0] * shape[1]} if self.dtype == "int8" else sizes

    def _write(
        self, folder: Path, identity: dict[str, Any], shape: tuple[int, int, int], subject: Subject, sequences: Sequences,
        layers: Sequence[int], device: torch.device, kept: np.ndarray | None,
    ) -> None:  # fmt: skip
        sizes = self._sizes(shape)
        size, there = sum(sizes.values()), sum(_taken(folder / name) for name in sizes)
        log.info("%s: states of %d sequences x %d tokens in all x %d layers x %d take %.2f GB in %s",
                 subject.name, sequences.num_rows, shape[1], shape[0], shape[2], size / 1e9, folder)  # fmt: skip
        if size > self.max_bytes:
            raise ConfigError(
                f"cache.max_bytes: expected at most {self.max_bytes:.3g} bytes of states, these would take {size:.3g}; "
                "lower max_pairs or max_doc_tokens, name fewer layers, set cache.dtype=int8 or cache.tokens=spans, or raise cache.max_bytes"
            )
        free = shutil.disk_usage(folder).free
        if size - there > free:
            raise ConfigError(
                f"cache_dir: expected room for {size:.3g} bytes of states, got {free:.3g} bytes free; set another cache_dir"
            )
        chunks = sequences.chunks(self.max_tokens)
        whole = all(_size(folder / name) == expected for name, expected in sizes.items())
        done = self._progress(folder, chunks) if whole else 0
        if not done:  # of files that are gone
            (folder / "progress.json").unlink(missing_ok=True)
        mode: Any = "r+" if whole else "w+"
        files = [np.memmap(folder / STATES, dtype=self.dtype, mode=mode, shape=shape)]
        if self.dtype == "int8":
            files.append(np.memmap(folder / SCALES, dtype="float32", mode=mode, shape=shape[:2]))
        # where each row's kept tokens start on the files' axis
        starts = sequences.starts if kept is None else np.concatenate([[0], np.cumsum(kept)])[sequences.starts]
        encoders = [subject.frozen.to(device), subject.frozen_docs.to(device), subject.frozen.to(device)]
        started = synced = time.monotonic()

        def encode(chunk: tuple[int, int]) -> int:
            first, last = chunk
            own = slice(starts[first], starts[last])
            batch = sequences.batch(first, last).to(device)
            chosen = None
            if kept is not None:
                chosen = torch.from_numpy(kept[sequences.starts[first] : sequences.starts[last]].nonzero()[0]).to(
                    device
                )
            for layer, states in enumerate(encoders[sequences.kind(first)].layers(batch)):
                if layer in layers:
                    found = _checked(
                        (states if chosen is None else states[chosen]).to(DTYPES[self.dtype]), subject, layer
                    )
                    for file, part in zip(files, quantised(found) if self.dtype == "int8" else (found,), strict=True):
                        file[list(layers).index(layer), own] = part.cpu().numpy()
                if layer == max(layers):
                    break
            return int(starts[last])

        with _side_by_side(device) as run:
            for number, tokens in enumerate(run(encode, chunks[done:]), done + 1):
                if time.monotonic() - synced >= self.sync_seconds:
                    self._sync(folder, files, chunks, number)
                    synced = time.monotonic()
                    log.info("%s: states of %.0f%% of the tokens", subject.name, 100 * tokens / max(shape[1], 1))
        for file in files:
            file.flush()
        np.save(folder / "offsets.npy", starts)
        seconds = time.monotonic() - started
        write_json(
            folder / "meta.json",
            {**identity, "shape": list(shape), "complete": True, "name": subject.name, "seconds": round(seconds, 3),
             "versions": {name: version(name) for name in ("torch", "transformers", "tokenizers", "numpy")},
             "files": {name: checksum(folder / name) for name in sizes}},
        )  # fmt: skip
        (folder / "progress.json").unlink(missing_ok=True)

    def _sync(self, folder: Path, files: list[np.memmap], chunks: list[tuple[int, int]], done: int) -> None:
        for file in files:  # the states first: a note of chunks that a crash lost would be believed
            file.flush()
        noted = {"chunks": len(chunks), "max_tokens": self.max_tokens, "done": done, "process": os.getpid()}
        write_json(folder / "progress.json", {**noted, "crc32": _crc(noted)})

    def _progress(self, folder: Path, chunks: list[tuple[int, int]]) -> int:
        """Chunks that a killed run finished, cut the same way."""
        try:
            noted = json.loads((folder / "progress.json").read_text(encoding="utf-8"))
            if noted.pop("crc32") != _crc(noted):
                raise ValueError
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            return 0
        same = noted.get("chunks") == len(chunks) and noted.get("max_tokens") == self.max_tokens
        if same and noted["done"]:
            log.info("%s: going on after %d of %d chunks", folder, noted["done"], len(chunks))
        return int(noted["done"]) if same else 0


def _crc(noted: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(noted, sort_keys=True).encode())


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _taken(path: Path) -> int:
    """Bytes on the disk: the files have their full size at once, and fill up."""
    return path.stat().st_blocks * 512 if path.is_file() else 0


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
