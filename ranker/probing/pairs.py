"""Sample the pairs to probe, and assign each pair to train, val or test. By default, parts share no query."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ranker.data.collection import Collection
from ranker.data.splits import split_queries
from ranker.errors import ConfigError, DataError
from ranker.probing.examples import PairSample, ProbeExample

GROUPINGS = ("query", "doc", "pair")


def sample_pairs(
    collection: Collection,
    max_pairs: int,
    docs_per_query: int,
    depth: int,
    seed: int,
    val_fraction: float,
    test_fraction: float,
) -> PairSample:
    """Sample pairs: take queries with candidates in random order, and draw docs of each query, until `max_pairs`.

    Docs are drawn uniformly from the query's first `depth` candidates.

    Args:
        collection: Queries with candidates.
        max_pairs: Maximum number of pairs.
        docs_per_query: Maximum number of docs per query.
        depth: Docs are drawn from this number of top candidates of a query.
        seed: Seed of shuffle and draws.
        val_fraction: Share of the queries for validation.
        test_fraction: Share of the queries for the test.

    Raises:
        DataError: No query has candidates.
    """
    candidates = collection.candidates
    if candidates is None or not any(len(candidates.ids(query_id)) for query_id in collection.queries):
        raise DataError(
            f"{collection.name}: expected queries with candidates to probe, got none; take another data or split"
        )
    queries = [query_id for query_id in collection.queries if len(candidates.ids(query_id))]
    rng = np.random.default_rng(seed)
    pairs: list[tuple[str, str]] = []
    used: list[str] = []
    for query_id in (queries[i] for i in rng.permutation(len(queries))):
        if len(pairs) >= max_pairs:
            break
        docs = candidates[query_id][:depth]
        used.append(query_id)
        pairs += [(query_id, docs[i]) for i in rng.permutation(len(docs))[:docs_per_query]]
    ids = split_queries(used, val_fraction, test_fraction, seed)
    part_names = {"train": "train", "dev": "val", "test": "test"}
    part_of = {query_id: part_names[part] for part, members in ids.items() for query_id in members}
    parts = {query_id: part_of[query_id] for query_id in used}
    return PairSample(collection, tuple(pairs[:max_pairs]), max_pairs, docs_per_query, depth, seed, parts)


def assign_parts(
    examples: Sequence[ProbeExample], sample: PairSample, group_by: str, val_fraction: float, test_fraction: float
) -> list[str]:
    """Return the part of each example: `train`, `val` or `test`.

    If the source of the examples assigns train, val and test, these parts are used. If the source assigns only train
    and test, validation examples are taken from train. Otherwise a seeded hash of the query (or doc, or pair) decides.

    Args:
        examples: A task's examples.
        sample: The sample; with `group_by="query"`, its parts are used, so that tasks on the same pairs have the same
            split.
        group_by: Unit that train, val and test may not share: `query`, `doc` or `pair` (the published split).
        val_fraction: Share for validation.
        test_fraction: Share for the test.

    Raises:
        ConfigError: An unknown `group_by`.
        DataError: A part is empty, or with `group_by="query"` a source puts a query into two parts.
    """
    if group_by not in GROUPINGS:
        raise ConfigError(f"group_by: expected one of {', '.join(GROUPINGS)}; got {group_by!r}")
    given = {example.part for example in examples}
    if given >= {"train", "val", "test"}:
        parts = [example.part or "train" for example in examples]
    elif given >= {"train", "test"}:
        training = [_group(example, group_by) for example in examples if example.part == "train"]
        held_out = set(split_queries(dict.fromkeys(training), val_fraction, 0.0, sample.seed)["dev"])
        parts = [
            "val" if example.part == "train" and _group(example, group_by) in held_out else example.part or "train"
            for example in examples
        ]
    elif group_by == "query" and all(example.query_id in sample.parts for example in examples):
        parts = [sample.parts[example.query_id] for example in examples]
    else:
        ids = split_queries(
            dict.fromkeys(_group(example, group_by) for example in examples), val_fraction, test_fraction, sample.seed
        )
        held = dict.fromkeys(ids["dev"], "val") | dict.fromkeys(ids["test"], "test")
        parts = [held.get(_group(example, group_by), "train") for example in examples]
    part_of: dict[str, str] = {}
    for example, part in zip(examples, parts, strict=True):
        if group_by == "query" and part_of.setdefault(example.query_id, part) != part:
            raise DataError(
                f"probing pairs: expected each query in one part, got {example.query_id!r} in "
                f"{part_of[example.query_id]} and {part} of its source; fix the source, or set group_by=pair"
            )
    missing = {"train", "val", "test"} - set(parts)
    if missing:
        raise DataError(
            f"probing pairs: expected examples in train, val and test, got none in {', '.join(sorted(missing))} "
            f"of {len(examples)}; raise max_pairs, val_fraction or test_fraction"
        )
    return parts


def source_assigns_parts(examples: Sequence[ProbeExample]) -> bool:
    """Return whether the source assigns train and test; then `group_by` affects at most the validation part."""
    return {example.part for example in examples} >= {"train", "test"}


def _group(example: ProbeExample, group_by: str) -> str:
    return {"query": example.query_id, "doc": example.doc_id, "pair": f"{example.query_id}\t{example.doc_id}"}[group_by]
