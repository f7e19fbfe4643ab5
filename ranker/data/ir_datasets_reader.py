"""Reading one set of ir_datasets: its docs, training triples, qrels and candidates, by one process at a time."""

from __future__ import annotations

import difflib
import json
import logging
import os
import zlib
from array import array
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from filelock import FileLock

from ranker.data.collection import Candidates, Doc, fingerprint_of
from ranker.data.parsing import check_grade, check_id
from ranker.errors import ConfigError, DataError
from ranker.files import write_whole
from ranker.network import unreachable

if TYPE_CHECKING:  # it imports torch, which reading data does not need
    from ranker.types import Qrels

log = logging.getLogger(__name__)


# docs
# -----------------------------------------------------------------------------------------------------------------------------


class IrDatasetsDocs:
    """Docs of an ir_datasets id, kept in its on-disk store and read when asked for.

    Title and text together are what the data set itself calls a doc's default text; nothing in them is changed.
    """

    def __init__(self, dataset_id: str) -> None:
        self.dataset_id = dataset_id
        self._owner = -1
        self._built_store: Any = None
        store = self._store()
        if store is not None and not _is_whole(store):
            log.warning("ir_datasets %s: the doc store was left unfinished; it is built anew", dataset_id)
            store.clear_cache()
        self._length = int(store.count())  # builds it, if need be
        self.fingerprint = self._fingerprint()

    def _store(self) -> Any:
        # A store keeps a file position: a forked worker that shared it would read docs out of the middle of others.
        if self._owner != os.getpid():
            self._built_store, self._owner = load_dataset(self.dataset_id).docs_store(), os.getpid()
        return self._built_store

    def _fingerprint(self) -> str:
        """Hash of all ids and texts, remembered beside the store together with the store's size and time."""
        content = Path(getattr(self._store(), "path", "")) / "bin"
        if not content.is_file():
            return fingerprint_of(self)
        state = [content.stat().st_size, content.stat().st_mtime_ns]
        memory = content.parent / "ranker_fingerprint.json"
        try:
            remembered = json.loads(memory.read_text(encoding="utf-8"))
            if remembered["state"] == state and remembered["crc32"] == zlib.crc32(remembered["fingerprint"].encode()):
                return str(remembered["fingerprint"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            pass  # none yet, or damaged
        fingerprint = fingerprint_of(self)
        if os.access(content.parent, os.W_OK):
            with write_whole(memory) as file:
                json.dump({"state": state, "fingerprint": fingerprint, "crc32": zlib.crc32(fingerprint.encode())}, file)
        return fingerprint

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Doc]:
        return map(_doc, iter(self._store()))

    def __getitem__(self, doc_id: str) -> Doc:
        return _doc(self._store().get(doc_id))

    def __contains__(self, doc_id: object) -> bool:
        try:
            return isinstance(doc_id, str) and self._store().get(doc_id) is not None
        except KeyError:
            return False


def _is_whole(store: Any) -> bool:
    """Whether a store that calls itself built has its index too: its positions are written first, a kill may come between."""
    try:
        return not hasattr(store, "lookup") or not store.built() or len(store.lookup.idx()) > 0
    except OSError:
        return False


def _doc(record: Any) -> Doc:
    title = getattr(record, "title", None) or ""
    text = record.default_text()
    # Nearly all classes with a title give "title text" here; what follows the title is the text.
    if title and text.startswith(f"{title} "):
        return Doc(record.doc_id, text[len(title) + 1 :], title)
    return Doc(record.doc_id, text.removeprefix(" ") if hasattr(record, "title") else text)


# sets
# --------------------------------------------------------------------------------------------------------------------------


def load_dataset(dataset_id: str) -> Any:
    """The ir_datasets object of an id.

    Raises:
        DataError: Unknown id; the message names the nearest ones.
    """
    import ir_datasets  # slow, and reads IR_DATASETS_HOME when imported

    try:
        return ir_datasets.load(dataset_id)
    except KeyError as error:
        near = difflib.get_close_matches(dataset_id, list(ir_datasets.registry), n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else "see https://ir-datasets.com for all ids"
        raise DataError(f"ir_datasets: expected an id that it knows, got {dataset_id!r}; {hint}") from error


@contextmanager
def alone() -> Iterator[None]:
    """Let one process at a time download and build: ir_datasets itself does not guard its caches."""
    import ir_datasets

    home = ir_datasets.util.home_path()
    with _answering():
        if not os.access(home, os.W_OK):
            yield  # nothing can be built in there
            return
        with FileLock(home / "ranker.lock"):
            yield


@contextmanager
def _answering() -> Iterator[None]:
    """Let ir_datasets download from servers that answer; it would try those that do not for minutes."""
    from ir_datasets.util import RequestsDownload

    stream = RequestsDownload.stream

    def checked(self: Any) -> Any:
        reason = unreachable(self.url)
        if reason is not None:
            raise ConnectionError(f"{self.url} is out of reach: {reason}")
        return stream(self)

    RequestsDownload.stream = checked
    try:
        yield
    finally:
        RequestsDownload.stream = stream


@contextmanager
def readable(dataset_id: str) -> Iterator[None]:
    """Turn whatever ir_datasets raises (network, disk, checksum, format) into one line."""
    try:
        yield
    except (DataError, ConfigError):
        raise
    except Exception as error:
        raise DataError(
            f"ir_datasets {dataset_id}: expected to read it, got {type(error).__name__}: {' '.join(str(error).split())}; "
            "check the network; without one, copy a filled folder of ir_datasets from elsewhere and set IR_DATASETS_HOME to it, or use data=files"
        ) from error


@dataclass(frozen=True)
class DocPairs:
    """Training triples of an ir_datasets id, read anew from its file at each iteration.

    Args:
        dataset_id: Id with docpairs.
        max_triples: Only the first so many; None: all.
    """

    dataset_id: str
    max_triples: int | None = None

    @property
    def fingerprint(self) -> str:
        """Which triples these are; ir_datasets checks the file that an id stands for by its hash."""
        return f"ir_datasets {self.dataset_id}, first {self.max_triples}"

    def __iter__(self) -> Iterator[tuple[str, str, str]]:
        pairs = islice(load_dataset(self.dataset_id).docpairs_iter(), self.max_triples)
        return ((pair.query_id, pair.doc_id_a, pair.doc_id_b) for pair in pairs)


def qrels_of(dataset: Any, dataset_id: str) -> Qrels:
    """Read qrels; a pair that comes twice must have the same grade (PC-08), but of subtopics the best grade counts."""
    qrels: Qrels = {}
    repeats = 0
    by_subtopic = "subtopic_id" in dataset.qrels_cls()._fields
    for judgement in dataset.qrels_iter():
        check_grade(
            judgement.relevance, f"ir_datasets {dataset_id}: query {judgement.query_id!r}, doc {judgement.doc_id!r}"
        )
        judged = qrels.setdefault(judgement.query_id, {})
        grade = judged.setdefault(judgement.doc_id, int(judgement.relevance))
        if by_subtopic:
            judged[judgement.doc_id] = max(grade, int(judgement.relevance))
        elif grade != judgement.relevance:
            raise DataError(
                f"ir_datasets {dataset_id}: query {judgement.query_id!r}, doc {judgement.doc_id!r}: expected one grade, got {grade} and "
                f"{judgement.relevance}; write mended qrels and use data=files"
            )
        repeats += 1
    repeats -= sum(map(len, qrels.values()))
    if repeats and not by_subtopic:
        log.warning("ir_datasets %s: %d judgements come more than once; each counts once", dataset_id, repeats)
    return _mend_cranfield(qrels) if dataset_id == "cranfield" else qrels


def _mend_cranfield(qrels: Qrels) -> Qrels:
    """Turn Cranfield's grades round: in the archive 1 is the best and 4 the least; -1 stays, and is not relevant."""
    log.info(
        "cranfield: grades run backwards in the data (1 is best): 1, 2, 3, 4 are read as 4, 3, 2, 1; -1 stays as it is, not relevant"
    )
    return {
        query_id: {doc_id: 5 - grade if grade > 0 else grade for doc_id, grade in judged.items()}
        for query_id, judged in qrels.items()
    }


def scoreddocs_of(dataset: Any, dataset_id: str, wanted: Mapping[str, str]) -> Candidates:
    """Read the data set's own candidates of the wanted queries, ordered by score as trec_eval does.

    Docs are numbers until the end: MS MARCO's training set has 478 million candidates.
    """
    numbers: dict[str, int] = {}
    found = {query_id: (array("i"), array("d")) for query_id in wanted}  # doubles: rounded scores may tie
    for scored in dataset.scoreddocs_iter():
        if scored.query_id in found:
            docs, scores = found[scored.query_id]
            docs.append(numbers.setdefault(scored.doc_id, len(numbers)))
            scores.append(scored.score)
    for doc_id in numbers:
        check_id(doc_id, f"ir_datasets {dataset_id}", "a doc id in its scoreddocs")
    doc_ids = np.array([doc_id.encode() for doc_id in numbers], dtype=np.bytes_)
    id_places = np.empty(len(doc_ids), dtype=np.int32)
    id_places[np.argsort(doc_ids, kind="stable")] = np.arange(len(doc_ids), dtype=np.int32)
    ranked_docs, ranked_scores, unscored = [], [], True
    for query_docs, query_scores in found.values():
        rows, scores_of = np.array(query_docs, dtype=np.int32), np.array(query_scores, dtype=np.float64)
        once = np.unique(rows, return_index=True)[1]
        order = once[np.lexsort((id_places[rows[once]], scores_of[once]))[::-1]]
        ranked_docs.append(rows[order])
        ranked_scores.append(scores_of[order])
        unscored = unscored and len(np.unique(scores_of)) <= 1
    lengths = [len(rows) for rows in ranked_docs]
    repeats = sum(len(docs) for docs, _ in found.values()) - sum(lengths)
    if repeats:
        log.warning("ir_datasets %s: %d candidates come twice for a query; the first one counts", dataset_id, repeats)
    if unscored:
        log.warning(
            "ir_datasets %s: its scoreddocs have no scores, so a depth below their number cuts at random, and they are no baseline; "
            "for ranked candidates set data.candidates=bm25",
            dataset_id,
        )
    return Candidates(
        list(found),
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        doc_ids[np.concatenate(ranked_docs)] if ranked_docs else doc_ids,
        np.concatenate(ranked_scores) if ranked_scores else np.empty(0, dtype=np.float64),
    )
