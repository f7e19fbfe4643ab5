"""Controls measure how far a probe can compress labels without the information that the task asks about.

The compression of a task is compared with that of its controls.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

import numpy as np

from ranker.errors import ConfigError
from ranker.probing.examples import ProbeExample, Target
from ranker.probing.words import content_stems, first_content_word

MAIN = "none"  # value of the column `control` for the task itself
CONTROLS = ("label_prior", "random_embeddings", "random_encoder", "control_task", "shuffled", "surface")


def check_controls(names: Sequence[str]) -> None:
    """Check the names of controls.

    Raises:
        ConfigError: A name is not in `CONTROLS`.
    """
    for name in names:
        if name not in CONTROLS:
            raise ConfigError(f"controls: expected some of {', '.join(CONTROLS)}; got {name!r}")


def type_of(example: ProbeExample, target: Target) -> str:
    """Return the word type that decides the label of the control task (Hewitt and Liang, EMNLP 2019, arXiv:1909.03368).

    The word type is the lower-case text of the first span; for a whole query, it is the query's first content word.
    """
    first = target.spans[0]
    text = example.text_of(first).lower()
    return first_content_word(text) if first.start is None else " ".join(text.split())


def control_labels(types: Sequence[str], labels: np.ndarray, train: np.ndarray, classes: int, seed: int) -> np.ndarray:
    """Return the labels of the control task: each word type gets a random label, which a probe can only memorise.

    A seeded hash of the word type draws the label from the distribution of the training labels.

    Args:
        types: Word type of each target.
        labels: Class of each target in the task, int64 [targets].
        train: True at training targets, bool [targets].
        classes: Number of classes.
        seed: Seed of the hash.

    Returns:
        int64 [targets]

    >>> labels = control_labels(["a", "b", "a"], np.array([0, 1, 1]), np.array([True, True, True]), 2, seed=0)
    >>> bool(labels[0] == labels[2])
    True
    """
    edges = np.cumsum(np.bincount(labels[train], minlength=classes)) / max(1, train.sum())
    uniform = np.array(
        [int.from_bytes(hashlib.blake2b(f"{seed}:{word}".encode(), digest_size=8).digest()) / 2**64 for word in types]
    )
    return np.minimum(np.searchsorted(edges, uniform, side="right"), classes - 1).astype(np.int64)


def shuffled_labels(labels: np.ndarray, parts: np.ndarray, seed: int) -> np.ndarray:
    """Shuffle the labels within train, within val and within test.

    If probes then compress better than the label prior, there is a leak.

    Args:
        labels: int64 [targets].
        parts: `train`, `val` or `test` for each target, str [targets].
        seed: Seed of the order.

    Returns:
        int64 [targets]
    """
    shuffled = labels.copy()
    rng = np.random.default_rng([seed, 1])
    for part in np.unique(parts):
        members = np.flatnonzero(parts == part)
        shuffled[members] = labels[rng.permutation(members)]
    return shuffled


def surface_features(query: str, doc: str) -> list[float]:
    """Compute features that need no encoder, from content stems.

    Returns:
        Five numbers: the number of the query's words; that of the doc's words; the number of different words that occur
        in both; the share of the query's different words that occur in the doc; the term frequency (a query word's
        count in the doc divided by the doc's length, averaged over the query words).

    >>> surface_features("red birds", "A red bird, a red fox")
    [2.0, 4.0, 2.0, 1.0, 0.375]
    """
    query_words, doc_words = content_stems(query), content_stems(doc)
    counts = Counter(doc_words)
    shared = {word for word in query_words if counts[word]}
    total = sum(counts[word] for word in query_words)
    return [
        float(len(query_words)),
        float(len(doc_words)),
        float(len(shared)),
        len(shared) / len(set(query_words)) if query_words else 0.0,
        total / len(doc_words) / len(query_words) if query_words and doc_words else 0.0,
    ]


def standardised(features: np.ndarray, train: np.ndarray) -> np.ndarray:
    """Shift and scale each feature to mean 0 and standard deviation 1 on the training rows.

    Args:
        features: [rows, features]
        train: True at training rows, bool [rows].

    Returns:
        float32 [rows, features]
    """
    mean, std = features[train].mean(axis=0), features[train].std(axis=0)
    return ((features - mean) / np.where(std > 0, std, 1.0)).astype(np.float32)
