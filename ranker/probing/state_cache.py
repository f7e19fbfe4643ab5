"""The cache of hidden states: memory-mapped files [layers, tokens, dim], computed once for a subject and its texts.

The layer axis comes first, so that a probe, which reads one layer, loads the pages of this layer only. Two options make
a cache smaller. `tokens="spans"` stores only the tokens that probes read, with the same results. `dtype="int8"` stores
one byte per number, with nearly the same results.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock

from ranker.errors import ConfigError, DataError
from ranker.files.checksums import checksum, verify
from ranker.files.space import room_for
from ranker.probing.sequences import Sequences
from ranker.probing.state_readers import TensorStates
from ranker.probing.state_writer import STATES, StateRequest, StateWriter, file_size, file_sizes
from ranker.probing.subject import Subject
from ranker.training.run_writer import write_json

log = logging.getLogger(__name__)

FORMAT = 1
DTYPES = ("float16", "float32", "int8")
TOKENS = ("all", "spans")
SYNC_SECONDS = 20.0


class StateCache:
    """The folder of cached states, and how they are stored.

    Args:
        folder: Folder of all caches.
        dtype: `float16`, `float32`, or `int8` (with a scale for each token).
        max_bytes: Maximum bytes of the states of one subject and one set of pairs.
        max_tokens: Maximum tokens of a batch, padding included.
        tokens: Which tokens are stored: `all`, or `spans`; for `spans`, callers of `states` pass `token_mask`.
        sync_seconds: Seconds between two syncs, which limit the work that a kill can lose.

    Raises:
        ConfigError: An unknown `dtype` or `tokens`.
    """

    def __init__(
        self,
        folder: Path,
        dtype: str = "float16",
        max_bytes: float = 20e9,
        max_tokens: int = 8192,
        tokens: str = "all",
        sync_seconds: float = SYNC_SECONDS,
    ) -> None:
        for key, value, known in (("dtype", dtype, DTYPES), ("tokens", tokens, TOKENS)):
            if value not in known:
                raise ConfigError(f"cache.{key}: expected one of {', '.join(known)}; got {value!r}")
        self.folder, self.dtype, self.tokens = folder, dtype, tokens
        self.max_bytes, self.max_tokens, self.sync_seconds = max_bytes, max_tokens, sync_seconds

    def states(
        self,
        subject: Subject,
        sequences: Sequences,
        layers: Sequence[int],
        device: torch.device,
        token_mask: np.ndarray | None = None,
    ) -> TensorStates:
        """Map the cached states of some layers, in the order of `layers`; missing states are computed first.

        Args:
            subject: The encoders.
            sequences: Token sequences to encode.
            layers: Layers to store.
            device: Device to compute on.
            token_mask: True for the tokens to store, bool [tokens]; None: all. Other tokens are left out of the token
                axis.

        Raises:
            ConfigError: The states would take more than `max_bytes`, or more than the disk has.
            DataError: The cached files were damaged or changed, or a state is not finite.
        """
        request = StateRequest(subject, sequences, layers, token_mask)
        identity = self.identity(subject, sequences, layers, token_mask)
        digest = hashlib.blake2b(json.dumps(identity, sort_keys=True).encode(), digest_size=10).hexdigest()
        folder = self.folder / f"{subject.encoder.config.model_type}-{digest}"
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not (folder / "meta.json").is_file():
                with room_for(folder):
                    self._write(folder, identity, request, device)
        return self._open(folder, identity, request.shape)

    def identity(
        self, subject: Subject, sequences: Sequences, layers: Sequence[int], token_mask: np.ndarray | None = None
    ) -> dict[str, Any]:
        """Return everything that decides the states, as JSON values; for the arguments see `states`."""
        identity = {
            "format": FORMAT,
            "subject": subject.fingerprint,
            "sequences": sequences.fingerprint,
            "layers": list(layers),
            "dtype": self.dtype,
            "mode": "eval",
        }
        if token_mask is None:
            return identity
        return identity | {"kept": hashlib.blake2b(np.packbits(token_mask).tobytes(), digest_size=16).hexdigest()}

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
        for name, expected in file_sizes(self.dtype, shape).items():
            size = file_size(folder / name)
            if size != expected:
                raise DataError(
                    f"{folder / name}: expected {expected} bytes, got {size}; delete the folder, it is made anew"
                )
        verify(folder, meta.get("files", {}))  # files of an earlier version have no checksums
        return TensorStates.mapped(folder / STATES, self.dtype, shape)

    def _write(self, folder: Path, identity: dict[str, Any], request: StateRequest, device: torch.device) -> None:
        self._check_room(folder, request)
        started = time.monotonic()
        writer = StateWriter(folder, request, self.dtype, self.max_tokens, self.sync_seconds)
        writer.write(device)
        meta = {
            **identity,
            "shape": list(request.shape),
            "complete": True,
            "name": request.subject.name,
            "seconds": round(time.monotonic() - started, 3),
            "versions": {name: version(name) for name in ("torch", "transformers", "tokenizers", "numpy")},
            "files": {name: checksum(folder / name) for name in file_sizes(self.dtype, request.shape)},
        }
        write_json(folder / "meta.json", meta)
        writer.finish()

    def _check_room(self, folder: Path, request: StateRequest) -> None:
        """Log the size of the states, and compare it with the limit and the disk."""
        layers, tokens, dim = request.shape
        sizes = file_sizes(self.dtype, request.shape)
        size = sum(sizes.values())
        log.info(
            "%s: states of %d sequences (%d tokens) x %d layers x %d dimensions take %.2f GB in %s",
            request.subject.name, request.sequences.num_rows, tokens, layers, dim, size / 1e9, folder,
        )  # fmt: skip
        if size > self.max_bytes:
            raise ConfigError(
                f"cache.max_bytes: expected at most {self.max_bytes:.3g} bytes of states, got {size:.3g} bytes; "
                "lower max_pairs or max_doc_tokens, name fewer layers, set cache.dtype=int8 or cache.tokens=spans, "
                "or raise cache.max_bytes"
            )
        free = shutil.disk_usage(folder).free
        if size - sum(_disk_usage(folder / name) for name in sizes) > free:
            raise ConfigError(
                f"cache_dir: expected room for {size:.3g} bytes of states in {folder}, got {free:.3g} bytes free; "
                "set another cache_dir"
            )


def _disk_usage(path: Path) -> int:
    """Return the bytes that a file takes on disk, which may be less than its size."""
    return path.stat().st_blocks * 512 if path.is_file() else 0
