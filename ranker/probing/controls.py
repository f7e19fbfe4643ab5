"""Controls: what a probe finds where there is nothing to find, so that a number can be read."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

import numpy as np

from ranker.errors import ConfigError
from ranker.probing.examples import ProbeExample, Target
from ranker.probing.words import content_stems, first_content_word

MAIN = "none"
CONTROLS = ("label_prior", "random_embeddings", "random_encoder", "control_task", "shuffled", "surface")


def check_controls(names: Sequence[str]) -> None:
    """Refuse unknown names.

    Raises:
        ConfigError: A control that there is not.
    """
    for name in names:
        if name not in CONTROLS:
            raise ConfigError(f"controls: expected some of {', '.join(CONTROLS)}; got {name!r}")


def type_of(example: ProbeExample, target: Target) -> str:
    """What the control task's label hangs on (Hewitt and Liang, EMNLP 2019, arXiv:1909.03368).

    The lower-case text of the first span; of a whole query, its first content word.
    """
    first = target.spans[0]
    text = example.text_of(first).lower()
    return first_content_word(text) if first.start is None else " ".join(text.split())


def control_labels(types: Sequence[str], labels: np.ndarray, train: np.ndarray, classes: int, seed: int) -> np.ndarray:
    """A label for each type by seeded hash, drawn from the histogram of the training labels; a probe can only learn it by heart.

    Args:
        types: Type of each target.
        labels: True classes, int64 [targets].
        train: True at training targets, bool [targets].
        classes: Number of classes.
        seed: Seed of the hash.

    >>> made = control_labels(["a", "b", "a"], np.array([0, 1, 1]), np.array([True, True, True]), 2, seed=0)
    >>> bool(made[0] == made[2])
    True
    """
    edges = np.cumsum(np.bincount(labels[train], minlength=classes)) / max(1, train.sum())
    places = np.array(
        [int.from_bytes(hashlib.blake2b(f"{seed}:{kind}".encode(), digest_size=8).digest()) / 2**64 for kind in types]
    )
    return np.minimum(np.searchsorted(edges, places, side="right"), classes - 1).astype(np.int64)


def shuffled_labels(labels: np.ndarray, parts: np.ndarray, seed: int) -> np.ndarray:
    """The labels of each part in a random order: what compresses now is the label prior alone, anything more is a leak.

    Args:
        labels: int64 [targets].
        parts: Part of each target [targets].
        seed: Seed of the order.
    """
    made = labels.copy()
    rng = np.random.default_rng([seed, 1])
    for part in np.unique(parts):
        own = np.flatnonzero(parts == part)
        made[own] = labels[rng.permutation(own)]
    return made


SURFACE = ("query words", "doc words", "shared words", "share of the query's words", "term frequency")


def surface_features(query: str, doc: str) -> list[float]:
    """Lengths, overlap and term frequency: what can be told without any encoder.

    >>> surface_features("red birds", "A red bird, a red fox")
    [2.0, 4.0, 2.0, 1.0, 0.375]
    """
    asked, told = content_stems(query), content_stems(doc)
    counts = Counter(told)
    shared = {word for word in asked if counts[word]}
    frequency = sum(counts[word] for word in asked) / len(told) / len(asked) if asked and told else 0.0
    return [
        float(len(asked)),
        float(len(told)),
        float(len(shared)),
        len(shared) / len(set(asked)) if asked else 0.0,
        frequency,
    ]


def standardised(features: np.ndarray, train: np.ndarray) -> np.ndarray:
    """Features of mean 0 and standard deviation 1 over the training rows, float32 [rows, features]."""
    mean, std = features[train].mean(axis=0), features[train].std(axis=0)
    return ((features - mean) / np.where(std > 0, std, 1.0)).astype(np.float32)
