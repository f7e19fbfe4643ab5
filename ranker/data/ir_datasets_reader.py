"""Read a set of ir_datasets: docs, training triples, qrels, candidates. Only one process at a time builds caches."""

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
from ranker.data.corpus_files import opened
from ranker.data.parsing import check_grade, check_id
from ranker.data.ragged import row_offsets
from ranker.data.separated import field_bounds, fields, whole_lines
from ranker.data.tsv_docs import TsvDocs
from ranker.errors import ConfigError, DataError
from ranker.files import write_whole
from ranker.network import unreachable

if TYPE_CHECKING:  # ranker.types imports torch, which readers of data do not need
    from ranker.types import Qrels

log = logging.getLogger(__name__)


# docs
# ----------------------------------------------------------------------------------------------------------------------


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
        """Return a hash of all ids and texts, cached in the store's folder with its size and modification time."""
        content = Path(getattr(self._store(), "path", "")) / "bin"
        if not content.is_file():
            return fingerprint_of(self)
        state = [content.stat().st_size, content.stat().st_mtime_ns]
        cache = content.parent / "ranker_fingerprint.json"
        try:
            cached = json.loads(cache.read_text(encoding="utf-8"))
            if cached["state"] == state and cached["crc32"] == zlib.crc32(cached["fingerprint"].encode()):
                return str(cached["fingerprint"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            pass  # not computed yet, or damaged
        fingerprint = fingerprint_of(self)
        if os.access(content.parent, os.W_OK):
            with write_whole(cache) as file:
                json.dump({"state": state, "fingerprint": fingerprint, "crc32": zlib.crc32(fingerprint.encode())}, file)
        return fingerprint

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
    store of ir_datasets would take the same disk space again, and the construction of its index of 8.8 million ids some
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
    """Return whether a store has its index, which is written last; a store of a killed process may have no index."""
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


# sets
# ----------------------------------------------------------------------------------------------------------------------


def load_dataset(dataset_id: str) -> Any:
    """Return the ir_datasets object of an id.

    Raises:
        DataError: The id is unknown; the message names similar ids.
    """
    import ir_datasets  # imported here, because it is slow and reads IR_DATASETS_HOME at import

    try:
        return ir_datasets.load(dataset_id)
    except KeyError as error:
        near = difflib.get_close_matches(dataset_id, list(ir_datasets.registry), n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else "see https://ir-datasets.com for all ids"
        raise DataError(f"ir_datasets: expected an id that ir_datasets knows, got {dataset_id!r}; {hint}") from error


@contextmanager
def alone() -> Iterator[None]:
    """Let only one process at a time download and build caches, which ir_datasets does not protect."""
    import ir_datasets

    home = ir_datasets.util.home_path()
    with _reachable_servers():
        if not os.access(home, os.W_OK):
            yield  # in a read-only folder nothing can be built
            return
        with FileLock(home / "ranker.lock"):
            yield


@contextmanager
def _reachable_servers() -> Iterator[None]:
    """Fail at once if a server can't be reached; ir_datasets would retry for minutes."""
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
    """Convert any error of ir_datasets (network, disk, checksum, format) to a DataError of one line."""
    try:
        yield
    except (DataError, ConfigError):
        raise
    except Exception as error:
        raise DataError(
            f"ir_datasets {dataset_id}: expected to read it, got {type(error).__name__}: "
            f"{' '.join(str(error).split())}; check the network; without one, copy a filled folder of ir_datasets from "
            "elsewhere and set IR_DATASETS_HOME to it, or use data=files"
        ) from error


@dataclass(frozen=True)
class DocPairs:
    """Training triples of an ir_datasets id; each iteration reads them from the file again.

    Args:
        dataset_id: Id of a set with docpairs.
        max_triples: Number of triples to read, from the first; None: all.
    """

    dataset_id: str
    max_triples: int | None = None

    @property
    def fingerprint(self) -> str:
        """Identity of the triples: the id is enough, because ir_datasets checks the hash of the id's file."""
        return f"ir_datasets {self.dataset_id}, first {self.max_triples}"

    def __iter__(self) -> Iterator[tuple[str, str, str]]:
        pairs = islice(load_dataset(self.dataset_id).docpairs_iter(), self.max_triples)
        return ((pair.query_id, pair.doc_id_a, pair.doc_id_b) for pair in pairs)

    def id_arrays(self) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]] | None:
        """Return the triples' ids in blocks, UTF-8 in three bytes arrays [triples of the block].

        Reading blocks takes a tenth of the time of reading single triples. The result is None if the lines of the file
        are not three ids.
        """
        from ir_datasets.formats import GenericDocPair, TsvDocPairs

        handler = load_dataset(self.dataset_id).docpairs_handler()
        if not isinstance(handler, TsvDocPairs) or handler.docpairs_cls() is not GenericDocPair:
            return None
        return self._blocks(Path(handler.docpairs_path()))

    def _blocks(self, path: Path) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        left, line = self.max_triples, 1
        with opened(path) as stream:
            for text in whole_lines(stream):
                block = np.frombuffer(text, dtype=np.uint8)
                bounds = field_bounds(block, 3)
                if bounds is None:
                    raise DataError(
                        f"{path}: expected lines of three ids with a tab between two ids, got another line after line "
                        f"{line - 1}; download it again"
                    )
                starts, ends = (part[:left] for part in bounds)
                yield (
                    fields(block, starts[:, 0], ends[:, 0]),
                    fields(block, starts[:, 1], ends[:, 1]),
                    fields(block, starts[:, 2], ends[:, 2]),
                )
                line += len(starts)
                left = None if left is None else left - len(starts)
                if left == 0:
                    return


def qrels_of(dataset: Any, dataset_id: str) -> Qrels:
    """Read qrels.

    A repeated pair must have the same grade (PC-08). In sets with subtopics, the best grade of a pair is used.

    Args:
        dataset: Object of ir_datasets.
        dataset_id: Its id.

    Raises:
        DataError: A pair has two grades, or a grade is out of range.
    """
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
                f"ir_datasets {dataset_id}: query {judgement.query_id!r}, doc {judgement.doc_id!r}: expected one "
                f"grade, got {grade} and {judgement.relevance}; write corrected qrels and use data=files"
            )
        repeats += 1
    repeats -= sum(map(len, qrels.values()))
    if repeats and not by_subtopic:
        log.warning("ir_datasets %s: %d judgements come more than once; each counts once", dataset_id, repeats)
    return _reverse_cranfield_grades(qrels) if dataset_id == "cranfield" else qrels


def _reverse_cranfield_grades(qrels: Qrels) -> Qrels:
    """Reverse Cranfield's grades: 1 is its best and 4 its lowest grade; -1 (not relevant) does not change."""
    log.info(
        "cranfield: grades run backwards in the data (1 is best): 1, 2, 3, 4 are read as 4, 3, 2, 1; -1 stays as it "
        "is, not relevant"
    )
    return {
        query_id: {doc_id: 5 - grade if grade > 0 else grade for doc_id, grade in judged.items()}
        for query_id, judged in qrels.items()
    }


def scoreddocs_of(dataset: Any, dataset_id: str, wanted: Mapping[str, str]) -> Candidates:
    """Read a set's own candidates, in trec_eval's order.

    To save memory, doc ids are stored as numbers until the end: MS MARCO's training set has 478 million candidates.

    Args:
        dataset: Object of ir_datasets.
        dataset_id: Its id.
        wanted: The queries whose candidates are read.
    """
    numbers: dict[str, int] = {}
    columns = {query_id: (array("i"), array("d")) for query_id in wanted}  # float64, because rounded scores may tie
    for scored in dataset.scoreddocs_iter():
        if scored.query_id in columns:
            docs, scores = columns[scored.query_id]
            docs.append(numbers.setdefault(scored.doc_id, len(numbers)))
            scores.append(scored.score)
    for doc_id in numbers:
        check_id(doc_id, f"ir_datasets {dataset_id}", "a doc id in its scoreddocs")
    doc_ids = np.array([doc_id.encode() for doc_id in numbers], dtype=np.bytes_)
    id_ranks = np.empty(len(doc_ids), dtype=np.int32)
    id_ranks[np.argsort(doc_ids, kind="stable")] = np.arange(len(doc_ids), dtype=np.int32)
    ranked_docs, ranked_scores, unscored = [], [], True
    for query_docs, query_scores in columns.values():
        doc_numbers, doc_scores = np.array(query_docs, dtype=np.int32), np.array(query_scores, dtype=np.float64)
        first = np.unique(doc_numbers, return_index=True)[1]
        order = first[np.lexsort((id_ranks[doc_numbers[first]], doc_scores[first]))[::-1]]
        ranked_docs.append(doc_numbers[order])
        ranked_scores.append(doc_scores[order])
        unscored = unscored and len(np.unique(doc_scores)) <= 1
    lengths = [len(part) for part in ranked_docs]
    repeats = sum(len(docs) for docs, _ in columns.values()) - sum(lengths)
    if repeats:
        log.warning("ir_datasets %s: %d candidates come twice for a query; the first one counts", dataset_id, repeats)
    if unscored:
        log.warning(
            "ir_datasets %s: its scoreddocs have no scores, so a depth below their number cuts at random, and they are "
            "no baseline; for ranked candidates set data.candidates=bm25",
            dataset_id,
        )
    return Candidates(
        list(columns),
        row_offsets(lengths),
        doc_ids[np.concatenate(ranked_docs)] if ranked_docs else doc_ids,
        np.concatenate(ranked_scores) if ranked_scores else np.empty(0, dtype=np.float64),
    )
