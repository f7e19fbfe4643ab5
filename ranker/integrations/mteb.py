"""Models for `mteb.evaluate`, by mteb's protocols of encoders and cross-encoders (needs the extra `mteb`).

>>> import mteb  # doctest: +SKIP
>>> from ranker.integrations.mteb import load  # doctest: +SKIP
>>> mteb.evaluate(load("outputs/monobert/STAMP"), mteb.get_tasks(tasks=["AskUbuntuDupQuestions"]))  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from mteb.models import ModelMeta
from mteb.types import PromptType

from ranker import Reranker
from ranker.assembly.text_vectors import encode, require_bi_encoder
from ranker.models.interface import is_bi_encoder
from ranker.retrieval.encode import scorer_hash


def load(folder: str | Path, name: str | None = None, **options: Any) -> MtebEncoder | MtebCrossEncoder:
    """Load a run folder, or any folder that `Reranker.load` takes, as a model for mteb.

    Args:
        folder: The folder.
        name: Name in mteb's results, `ORGANISATION/MODEL`; None: `ranker/` followed by the folder's name.
        options: Options of `Reranker.load`.

    Returns:
        `MtebEncoder` for a bi-encoder with one vector per text, which mteb can also use for search. `MtebCrossEncoder`
        for any other model.
    """
    reranker = Reranker.load(folder, **options)
    name = name or f"ranker/{Path(folder).expanduser().resolve().name}"
    scorer = reranker.scorer
    if is_bi_encoder(scorer) and scorer.vectors == "one":
        return MtebEncoder(reranker, name)
    return MtebCrossEncoder(reranker, name)


class MtebCrossEncoder:
    """Any model as mteb's `CrossEncoderProtocol`.

    Args:
        reranker: The model.
        name: `ORGANISATION/MODEL`.
    """

    def __init__(self, reranker: Reranker, name: str) -> None:
        self.reranker = reranker
        self.mteb_model_meta = _meta(reranker, name, model_type=["cross-encoder"])

    def predict(self, inputs1: Iterable[Any], inputs2: Iterable[Any], **_: Any) -> np.ndarray:
        """Return the scores of pairs, float32 [pairs].

        Args:
            inputs1: Batches whose `text` contains the queries of the pairs.
            inputs2: Batches whose `text` contains the docs of the pairs.
        """
        return self.reranker.score(zip(_texts(inputs1), _texts(inputs2), strict=True), progress=False)


class MtebEncoder:
    """A bi-encoder with one vector per text as mteb's `EncoderProtocol`.

    Args:
        reranker: The model.
        name: `ORGANISATION/MODEL`.

    Raises:
        CheckpointError: The model is not a bi-encoder.
    """

    def __init__(self, reranker: Reranker, name: str) -> None:
        self.reranker, scorer = reranker, require_bi_encoder(reranker)
        self.mteb_model_meta = _meta(reranker, name, embed_dim=scorer.dim, similarity_fn_name=scorer.similarity)

    def encode(self, inputs: Iterable[Any], *, prompt_type: PromptType | None = None, **_: Any) -> np.ndarray:
        """Return a vector for each text, float32 [texts, dim]. Texts of an unknown type are encoded as queries.

        Args:
            inputs: Batches whose `text` contains the texts.
            prompt_type: Whether the texts are queries or docs.
        """
        return encode(self.reranker, _texts(inputs), are_queries=prompt_type != PromptType.document)

    def similarity(self, embeddings1: Any, embeddings2: Any) -> np.ndarray:
        """Return all inner products, [first texts, second texts]. A cosine model's vectors have length 1."""
        return np.asarray(embeddings1) @ np.asarray(embeddings2).T

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> np.ndarray:
        """Return the inner product of each pair of vectors, [texts]."""
        return (np.asarray(embeddings1) * np.asarray(embeddings2)).sum(axis=-1)


def _texts(batches: Iterable[Any]) -> list[str]:
    return [text for batch in batches for text in batch["text"]]


def _meta(reranker: Reranker, name: str, **facts: Any) -> ModelMeta:
    """Return a model's description for mteb. Its revision is a hash, which keeps results of different models apart."""
    parameters = sum(parameter.numel() for parameter in reranker.scorer.parameters())
    values = {"name": name, "revision": scorer_hash(reranker.scorer), "n_parameters": parameters, **facts}
    return ModelMeta.create_empty(overwrites={**values, "framework": ["PyTorch"]})
