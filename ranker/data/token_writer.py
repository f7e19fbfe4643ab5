"""Write the files of a token store: threads tokenize chunks of texts in bounded memory (docs/token_store.md)."""

from __future__ import annotations

import json
import logging
import os
import re
import time
import zlib
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np

from ranker.data.text_encoder import Encoded, TextEncoder, tokenizer_fingerprint
from ranker.errors import DataError
from ranker.processes import available_cores

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

log = logging.getLogger(__name__)

FORMAT = 1  # increase this number when the files change; stores with another format are neither read nor changed
MAX_ID_BYTES = 512  # every id takes the space of the longest id, so one very long id could fill the disk
MAX_CHUNK_CHARS = 1_000_000  # limit of a chunk of long texts: a token takes about 100 bytes while it is processed
MAX_THREADS = 32  # more threads are not faster, because of the interpreter lock, and each thread has a chunk in memory
BLOCK = 1 << 20  # number of ids that are compared at a time, to bound memory
LOG_SECONDS = 30
MANY_UNKNOWN = 0.1  # share of unknown tokens above which a warning is logged
MOST_UNKNOWN = 0.5  # share of unknown tokens above which the build fails
FEW_TOKENS = 1000  # with fewer tokens, the shares may be due to chance, so they are not checked
BAD_ID = re.compile("[\0\ud800-\udfff]")  # NumPy's bytes end at a NUL; UTF-8 has no surrogates


def write_store(
    texts: Iterable[tuple[str, str]],
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    max_tokens: int,
    fingerprint: str,
    chunk: int,
) -> None:
    """Write all files of a store into the empty `folder`, `meta.json` last.

    Args:
        texts: (id, text) pairs.
        folder: An empty folder.
        tokenizer: A fast tokenizer; not modified.
        max_tokens: Longer texts keep their first `max_tokens` tokens.
        fingerprint: Identity of the texts.
        chunk: Number of texts that a thread tokenizes at a time.

    Raises:
        ConfigError: See `TextEncoder`.
        DataError: An id is a duplicate, not a string, too long or contains a NUL; or a text is not a string; or most
            tokens are unknown.
    """
    encoder = TextEncoder(tokenizer, max_tokens)
    started = time.monotonic()
    next_log = started + LOG_SECONDS
    widths: list[tuple[int, int]] = []  # of each chunk: number of ids, and bytes per id
    rows = ends = unknown = 0
    with (
        _Writer(folder / "tokens.bin") as tokens,
        _Writer(folder / "offsets.bin") as offsets,
        _Writer(folder / "ids.raw") as raw_ids,
    ):
        offsets.write(np.zeros(1, dtype="<i8"))
        with closing(_encoded(_chunks(texts, chunk), encoder)) as chunks:
            for ids, (lengths, chunk_tokens) in chunks:
                raw_ids.write(ids)
                widths.append((len(ids), ids.dtype.itemsize))
                tokens.write(chunk_tokens)
                offsets.write((ends + np.cumsum(lengths)).astype("<i8"))
                rows, ends = rows + len(ids), ends + len(chunk_tokens)
                unknown += int((chunk_tokens == encoder.unknown).sum())
                if time.monotonic() >= next_log:
                    next_log += LOG_SECONDS
                    log.info(
                        "%s: %d texts tokenized, %.0f a second", folder.stem, rows, rows / (time.monotonic() - started)
                    )
        files = {"tokens.bin": tokens.finish(), "offsets.bin": offsets.finish()}
        raw_ids.finish()
    _check_known(folder, tokenizer, unknown, ends)
    id_bytes = max((width for _, width in widths), default=1)
    files |= _index_ids(folder, widths, id_bytes)
    meta = {
        "format": FORMAT,
        "num_texts": rows,
        "num_tokens": ends,
        "max_tokens": max_tokens,
        "dtype": encoder.dtype.str,
        "id_bytes": id_bytes,
        "texts": fingerprint,
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "tokenizer_name": str(tokenizer.name_or_path),
        "versions": {name: version(name) for name in ("tokenizers", "transformers", "numpy")},
        "seconds": round(time.monotonic() - started, 3),
        "files": files,
    }
    with _Writer(folder / "meta.json") as meta_file:
        meta_file.write(np.frombuffer(json.dumps(meta, indent=1).encode(), dtype=np.uint8))
        meta_file.finish()


def _check_known(folder: Path, tokenizer: PreTrainedTokenizerFast, unknown: int, total: int) -> None:
    """Warn if a large share of the tokens is unknown to the tokenizer; refuse an even larger share."""
    if total < FEW_TOKENS or unknown <= MANY_UNKNOWN * total:
        return
    what = f"{unknown / total:.0%} of {total} tokens are {tokenizer.unk_token}"
    if unknown > MOST_UNKNOWN * total:
        raise DataError(
            f"{folder.stem}: expected a tokenizer that knows the words of these texts, but {what}; take an encoder of "
            "their language and script"
        )
    log.warning("%s: %s, so the model can't tell these words apart", folder.stem, what)


def map_array(path: Path, dtype: str) -> np.ndarray:
    """Map a flat array from a file, read-only."""
    # Slices of a plain view cost less than slices of np.memmap; an empty file can't be mapped
    return np.memmap(path, dtype=dtype, mode="r").view(np.ndarray) if path.stat().st_size else np.empty(0, dtype=dtype)


def _chunks(texts: Iterable[tuple[str, str]], chunk: int) -> Iterator[tuple[np.ndarray, list[str]]]:
    """Yield ids (bytes) and texts in chunks.

    A chunk has at most `chunk` texts, and ends when it has `MAX_CHUNK_CHARS` characters or more.
    """
    ids: list[bytes] = []
    batch: list[str] = []
    chars = 0
    for text_id, text in texts:
        if not isinstance(text_id, str) or not isinstance(text, str):
            raise DataError(
                f"texts: expected strings as id and text, got {text_id!r} with text {str(text)[:80]!r}; fix the source"
            )
        encoded = text_id.encode("utf-8", "replace")
        if len(encoded) > MAX_ID_BYTES or BAD_ID.search(text_id):
            raise DataError(
                f"texts: expected ids of at most {MAX_ID_BYTES} bytes without NUL, got {text_id[:80]!r}; rename it"
            )
        ids.append(encoded)
        batch.append(text)
        chars += len(text)
        if len(batch) >= chunk or chars >= MAX_CHUNK_CHARS:
            yield np.array(ids, dtype=np.bytes_), batch
            ids, batch, chars = [], [], 0
    if batch:
        yield np.array(ids, dtype=np.bytes_), batch


def _encoded(
    chunks: Iterable[tuple[np.ndarray, list[str]]], encoder: TextEncoder
) -> Generator[tuple[np.ndarray, Encoded]]:
    """Tokenize chunks in threads and yield them in order, with a bounded number in progress.

    The tokenizer's own thread pool is not used, because it would outlive the build. A DataLoader worker that forks
    later would inherit the pool's locks without its threads. The result would be a deadlock, or a warning per worker.
    Python threads are as fast, because the tokenizer releases the interpreter lock.
    """
    cores = available_cores()
    threads = min(cores, MAX_THREADS)
    waiting: deque[tuple[np.ndarray, Future[Encoded]]] = deque()
    with _environment("TOKENIZERS_PARALLELISM", "false"):
        pool = ThreadPoolExecutor(threads, thread_name_prefix="tokenize")
        try:
            for ids, texts in chunks:
                waiting.append((ids, pool.submit(encoder, texts)))
                if len(waiting) > threads + 1:
                    done, future = waiting.popleft()
                    yield done, future.result()
            while waiting:
                done, future = waiting.popleft()
                yield done, future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _index_ids(folder: Path, widths: list[tuple[int, int]], id_bytes: int) -> dict[str, dict[str, int]]:
    """Write `ids.bin` (ids of one width) and `order.bin` (rows sorted by id) from `ids.raw`; delete `ids.raw`."""
    with (folder / "ids.raw").open("rb") as raw, _Writer(folder / "ids.bin") as writer:
        for count, width in widths:
            writer.write(np.frombuffer(raw.read(count * width), dtype=f"S{width}").astype(f"S{id_bytes}"))
        files = {"ids.bin": writer.finish()}
    (folder / "ids.raw").unlink()
    ids = map_array(folder / "ids.bin", f"S{id_bytes}")
    order = np.argsort(ids, kind="stable")
    for start in range(0, len(ids) - 1, BLOCK):
        block = ids[order[start : start + BLOCK + 1]]
        same = np.flatnonzero(block[1:] == block[:-1])
        if len(same):
            raise DataError(f"texts: expected each id once, got {block[same[0]].decode()!r} twice; remove one")
    with _Writer(folder / "order.bin") as writer:
        writer.write(order.astype("<i8", copy=False))
        files["order.bin"] = writer.finish()
    return files


class _Writer:
    """Writes a file sequentially, and computes its size and checksum."""

    def __init__(self, path: Path) -> None:
        self._file, self._bytes, self._crc = path.open("wb"), 0, 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, values: np.ndarray) -> None:
        data = np.ascontiguousarray(values).data
        self._file.write(data)
        self._bytes, self._crc = self._bytes + data.nbytes, zlib.crc32(data, self._crc)

    def finish(self) -> dict[str, int]:
        self._file.flush()
        os.fsync(self._file.fileno())  # the data must be on the disk before the folder is renamed
        return {"bytes": self._bytes, "crc32": self._crc}


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Set an environment variable inside a block."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before
