"""A folder of text files in a fixed layout.

The folder has docs.jsonl, queries.tsv, qrels.txt or qrels.{train,dev,test}.txt, and optionally *.run. Each file may be
gzipped.
"""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ranker.data.collection import Collection, Splits
from ranker.data.corpus_files import JsonlDocs, check_regular, read_queries
from ranker.data.splits import (
    check_candidates,
    check_disjoint,
    check_judged_docs,
    cut_validation,
    split_queries,
    take_queries,
)
from ranker.data.trec import read_candidates, read_qrels
from ranker.data.trec_lines import line_with
from ranker.errors import ConfigError, DataError

if TYPE_CHECKING:  # ranker.types imports torch, which readers of data do not need
    from ranker.types import Qrels

log = logging.getLogger(__name__)


class Files:
    """Load a folder in this layout; the folder's name is the name of the test set.

    The files `qrels.{train,dev,test}.txt` define the splits; without `qrels.dev.txt`, a hash chooses validation queries
    from train. If there is only `qrels.txt`, a hash distributes the judged queries. Queries without judgements are left
    out.

    Args:
        path: The folder.
        candidates: A run to re-rank: its name in the folder, or an absolute path. None: the folder's only run, or BM25
            if there is no run. `bm25`: BM25 in any case.
        relevance: Smallest grade that counts as relevant.
        val_fraction: Share of the validation queries, if no file defines the validation set: of the training queries
            with split files, else of all queries.
        test_fraction: Share of the test queries, if no file defines the test set.
        split_seed: Seed of the hash.

    Raises:
        ConfigError: A share is outside its range.
    """

    def __init__(
        self,
        path: str | Path,
        candidates: str | None = None,
        relevance: int = 1,
        val_fraction: float = 0.1,
        test_fraction: float = 0.2,
        split_seed: int = 0,
    ) -> None:
        for key, value in (("val_fraction", val_fraction), ("test_fraction", test_fraction)):
            if not 0 <= value <= 1:
                raise ConfigError(f"data.{key}: expected a share between 0 and 1, got {value!r}; set another")
        if val_fraction + test_fraction > 1:
            raise ConfigError(
                f"data.val_fraction: expected at most {1 - test_fraction:g} beside data.test_fraction, got "
                f"{val_fraction!r}; lower one"
            )
        self.folder = Path(path).expanduser()
        self.candidates = candidates
        self.relevance = relevance
        self.val_fraction, self.test_fraction, self.split_seed = val_fraction, test_fraction, split_seed

    def check(self) -> None:
        """Check that all files exist, without reading them.

        Raises:
            DataError: The folder or a file is missing, or a file exists in two forms.
        """
        if not self.folder.is_dir():
            raise DataError(
                f"data.path: expected a folder with docs.jsonl, queries.tsv and qrels.txt, got {str(self.folder)!r}; "
                "check the path"
            )
        for name in ("queries.tsv", "docs.jsonl"):
            self._file(name, needed=True)
        self._qrels_paths()
        self._run_path()

    def load(self) -> Splits:
        """Read all files.

        Raises:
            DataError: A file is missing, empty or malformed, or two files contradict each other.
        """
        self.check()
        run_path = self._run_path()
        qrels_paths = self._qrels_paths()
        queries_path = self._file("queries.tsv", needed=True)
        queries = read_queries(queries_path)
        qrels = {part: self._judged(path, queries, queries_path) for part, path in qrels_paths.items()}
        docs = JsonlDocs(self._file("docs.jsonl", needed=True))
        everything = Collection(
            name=self.folder.resolve().name or "files",
            docs=docs,
            queries=queries,
            qrels={},
            candidates=None if run_path is None else read_candidates(run_path),
            relevance=self.relevance,
        )
        for part, path in qrels_paths.items():
            check_judged_docs(qrels[part], everything, str(path))
        splits = (
            self._split_by_hash(everything, qrels["all"]) if "all" in qrels else self._split_by_files(everything, qrels)
        )
        check_disjoint(splits)
        for collection in (splits.train, splits.val, *splits.tests.values()):
            if collection is not None:
                check_candidates(collection, str(run_path))
        return splits

    # files
    # ------------------------------------------------------------------------------------------------------------------

    def _file(self, name: str, needed: bool = False) -> Path:
        """Return the path of a file, plain or gzipped; only a `needed` file must exist."""
        plain, packed = self.folder / name, self.folder / f"{name}.gz"
        for path in (plain, packed):
            if path.is_symlink() and not path.exists():
                raise DataError(
                    f"{path}: expected a file, got a link to {str(path.readlink())!r}, which does not exist; fix or "
                    "remove it"
                )
            if path.exists():
                check_regular(path)
        if plain.exists() and packed.exists():
            raise DataError(f"{plain}: expected one of {name} and {name}.gz, got both; remove one")
        if needed and not plain.exists() and not packed.exists():
            raise DataError(
                f"{plain}: expected this file or {name}.gz, got neither; put it there or set another data.path"
            )
        return packed if packed.exists() else plain

    def _qrels_paths(self) -> dict[str, Path]:
        parts = {part: self._file(f"qrels.{part}.txt") for part in ("train", "dev", "test")}
        parts = {part: path for part, path in parts.items() if path.exists()}
        return parts or {"all": self._file("qrels.txt", needed=True)}

    def _run_path(self) -> Path | None:
        if self.candidates == "bm25":
            return None
        if self.candidates is None:
            runs = sorted(path for path in self.folder.iterdir() if path.name.endswith((".run", ".run.gz")))
            if len(runs) > 1:
                names = ", ".join(path.name for path in runs)
                raise DataError(
                    f"{self.folder}: expected one run, got {names}; choose with data.candidates=NAME, or "
                    "data.candidates=bm25"
                )
            if runs and runs[0].exists():
                check_regular(runs[0])
            return runs[0] if runs else None
        path = Path(self.candidates).expanduser()
        if not path.is_absolute():
            if os.path.normpath(path).startswith(os.pardir):
                raise DataError(
                    f"data.candidates: expected a file inside {self.folder} or an absolute path, got "
                    f"{self.candidates!r}; give the whole path"
                )
            path = self.folder / path
        if not path.is_file():
            raise DataError(
                f"data.candidates: expected a run file, got {str(path)!r}, which is none; check the name, or set bm25"
            )
        return path

    def _judged(self, path: Path, queries: dict[str, str], queries_path: Path) -> Qrels:
        qrels = read_qrels(path)
        for query_id in qrels:
            if query_id not in queries:
                raise DataError(
                    f"{line_with(path, query_id)}: expected judgements of queries in {queries_path.name}, got "
                    f"{query_id!r}; add its text there"
                )
        return qrels

    # splits
    # ------------------------------------------------------------------------------------------------------------------

    def _split_by_files(self, everything: Collection, qrels: dict[str, Qrels]) -> Splits:
        named = {"train": "train", "dev": "val", "test": everything.name}
        parts = {
            part: take_queries(replace(everything, qrels=judged), judged, named[part]) for part, judged in qrels.items()
        }
        train, val = parts.get("train"), parts.get("dev")
        if train is not None and val is None and self.val_fraction > 0:
            train, val = cut_validation(train, max(1, round(len(train.queries) * self.val_fraction)), self.split_seed)
        tests = {everything.name: parts["test"]} if "test" in parts else {}
        self._log_unjudged(everything, sum(len(judged) for judged in qrels.values()))
        return Splits(train, val, tests)

    def _split_by_hash(self, everything: Collection, qrels: Qrels) -> Splits:
        ids = split_queries(qrels, self.val_fraction, self.test_fraction, self.split_seed)
        log.info(
            "%s: no split files: %d judged queries are split by a hash of their ids (seed %d): %s",
            self.folder,
            len(qrels),
            self.split_seed,
            ", ".join(f"{len(part)} {name}" for name, part in sorted(ids.items(), reverse=True)),
        )
        self._log_unjudged(everything, len(qrels))
        judged = replace(everything, qrels=qrels)
        train, val, test = (
            take_queries(judged, ids[part], name) if ids[part] else None
            for part, name in (("train", "train"), ("dev", "val"), ("test", everything.name))
        )
        return Splits(train, val, {} if test is None else {everything.name: test})

    def _log_unjudged(self, everything: Collection, num_judged: int) -> None:
        if num_judged < len(everything.queries):
            log.info(
                "%s: %d of %d queries have no judgements and are left out",
                self.folder,
                len(everything.queries) - num_judged,
                len(everything.queries),
            )
