"""Append expansions to docs: words or queries that another program has generated for each doc."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from ranker.data.collection import Collection, Doc, Docs, Splits
from ranker.data.corpus_files import read_queries
from ranker.errors import DataError


class ExpandedDocs:
    """Docs with an expansion appended to the text of each doc that has one.

    Args:
        docs: The docs.
        expansions: Doc id -> expansion.
    """

    def __init__(self, docs: Docs, expansions: Mapping[str, str]) -> None:
        self._docs, self._expansions = docs, expansions
        digest = hashlib.blake2b(docs.fingerprint.encode(), digest_size=16)
        for item in sorted(expansions.items()):
            digest.update(repr(item).encode("utf-8", "surrogatepass"))
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._docs)

    def __iter__(self) -> Iterator[Doc]:
        return map(self._expanded, self._docs)

    def __getitem__(self, doc_id: str) -> Doc:
        return self._expanded(self._docs[doc_id])

    def __contains__(self, doc_id: object) -> bool:
        return doc_id in self._docs

    def _expanded(self, doc: Doc) -> Doc:
        text = self._expansions.get(doc.doc_id)
        return replace(doc, text=f"{doc.text} {text}") if text else doc


def expanded(splits: Splits, path: Path | None) -> Splits:
    """Return splits whose docs are expanded by the texts in a file of lines `DOC_ID`, tab, text.

    Args:
        splits: The splits of a source.
        path: The file; None: docs do not change.

    Raises:
        DataError: The file can't be read, or has no expansion for any doc of one of the collections.
    """
    if path is None:
        return splits
    texts = read_queries(path)

    def of(collection: Collection) -> Collection:
        if not any(doc_id in collection.docs for doc_id in texts):
            raise DataError(
                f"{path}: expected expansions of docs of {collection.name}, got none with an id of a doc "
                f"(the first id of the file is {next(iter(texts), None)!r})"
            )
        return replace(collection, docs=ExpandedDocs(collection.docs, texts))

    return replace(
        splits,
        train=None if splits.train is None else of(splits.train),
        val=None if splits.val is None else of(splits.val),
        tests={name: of(collection) for name, collection in splits.tests.items()},
    )
