"""Any collection of ir_datasets, by its ids."""

from __future__ import annotations

from ranker.data.collection import Splits
from ranker.data.ir_datasets_splits import SplitReader


class IrDatasets:
    """Train, validate and test on ids of ir_datasets; see https://ir-datasets.com for them.

    Args:
        train: Id to train on; None only evaluates.
        val: Id to validate on; None cuts queries from train.
        test: Id or ids to test on; each is named by the last part of its id that says what it is, as `scifact` for
            `beir/scifact/test`.
        train_candidates: Where training docs come from: `docpairs` (the data set's triples), `scoreddocs`, `bm25` (made
            here) or a run file's path. None: the first of docpairs, scoreddocs and bm25 that there is.
        candidates: What is re-ranked in validation and tests: `scoreddocs`, `bm25`, or by id one of these or a run
            file. None: scoreddocs where the data set has them, else bm25.
        relevance: Smallest grade that counts as relevant, for all sets or by id. None: 2 for TREC DL passage sets, 1
            for others.
        val_queries: Validate on so many judged queries, chosen by hash. None: all of `val`, or a tenth of train where
            `val` is None.
        max_triples: Only the first so many docpairs; None: all.
        split_seed: Seed of the hash.

    Raises:
        ConfigError: Repeated test ids, or an option that fits none of the sets.
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
        """Look up the ids and run files, without reading them.

        Raises:
            DataError: An unknown id, or no such run file.
        """
        self._reader.check()

    def load(self) -> Splits:
        """Read all sets; what is not on this machine yet is downloaded.

        Raises:
            DataError: An unknown id, a set that cannot be read or lacks what it is named for, or sets that share
                queries.
        """
        return self._reader.read()
