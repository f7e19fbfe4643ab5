"""PyTerrier transformers for re-ranking and dense retrieval in a pipeline, without Java (needs the extra `pyterrier`).

>>> from ranker.integrations.pyterrier import DenseRetriever, RerankTransformer  # doctest: +SKIP
>>> docs = [{"docno": "d1", "text": "..."}]  # doctest: +SKIP
>>> dense = DenseRetriever("outputs/dpr/STAMP", docs, depth=100)  # doctest: +SKIP
>>> pipeline = dense % 100 >> RerankTransformer("outputs/monobert/STAMP")  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyterrier as pt

from ranker import Reranker
from ranker.assembly.text_vectors import DenseSearch
from ranker.data.collection import Doc
from ranker.errors import DataError


class RerankTransformer(pt.Transformer):
    """Re-rank docs: read the columns qid, query, docno and text, and replace the columns score and rank.

    Args:
        model: A loaded `Reranker`, or a folder that `Reranker.load` takes.
        text_field: The column with the docs' text.
        options: Options of `Reranker.load`.
    """

    def __init__(self, model: Reranker | str | Path, text_field: str = "text", **options: Any) -> None:
        self.reranker = _loaded(model, options)
        self.text_field = text_field

    def transform(self, inp: pd.DataFrame) -> pd.DataFrame:
        """Return the rows with new scores and ranks; ranks begin with 0, as in PyTerrier."""
        pt.validate.result_frame(inp, extra_columns=["query", self.text_field], context=self)
        pairs = list(zip(inp["query"], inp[self.text_field], strict=True))
        return pt.model.add_ranks(inp.assign(score=self.reranker.score(pairs).astype(np.float64)))


class DenseRetriever(pt.Transformer):
    """Search docs with a bi-encoder: read the columns qid and query, and add docno, score, rank and text.

    Args:
        model: A loaded `Reranker`, or a folder that `Reranker.load` takes; DPR or ColBERT.
        docs: Mappings with `docno`, `text` and perhaps `title`, which are kept in memory.
        depth: Docs per query.
        vectors: Folder for the docs' vectors, which later calls use again; None: a folder in `cache_dir`.
        cache_dir: Folder of all caches.
        options: Options of `Reranker.load`.

    Raises:
        DataError: A doc has no `docno` or `text`, or two docs have the same `docno`.
    """

    def __init__(
        self,
        model: Reranker | str | Path,
        docs: Iterable[Mapping[str, str]],
        depth: int = 1000,
        vectors: str | Path | None = None,
        cache_dir: str | Path = ".cache",
        **options: Any,
    ) -> None:
        kept = [_doc_of(doc, position) for position, doc in enumerate(docs)]
        folder = None if vectors is None else Path(vectors)
        self._search = DenseSearch(_loaded(model, options), kept, folder, Path(cache_dir))
        self._texts = {doc.doc_id: doc.full_text for doc in kept}
        self.depth = depth

    def transform(self, inp: pd.DataFrame) -> pd.DataFrame:
        """Return the best docs of each query, with the query's columns."""
        pt.validate.query_frame(inp, extra_columns=["query"], context=self)
        found = self._search.search({str(row): text for row, text in enumerate(inp["query"])}, self.depth)
        counts = np.diff(found.offsets)
        ids = [doc_id.decode() for doc_id in found.doc_ids]
        rows = inp.iloc[np.repeat(np.array([int(row) for row in found.query_ids], dtype=np.int64), counts)]
        return rows[pt.model.query_columns(inp)].assign(
            docno=ids,
            text=[self._texts[doc_id] for doc_id in ids],
            score=found.scores.astype(np.float64),
            rank=np.concatenate([np.arange(0), *(np.arange(count) for count in counts)]),
        ).reset_index(drop=True)  # fmt: skip


def _loaded(model: Reranker | str | Path, options: dict[str, Any]) -> Reranker:
    return model if isinstance(model, Reranker) else Reranker.load(model, **options)


def _doc_of(doc: Mapping[str, str], position: int) -> Doc:
    if not isinstance(doc.get("docno"), str) or not isinstance(doc.get("text"), str):
        raise DataError(f"docs[{position}]: expected a mapping with docno and text, both texts; got {doc!r:.200}")
    return Doc(doc["docno"], doc["text"], doc.get("title") or "")
