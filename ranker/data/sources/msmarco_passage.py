"""MS MARCO passages (Nguyen et al., 2016), tested on TREC Deep Learning 2019 and 2020 (Craswell et al., 2020, 2021)."""

from __future__ import annotations

from ranker.data.collection import Splits
from ranker.data.ir_datasets_splits import SplitReader

_NAME = "msmarco-passage"


class MsMarcoPassage:
    """Train on MS MARCO, validate on dev/small, test on the judged queries of TREC DL 2019 and 2020.

    In the two test sets, docs are relevant from grade 2 on.

    Args:
        train: Training subset, such as `train` or `train/triples-v2`; None: no training set.
        train_candidates: `docpairs` (triples), `bm25`, `scoreddocs` (the official 1,000 unranked docs per query) or the
            path of a run file.
        candidates: `bm25` or `scoreddocs` (the official 1,000 unranked docs per query, only for depth 1000); or a
            mapping from ids to one of these two or to a run file.
        val_queries: Number of the 6,980 queries of dev/small to validate on, chosen by hash; None: all.
        max_triples: Number of the 397 million triples to read, from the first; None: all.
        test: Subset or subsets to test on.
        split_seed: Seed of the choice of `val_queries`.
    """

    def __init__(
        self,
        train: str | None = "train",
        train_candidates: str = "docpairs",
        candidates: str | dict[str, str] = "bm25",
        val_queries: int | None = None,
        max_triples: int | None = None,
        test: str | list[str] | tuple[str, ...] = ("trec-dl-2019/judged", "trec-dl-2020/judged"),
        split_seed: int = 0,
    ) -> None:
        self._reader = SplitReader(
            train=None if train is None else f"{_NAME}/{train}",
            val=f"{_NAME}/dev/small",
            test=[f"{_NAME}/{subset}" for subset in ([test] if isinstance(test, str) else test)],
            train_candidates=train_candidates,
            candidates=candidates,
            relevance=None,
            val_queries=val_queries,
            max_triples=max_triples,
            split_seed=split_seed,
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
            DataError: A subset is unknown or can't be read.
        """
        return self._reader.read()
