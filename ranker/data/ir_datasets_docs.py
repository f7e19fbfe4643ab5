"""Docs of an ir_datasets id, read from the store of ir_datasets or from the file of a corpus."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ranker.data.collection import Doc, fingerprint_of
from ranker.data.ir_datasets_access import load_dataset
from ranker.data.stored_fingerprint import stored_fingerprint
from ranker.data.tsv_docs import TsvDocs
from ranker.errors import DataError

log = logging.getLogger(__name__)


class IrDatasetsDocs:
    """Docs of an ir_datasets id, read from ir_datasets' on-disk store on access.

    Title and text together are the unchanged default text of ir_datasets.

    Args:
        dataset_id: Id of the corpus.
    """

    def __init__(self, dataset_id: str) -> None:
        self.dataset_id = dataset_id
        self._process_id = -1
        self._built_store: Any = None
        store = self._store()
        if store is not None and not _is_whole(store):
            log.warning("ir_datasets %s: the doc store is unfinished and is built anew", dataset_id)
            store.clear_cache()
        self._length = int(store.count())  # this call builds the store if necessary
        self.fingerprint = self._fingerprint()

    def _store(self) -> Any:
        # A store has a file position: forked workers that share one store would read from wrong positions
        if self._process_id != os.getpid():
            self._built_store, self._process_id = load_dataset(self.dataset_id).docs_store(), os.getpid()
        return self._built_store

    def _fingerprint(self) -> str:
        """Return a hash of all ids and texts, stored in the store's folder."""
        content = Path(getattr(self._store(), "path", "")) / "bin"
        if not content.is_file():
            return fingerprint_of(self)
        return stored_fingerprint(self, content, content.parent / "ranker_fingerprint.json")

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Doc]:
        return map(_doc, iter(self._store()))

    def __getitem__(self, doc_id: str) -> Doc:
        record = self._store().get(doc_id)
        if record.doc_id != doc_id:  # the store's index cuts an id to the length of its longest id
            raise KeyError(doc_id)
        return _doc(record)

    def __contains__(self, doc_id: object) -> bool:
        try:
            return isinstance(doc_id, str) and self._store().get(doc_id).doc_id == doc_id
        except KeyError:
            return False

    def known(self, ids: np.ndarray) -> np.ndarray:
        """Return which ids, UTF-8 in a bytes array [ids], belong to docs, bool [ids]."""
        lookup = getattr(self._store(), "lookup", None)
        words = [doc_id.decode() for doc_id in ids]
        if lookup is None or not words:
            return np.array([word in self for word in words], dtype=bool)
        index = lookup.idx()
        found = np.array(index[words]) >= 0
        return found & (np.char.str_len(ids) <= index.keylen)  # the index cuts longer ids


def docs_of(dataset_id: str) -> IrDatasetsDocs | TsvDocs:
    """Return the docs of a corpus.

    If the corpus is a file of lines with id and text, as MS MARCO's passages are, docs are read from this file. The
    store of ir_datasets would take as much disk space again, and the construction of its index of 8.8 million ids some
    4 GB of memory.

    Args:
        dataset_id: Id of the corpus.
    """
    path = _text_file(load_dataset(dataset_id))
    if path is None:
        return IrDatasetsDocs(dataset_id)
    try:
        return TsvDocs(path)
    except DataError as error:  # for example blank lines, which ir_datasets skips
        log.info(
            "ir_datasets %s: read through ir_datasets' store, since its text file is not plain: %s", dataset_id, error
        )
        return IrDatasetsDocs(dataset_id)


def _text_file(dataset: Any) -> Path | None:
    """Download a set's docs, and return their file if its lines have id and text; None if the file has another form."""
    from ir_datasets.formats import GenericDoc
    from ir_datasets.formats import TsvDocs as Handler

    handler = dataset.docs_handler()
    if not isinstance(handler, Handler) or handler.docs_cls() is not GenericDoc:
        return None
    path = Path(handler.docs_path(force=False))
    if path.suffix != ".tsv" or (not path.is_file() and dataset.docs_store().built()):
        return None
    path = Path(handler.docs_path(force=True))
    first = next(iter(handler.docs_iter()), None)
    with path.open("rb") as file:  # compare the first line: the file may have a header or be packed
        same = first is not None and file.readline().rstrip(b"\n") == f"{first.doc_id}\t{first.text}".encode()
    return path if same else None


def _is_whole(store: Any) -> bool:
    """Return whether a store is complete: whether its index exists, which is written last."""
    try:
        return not hasattr(store, "lookup") or not store.built() or len(store.lookup.idx()) > 0
    except OSError:
        return False


def _doc(record: Any) -> Doc:
    title = getattr(record, "title", None) or ""
    text = record.default_text()
    # The default text of nearly all classes with a title is "title text"; the doc's text is the part after the title
    if title and text.startswith(f"{title} "):
        return Doc(record.doc_id, text[len(title) + 1 :], title)
    return Doc(record.doc_id, text.removeprefix(" ") if hasattr(record, "title") else text)
