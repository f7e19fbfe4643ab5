"""The fingerprint of docs that are read from a file, stored beside the file so that it is computed once."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable
from pathlib import Path

from ranker.data.collection import Doc, fingerprint_of
from ranker.files.writing import write_whole


def stored_fingerprint(docs: Iterable[Doc], content: Path, store: Path) -> str:
    """Return `fingerprint_of` the docs; it is stored with the size and the modification time of their file.

    Args:
        docs: The docs.
        content: The file from which they are read.
        store: The file that keeps the fingerprint. Without write access to its folder, nothing is stored.
    """
    found = content.stat()
    state = [found.st_size, found.st_mtime_ns]
    try:
        stored = json.loads(store.read_text(encoding="utf-8"))
        if stored["state"] == state and stored["crc32"] == zlib.crc32(stored["fingerprint"].encode()):
            return str(stored["fingerprint"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass  # not computed yet, or damaged
    fingerprint = fingerprint_of(docs)
    if os.access(store.parent, os.W_OK):
        with write_whole(store) as file:
            json.dump({"state": state, "fingerprint": fingerprint, "crc32": zlib.crc32(fingerprint.encode())}, file)
    return fingerprint
