"""Rank and score texts in Python with a trained model: `from ranker import Reranker`."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import numpy as np
from lightning.fabric import Fabric
from omegaconf import DictConfig, OmegaConf

from ranker.assembly.data import CPU_SCORING_TOKENS, GPU_TOKENS, text_limits
from ranker.assembly.given_docs import docs_of, lists_of
from ranker.assembly.given_texts import Encode, GivenTexts
from ranker.assembly.inference import prepare
from ranker.assembly.precision import checked_precision, chosen, refuse_half
from ranker.assembly.probabilities import read_calibration
from ranker.assembly.run import quiet_libraries
from ranker.checkpoint import load_scorer, read_description
from ranker.data.collection import Candidates, Collection, Doc, MemoryDocs
from ranker.data.score_batches import ScoreBatches
from ranker.data.scorer_inputs import TextLimits
from ranker.errors import CheckpointError, DataError
from ranker.evaluation.calibration import Calibration
from ranker.evaluation.scoring import Devices, score_collection
from ranker.files.checksums import verify_folder
from ranker.models.interface import Scorer
from ranker.release.onnx_program import OnnxProgram, is_program

LONG_WORK = 2000  # a terminal shows a progress bar if at least this many pairs are scored
Text = str | Mapping[str, str] | Doc


@dataclass(frozen=True)
class Ranked:
    """A doc of a ranking.

    Args:
        doc_id: Id of the doc. A doc without an id gets its position in the input as its id (a string).
        score: The doc's score, or its probability of relevance; higher is better.
        position: The doc's position in the input, from 0.
    """

    doc_id: str
    score: float
    position: int


class Reranker:
    """A trained model that ranks and scores texts.

    >>> reranker = Reranker.load("outputs/demo/...")  # doctest: +SKIP
    >>> reranker.rank("who wrote Faust", ["Goethe wrote it.", "A city in Saxony."], top_k=1)  # doctest: +SKIP
    [Ranked(doc_id='0', score=3.1, position=0)]

    Args:
        scorer: The model.
        limits: Largest number of tokens per text.
        accelerator: `auto`, `cpu` or `cuda`.
        precision: As `trainer.precision`. None: `bf16-mixed` on a GPU that supports bfloat16 and on a CPU where
            bfloat16 is faster, else `32-true`.
        max_tokens: Token budget of a batch; None: 32,768 on a GPU, else 4,096.
        calibration: The map from scores to probabilities of relevance; None: scores are returned unchanged.

    Raises:
        ConfigError: The scorer's encoder or this CPU does not support the precision.

    Attributes:
        devices: The device and the precision of forward passes.
        precision: The precision, as Lightning names it.
        texts: Tokenizes and collates texts for the scorer.
    """

    def __init__(
        self,
        scorer: Scorer,
        limits: TextLimits,
        accelerator: str = "auto",
        precision: Any = None,
        max_tokens: int | None = None,
        calibration: Calibration | None = None,
    ) -> None:
        quiet_libraries()
        refuse_half(precision, scorer.encoder)
        self.calibration = calibration
        trainer = {"accelerator": accelerator, "num_nodes": 1, "precision": precision}
        if precision is None:
            trainer["precision"], _ = chosen(trainer, scorer.encoder)
        fabric = Fabric(accelerator=accelerator, devices=1, precision=checked_precision(trainer))
        plugin: Any = fabric.strategy.precision
        self.scorer: Any = plugin.convert_module(scorer)
        self.devices, self.precision = Devices.of_fabric(fabric), str(plugin.precision)
        self.texts = GivenTexts(scorer, limits)
        self.max_tokens = max_tokens or (GPU_TOKENS if fabric.device.type == "cuda" else CPU_SCORING_TOKENS)

    @classmethod
    def of_config(cls, cfg: DictConfig, **options: Any) -> Self:
        """Load the model named by a configuration of `ranker rerank` or `ranker serve`; options are those of `load`."""
        return cls.load(
            cfg.checkpoint,
            cfg.weights,
            cfg.trust_remote_code,
            cfg.max_query_tokens,
            cfg.max_doc_tokens,
            cfg.inference,
            accelerator=cfg.trainer.accelerator,
            precision=cfg.trainer.precision,
            max_tokens=cfg.batch.max_tokens,
            **options,
        )

    @classmethod
    def load(
        cls,
        folder: str | Path,
        weights: str = "best",
        trust_remote_code: bool = False,
        max_query_tokens: int | None = None,
        max_doc_tokens: int | None = None,
        inference: Mapping[str, Any] = MappingProxyType({}),
        **options: Any,
    ) -> Self:
        """Load a run folder, its `model/` folder, an export, or a folder of sentence-transformers or transformers.

        Texts are cut as in the model's training.

        Args:
            folder: The folder.
            weights: For a run folder: `best` or `last`.
            trust_remote_code: Whether to allow running code from the folder.
            max_query_tokens: Largest number of tokens of a query; None: as in training, else 64.
            max_doc_tokens: Largest number of tokens of a doc; None: as in training, else 448.
            inference: How the model computes, with the keys of `inference` in conf/evaluate.yaml.
            options: `accelerator`, `precision` and `max_tokens`, see `Reranker`. With `probabilities=True`, scores are
                probabilities of relevance by the folder's `calibration.json`; with `calibration=FILE`, by that file.

        Raises:
            CheckpointError: The folder has no model that can be loaded, or no map to probabilities.
        """
        quiet_libraries()
        path = Path(folder).expanduser()
        options["calibration"] = read_calibration(
            path, options.pop("probabilities", False), options.pop("calibration", None)
        )
        trained = OmegaConf.create(read_description(path))
        scorer: Any
        if is_program(path):
            verify_folder(path, error=CheckpointError)
            scorer = OnnxProgram(path)
        else:
            scorer = load_scorer(path, weights, trust_remote_code=trust_remote_code)
            scorer = prepare(scorer, inference, options.get("accelerator", "auto"))
        limits = text_limits(scorer, trained)
        limits = replace(limits, query=max_query_tokens or limits.query, doc=max_doc_tokens or limits.doc)
        return cls(scorer, limits, **options)

    def tokenized_by(self, replaced: Callable[[Sequence[Any]], Sequence[Encode]]) -> Self:
        """Return this reranker with replaced tokenizers, see `GivenTexts.tokenized_by`."""
        other = copy.copy(self)
        other.texts = self.texts.tokenized_by(replaced)
        return other

    def rank(
        self,
        query: str | Sequence[str],
        docs: Sequence[Text] | Sequence[Sequence[Text]] | Mapping[str, str],
        top_k: int | None = None,
        progress: bool | None = None,
    ) -> Any:
        """Order docs by their score, best first; docs with equal scores keep their order.

        Args:
            query: A query, or several.
            docs: The docs of the query: texts, mappings with `text` and perhaps `id` and `title`, or one mapping from
                ids to texts. For several queries: a list of docs for each query, or one list of texts for all queries.
            top_k: Docs to return for a query; None: all.
            progress: Whether to show a progress bar; None: on a terminal, for many pairs.

        Returns:
            list[Ranked] for one query, and a list of such lists for several queries.

        Raises:
            DataError: A doc is not a text, two docs of a query have the same id, or there are more or fewer lists than
                queries.
        """
        if top_k is not None and top_k < 1:
            raise DataError(f"top_k: expected at least 1 or None, got {top_k!r}")
        single = isinstance(query, str)
        queries: list[str] = [query] if isinstance(query, str) else list(query)
        lists = [docs_of(part) for part in lists_of(docs, len(queries), single)]
        pairs = [(text, doc.full_text) for text, part in zip(queries, lists, strict=True) for doc in part]
        numbers = [number for number, part in enumerate(lists) for _ in part]
        titles = {doc.full_text: doc.title for part in lists for doc in part if doc.title}
        scores = self._scores(pairs, titles, progress, numbers)
        rankings, start = [], 0
        for part in lists:
            values = scores[start : start + len(part)]
            start += len(part)
            order = np.argsort(-values, kind="stable")[:top_k]
            values = values if self.calibration is None else self.calibration(values)
            rankings.append([Ranked(part[i].doc_id, float(values[i]), int(i)) for i in order])
        return rankings[0] if single else rankings

    def score(self, pairs: Iterable[tuple[str, str]], progress: bool | None = None) -> np.ndarray:
        """Return the scores of pairs of a query and a doc, float32 [pairs], or their probabilities, float64 [pairs].

        Each text is tokenized once. A model of lists reads all pairs of a query as one list. Pairs have no titles, so
        use `rank` with a model that repeats the title in each window of a doc.

        Args:
            pairs: The pairs.
            progress: As in `rank`.

        Raises:
            DataError: A pair does not consist of two texts, or a score is not finite.
        """
        wanted = list(pairs)
        for pair in wanted:
            if len(pair) != 2 or not all(isinstance(text, str) for text in pair):
                raise DataError(f"pairs: expected a query and a doc, both texts; got {pair!r:.200}")
        numbers = {query: number for number, query in enumerate(dict.fromkeys(query for query, _ in wanted))}
        scores = self._scores(wanted, {}, progress, [numbers[query] for query, _ in wanted])
        return scores if self.calibration is None else self.calibration(scores)

    def _scores(
        self,
        wanted: Sequence[tuple[str, str]],
        titles: Mapping[str, str],
        progress: bool | None,
        lists: Sequence[int],
    ) -> np.ndarray:
        """Return the scores of pairs, float32 [pairs].

        Args:
            wanted: The pairs.
            titles: Text of a doc -> the title that it begins with.
            progress: See `rank`.
            lists: The index of each pair's list [pairs]; only models of lists use it.
        """
        if not wanted:
            return np.zeros(0, dtype=np.float32)
        whole = self.texts.inputs.whole_lists
        # a model of lists reads a repeated doc twice; any other model scores a text once per query
        keys = list(zip(lists, range(len(wanted)), strict=True)) if whole else list(wanted)
        query_ids, doc_ids = (
            {key: str(i) for i, key in enumerate(dict.fromkeys(column))} for column in zip(*keys, strict=True)
        )
        docs_of: dict[str, dict[str, None]] = {}
        texts: tuple[dict[str, str], dict[str, str]] = {}, {}
        named = [(query_ids[query], doc_ids[doc]) for query, doc in keys]
        for (query_id, doc_id), (query, doc) in zip(named, wanted, strict=True):
            docs_of.setdefault(query_id, {})[doc_id] = None
            texts[0][query_id], texts[1][doc_id] = query, doc
        batches = ScoreBatches(
            Collection(
                "texts",
                MemoryDocs([]),
                texts[0],
                {},
                Candidates.from_lists((query, list(docs), [0.0] * len(docs)) for query, docs in docs_of.items()),
            ),
            None,
            self.texts.collator(texts[0], texts[1], titles),
            self.max_tokens,
        )
        shown = len(wanted) >= LONG_WORK and sys.stderr.isatty() if progress is None else progress
        run = score_collection(self.scorer, batches, self.devices, progress="rank" if shown else None)
        assert run is not None
        return np.array([run[query_id][doc_id] for query_id, doc_id in named], dtype=np.float32)
