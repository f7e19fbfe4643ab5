"""Records of an ir_datasets id other than docs: training triples, qrels and candidates."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ranker.data.collection import Candidates
from ranker.data.corpus_files import opened
from ranker.data.ir_datasets_access import load_dataset
from ranker.data.parsing import check_grade, check_id
from ranker.data.ragged import row_offsets
from ranker.data.separated import field_bounds, fields, whole_lines
from ranker.errors import DataError

if TYPE_CHECKING:  # ranker.types imports torch, which readers of data do not need
    from ranker.types import Qrels

log = logging.getLogger(__name__)


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
