"""Data from rows of files: scored or labelled pairs, lists and triples in parquet, Arrow, JSON lines, CSV or TSV."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from ranker.data.collection import Collection, Splits
from ranker.data.instructions import Half
from ranker.data.row_build import FORMAT, RowSources, build_rows
from ranker.data.row_pairs import Relevant, RowQrels, RowSet
from ranker.data.row_paths import find_files
from ranker.data.splits import check_disjoint
from ranker.data.table_views import TableDocs
from ranker.data.text_table import TextTable
from ranker.errors import ConfigError, DataError
from ranker.files.checksums import verify_folder
from ranker.files.folders import write_folder
from ranker.hashing import mix

log = logging.getLogger(__name__)

MOST_VAL_QUERIES = 1000  # largest number of queries that are moved from train by default
Names = str | list[str]


class Rows:
    """Train, validate and test on rows of files, which are read once, into memory-mapped tables below `cache_dir`.

    Five shapes of rows are recognised by their columns (`ranker.data.row_shapes`). Equal texts are one doc or one
    query; its id is a hash of the text. A doc that is relevant to a query in one row is relevant to this query in all
    rows.

    Args:
        train: Files, globs, folders that `datasets` saved, or names of the hub; None: no training set.
        val: The same for validation; None: `val_queries` training queries are moved to validation.
        test: The same for one test set with the name `rows`; or a mapping from names to files.
        docs: Files of docs with ids and texts, for rows of ids; None: rows have texts.
        queries: Files of queries with ids and texts, for rows of ids; None: rows have texts.
        columns: Role of a column -> its name, or a list of names for `negative`; other columns are ignored. None: the
            names of the columns show their roles.
        relevance: Smallest grade that counts as relevant.
        score_relevance: Smallest score that counts as relevant in rows with scores only; None: the best doc of each
            query is relevant.
        alike: Whether training groups draw docs without regard to their grade. None: true if rows have scores only.
        val_queries: If `val` is None: number of training queries to move to validation, chosen by hash. None: a tenth,
            at most 1,000.
        split_seed: Seed of the hash.
        cache_dir: Folder of the tables; the program passes its `cache_dir`.
    """

    def __init__(
        self,
        train: str | list[str] | None = None,
        val: str | list[str] | None = None,
        test: str | list[str] | dict[str, Any] | None = None,
        docs: str | list[str] | None = None,
        queries: str | list[str] | None = None,
        columns: dict[str, Any] | None = None,
        relevance: int = 1,
        score_relevance: float | None = None,
        alike: bool | None = None,
        val_queries: int | None = None,
        split_seed: int = 0,
        cache_dir: str = ".cache",
    ) -> None:
        self._names: dict[str, Names] = {"train": train} if train else {}
        self._names |= {"val": val} if val else {}
        self._tests: dict[str, Names] = test if isinstance(test, dict) else {"rows": test} if test else {}
        if not self._names and not self._tests:
            raise ConfigError("data.train: expected files for train, val or test, got none; set data.train=FILE")
        if (docs is None) != (queries is None):
            raise ConfigError("data.docs: expected data.docs and data.queries together, got one; set both")
        self._docs, self._queries, self._columns = docs, queries, columns
        self._relevant, self._alike = Relevant(relevance, score_relevance), alike
        self._val_queries, self._split_seed = val_queries, split_seed
        self._cache_dir = Path(cache_dir)

    def check(self) -> None:
        """Check that all files exist, without reading them.

        Raises:
            DataError: A file does not exist.
        """
        self._sources()

    def load(self) -> Splits:
        """Open the tables, which are built first if files or options are new.

        Raises:
            DataError: A file is missing or faulty, a row is faulty (with file, row and column), or two splits share a
                query.
        """
        sources = self._sources()
        folder = self._cache_dir / f"rows-{self._key(sources)}"
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                with write_folder(folder) as unfinished:
                    build_rows(sources, unfinished, self._relevant)
        verify_folder(folder, fix="the file is damaged; delete {folder}, it is built anew")
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        table = TextTable(folder, "docs", meta["docs"])
        docs = TableDocs(table)

        def rows_of(name: str, members: np.ndarray | None = None) -> RowSet:
            facts = meta["sets"][name]
            queries = TextTable(folder, f"{name}.queries", facts["queries"])
            return RowSet(folder, name, queries, table, facts, members)

        train = val = None
        if "train" in sources.sets:
            rows = rows_of("train")
            if "val" not in sources.sets and (held_out := self._held_out(rows)).any():
                rows = rows_of("train", np.flatnonzero(~held_out))
                val = self._collection("val", docs, rows_of("train", np.flatnonzero(held_out)))
            train = self._collection("train", docs, rows)
        if "val" in sources.sets:
            val = self._collection("val", docs, rows_of("val"))
        tests = {name: self._collection(name, docs, rows_of(f"test-{name}")) for name in self._tests}
        splits = Splits(train, val, tests)
        check_disjoint(splits)
        return splits

    def _sources(self) -> RowSources:
        sets = {part: find_files(names, f"data.{part}", part) for part, names in self._names.items()}
        for name, names in self._tests.items():
            if not name or not all(character.isalnum() or character in "-_." for character in name):
                raise ConfigError(f"data.test: expected names of letters, digits, -, _ and ., got {name!r}; rename it")
            sets[f"test-{name}"] = find_files(names, "data.test", "test")
        docs, queries = (
            find_files(names, f"data.{key}", key) if names else None
            for key, names in (("docs", self._docs), ("queries", self._queries))
        )
        return RowSources(sets, docs, queries, self._columns)

    def _key(self, sources: RowSources) -> str:
        """Return a hash of the files (by path, size and time of change) and of the options that decide the tables."""
        states = [(str(path.absolute()), path.stat().st_size, path.stat().st_mtime_ns) for path in sources.files()]
        sizes = {name: len(paths) for name, paths in sources.sets.items()}
        key = [FORMAT, states, sizes, self._columns, self._relevant.grade, self._relevant.score]
        return hashlib.blake2b(json.dumps(key).encode(), digest_size=10).hexdigest()

    def _held_out(self, rows: RowSet) -> np.ndarray:
        """Return which training queries are moved to validation, bool [queries]."""
        count = min(MOST_VAL_QUERIES, len(rows) // 10) if self._val_queries is None else self._val_queries
        if not 0 <= count < len(rows):
            raise DataError(
                f"data.val_queries: expected fewer than the {len(rows)} training queries, got {count}; lower it, or "
                "name files with data.val"
            )
        held_out = np.zeros(len(rows), dtype=bool)
        held_out[np.argsort(mix(self._split_seed, rows.queries.hashes()), kind="stable")[:count]] = True
        if count:
            log.info(
                "train: no validation set: %d of %d queries are moved from training to a new one, chosen by a hash of "
                "their ids (seed %d)",
                count,
                len(rows),
                self._split_seed,
            )
        return held_out

    def _collection(self, name: str, docs: TableDocs, rows: RowSet) -> Collection:
        queries: Mapping[str, str] = rows.queries
        instructions = Half(queries, True) if "instruction" in (self._columns or {}) else None
        collection = Collection(
            name,
            docs,
            queries if instructions is None else Half(queries, False),
            RowQrels(rows),
            relevance=self._relevant.grade,
            rows=rows,
            alike=self._alike,
            instructions=instructions,
        )
        if name == "train":
            return collection
        without = int((np.asarray(rows.positives) == 0).sum())
        if without:
            log.warning(
                "%s: %d of %d queries have no relevant doc among their rows; all measures are 0 for them",
                name,
                without,
                len(rows),
            )
        return collection
