"""Collections of ir_datasets, which are named by id."""

from __future__ import annotations

from ranker.data.collection import Splits
from ranker.data.ir_datasets_splits import SplitReader


class IrDatasets:
    """Train, validate and test on ids of ir_datasets; https://ir-datasets.com lists the ids.

    Args:
        train: Id to train on; None: no training set.
        val: Id to validate on; None: queries are moved from train.
        test: Id or ids to test on. The name of a set is the last part of its id that does not name a split: `scifact`
            for `beir/scifact/test`.
        train_candidates: Source of the training docs: `docpairs` (triples of the data set), `scoreddocs`, `bm25`
            (computed) or the path of a run file. None: the first of docpairs, scoreddocs and bm25 that is available.
        candidates: Docs to re-rank in validation and tests: `scoreddocs` or `bm25`, or a mapping from ids to one of
            these two or to a run file. None: scoreddocs if the data set has scoreddocs, else bm25.
        relevance: Smallest grade that counts as relevant, for all sets or by id. None: 2 for TREC DL passage sets, else
            1.
        val_queries: Number of judged queries to validate on, chosen by hash. None: all queries of `val`, or a tenth of
            train if `val` is None.
        max_triples: Number of docpairs to read, from the first; None: all.
        split_seed: Seed of the hash.

    Raises:
        ConfigError: A test id is repeated, or an option names an id that no set uses.
    """

    def __init__(
        self,
        train: str | None = None,
        val: str | None = None,
        test: str | list[str] | tuple[str, ...] = (),
        train_candidates: str | None = None,
        candidates: str | dict[str, str] | None = None,
        relevance: int | dict[str, int] | None = None,
        val_queries: int | None = None,
        max_triples: int | None = None,
        split_seed: int = 0,
    ) -> None:
        self._reader = SplitReader(
            train, val, test, train_candidates, candidates, relevance, val_queries, max_triples, split_seed
        )

    def check(self) -> None:
        """Check that the ids and run files exist, without reading them.

        Raises:
            DataError: An id is unknown, or a run file is missing.
        """
        self._reader.check()

    def load(self) -> Splits:
        """Read all sets; missing files are downloaded.

        Raises:
            DataError: An id is unknown, a set can't be read or lacks data that its use requires, or two sets share a
                query.
        """
        return self._reader.read()
