"""Token stores: texts are tokenized once into memory-mapped files. A collator copies slices of these files.

A store is a folder of flat little-endian arrays: `tokens.bin`, `offsets.bin` (row r is `tokens[offsets[r]:offsets[r +
1]]`), `ids.bin` (UTF-8, fixed width), `order.bin` (the rows sorted by id) and `meta.json`. A store contains no special
tokens; the template of a row adds them. See docs/token_store.md.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from filelock import FileLock, Timeout

from ranker.data.text_encoder import tokenizer_fingerprint
from ranker.data.token_writer import FORMAT, map_array, write_store
from ranker.errors import DataError
from ranker.files import checksums
from ranker.files.space import room_for

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

log = logging.getLogger(__name__)

DTYPES = ("<u2", "<i4")
FILES = ("tokens.bin", "offsets.bin", "ids.bin", "order.bin")
STORE_NAME = re.compile(r"[a-zA-Z0-9_-]+-[0-9a-f]{20}")  # name of a cached store's folder


class TokenStore:
    """A finished store, for reading. Pickling is cheap, because a worker maps the same files again.

    Attributes:
        tokens: Token ids of all texts, uint16 or int32 [tokens], memory-mapped.
        offsets: Start of each row, int64 [rows + 1], memory-mapped.
        lengths: Number of tokens of each row, int32 [rows].
        meta: Counts, fingerprints, versions, sizes and checksums of the files.
    """

    def __init__(self, folder: Path, meta: dict[str, Any]) -> None:
        self.folder, self.meta = folder, meta
        self.tokens = map_array(folder / "tokens.bin", meta["dtype"])
        self.offsets = map_array(folder / "offsets.bin", "<i8")
        self.lengths = np.diff(self.offsets).astype(np.int32)
        self._ids = map_array(folder / "ids.bin", f"S{meta['id_bytes']}")
        self._order = map_array(folder / "order.bin", "<i8")

    @classmethod
    def open(cls, folder: Path, verify: bool = False) -> Self:
        """Map the store in `folder`; with `verify`, also read every byte and compare the checksums.

        Raises:
            DataError: The store is missing, unfinished, of another format, truncated or (with `verify`) damaged.
        """
        if not (folder / "meta.json").is_file():
            raise _damaged(
                folder, "a finished token store", "a folder without meta.json" if folder.exists() else "no such folder"
            )
        try:
            meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
            if meta["format"] != FORMAT:
                raise _damaged(folder, f"a token store of format {FORMAT}", repr(meta["format"]))
            if meta["dtype"] not in DTYPES or meta["files"].keys() != set(FILES):
                raise _damaged(
                    folder, f"a token store's meta.json with dtype {' or '.join(DTYPES)}", f"{meta['dtype']!r}"
                )
            if verify:
                checksums.verify(folder, meta["files"])
            for name, expected in meta["files"].items():
                if (folder / name).stat().st_size != expected["bytes"]:
                    raise _damaged(folder / name, f"{expected['bytes']} bytes", str((folder / name).stat().st_size))
            store = cls(folder, meta)
            counts = {len(store), len(store._ids), len(store._order), meta["num_texts"]}
            fits = (
                len(counts) == 1
                and store.offsets[0] == 0
                and store.offsets[-1] == len(store.tokens) == meta["num_tokens"]
            )
            if not fits or (len(store) and not 0 <= store.lengths.min() <= store.lengths.max() <= meta["max_tokens"]):
                raise _damaged(
                    folder,
                    "files of the same texts and tokens, with rows of 0 to max_tokens tokens",
                    f"counts {sorted(counts)}",
                )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as fault:
            raise _damaged(folder, "readable files", f"{type(fault).__name__} {fault}") from fault
        return store

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickle the folder only, because a pickled memory map would have all tokens
        return TokenStore.open, (self.folder,)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        """Return the token ids of a row, without special tokens, as a view [tokens]."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        return self.tokens[self.offsets[row] : self.offsets[row + 1]]

    def ids(self) -> np.ndarray:
        """Return the id of each row, UTF-8 in a fixed-width bytes array [rows], memory-mapped."""
        return self._ids

    def rows(self, ids: Iterable[str] | np.ndarray) -> np.ndarray:
        """Return the rows of text ids, int64 [ids].

        Args:
            ids: Strings, or an array of UTF-8 bytes like `Candidates.doc_ids`.

        Raises:
            DataError: An id is not in the store; the message names the first such id.
        """
        rows, ids = self._look_up(ids)
        if (rows < 0).any():
            unknown = ids[int(np.argmax(rows < 0))].decode(errors="replace")
            raise DataError(
                f"{self.folder.name}: expected ids of the {len(self)} texts in this store, got {unknown!r}; take ids "
                "and texts from the same collection"
            )
        return rows

    def find(self, ids: Iterable[str] | np.ndarray) -> np.ndarray:
        """Return the rows of text ids, int64 [ids]; -1 for an id that is not in the store."""
        return self._look_up(ids)[0]

    def _look_up(self, ids: Iterable[str] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows of ids, -1 where unknown, int64 [ids], and the ids as bytes [ids]."""
        if not (isinstance(ids, np.ndarray) and ids.dtype.kind == "S"):
            ids = np.array([str(text_id).encode("utf-8", "surrogatepass") for text_id in ids], dtype=np.bytes_)
        # NumPy compares arrays of the same width, and would widen the whole index for longer ids. So longer ids are cut
        # here, and `known` below excludes them.
        wanted = ids.astype(self._ids.dtype)
        if not len(self):
            return np.full(len(ids), -1, dtype=np.int64), ids
        rows = np.zeros(len(ids), dtype=np.int64)
        # Ids are sorted first, because searches for neighbouring ids read the same memory: six times faster at 8.8
        # million rows
        by_id = np.argsort(wanted, kind="stable")
        ranks = np.searchsorted(self._ids, wanted[by_id], sorter=self._order)
        rows[by_id] = self._order[np.minimum(ranks, len(self) - 1)]
        known = (wanted == ids) & (self._ids[rows] == wanted)
        return np.where(known, rows, -1), ids


def token_store(
    cache_dir: Path,
    name: str,
    texts_factory: Callable[[], Iterable[tuple[str, str]]],
    fingerprint: str,
    tokenizer: PreTrainedTokenizerFast,
    max_tokens: int,
) -> TokenStore:
    """Open the cached store of these texts, tokenizer and length, or build it; other processes wait for the build.

    Args:
        cache_dir: Folder of all stores; created if missing.
        name: First part of the store's folder name; the rest is a hash of the other arguments.
        texts_factory: Returns (id, text) pairs; called only for a build.
        fingerprint: A string that changes if an id or a text changes.
        tokenizer: A fast tokenizer; not modified.
        max_tokens: Longer texts keep their first `max_tokens` tokens.

    Raises:
        ConfigError: The tokenizer is not a fast one, or `max_tokens` is not positive.
        DataError: The cached store is damaged, or the texts are invalid (see `build_token_store`).
    """
    key = json.dumps([FORMAT, fingerprint, tokenizer_fingerprint(tokenizer), max_tokens])
    digest = hashlib.blake2b(key.encode(), digest_size=10).hexdigest()
    folder = cache_dir / f"{re.sub('[^a-zA-Z0-9_-]+', '_', name)}-{digest}"
    if not folder.exists():
        with _locked(folder):
            if not folder.exists():
                return _build(texts_factory(), folder, tokenizer, max_tokens, fingerprint)
    return TokenStore.open(folder, verify=True)


def build_token_store(
    texts: Iterable[tuple[str, str]],
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    max_tokens: int,
    *,
    fingerprint: str,
    chunk: int = 1024,
) -> TokenStore:
    """Tokenize `texts` into a new store at `folder`.

    Args:
        texts: (id, text) pairs, read once. Memory does not grow with their number, except for 12 bytes per id during
            the sorting of ids.
        folder: Folder of the store. It appears when the store is finished.
        tokenizer: A fast tokenizer; not modified.
        max_tokens: Longer texts keep their first `max_tokens` tokens.
        fingerprint: Identity of the texts, stored in `meta.json`.
        chunk: Number of texts that a thread tokenizes at a time.

    Raises:
        ConfigError: The tokenizer is not a fast one, or `max_tokens` is not positive.
        DataError: The folder exists; or an id is a duplicate, not a string, too long or contains a NUL; or a text is
            not a string.
    """
    with _locked(folder):
        if folder.exists():
            raise DataError(f"{folder}: expected no such folder before the build, got one; delete it or choose another")
        return _build(texts, folder, tokenizer, max_tokens, fingerprint, chunk)


def _build(
    texts: Iterable[tuple[str, str]],
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    max_tokens: int,
    fingerprint: str,
    chunk: int = 1024,
) -> TokenStore:
    """Build in a temporary folder, which is renamed to `folder` at the end; the caller holds the lock."""
    temp = _temp(folder)
    with room_for(folder):
        temp.mkdir()
        try:
            write_store(texts, temp, tokenizer, max_tokens, fingerprint, chunk)
            temp.replace(folder)
        except BaseException:
            shutil.rmtree(temp, ignore_errors=True)
            raise
    store = TokenStore.open(folder)
    log.info("%s: %d texts, %d tokens in %.1f s", folder, len(store), len(store.tokens), store.meta["seconds"])
    return store


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the build lock of `folder`; first remove the remains of stores that killed processes were building."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(f"{folder}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        log.info("%s: another process builds it; waiting", folder)
        lock.acquire()
    try:
        for leftover in folder.parent.glob("*.building"):
            if leftover == _temp(folder):
                shutil.rmtree(leftover)
                continue
            if not STORE_NAME.fullmatch(leftover.stem):  # the user may keep other files in the cache folder
                continue
            try:
                with FileLock(leftover.with_suffix(".lock"), timeout=0):
                    shutil.rmtree(leftover, ignore_errors=True)
            except Timeout:
                continue  # the process that builds this store is alive
        yield
    finally:
        lock.release()


def _temp(folder: Path) -> Path:
    """Return the temporary folder in which a store is built."""
    return folder.with_name(f"{folder.name}.building")


def _damaged(path: Path, expected: str, got: str) -> DataError:
    return DataError(
        f"{path}: expected {expected}, got {got}; delete {path if path.is_dir() else path.parent}, it is built anew"
    )
