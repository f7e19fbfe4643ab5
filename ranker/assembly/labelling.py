"""Build the parts of `ranker label`: the docs to score, the teachers, and the scores of each teacher."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf

from ranker.assembly.data import batch_options, chosen_sets, load_source, print_notice, text_limits
from ranker.checkpoint import load_scorer, read_description
from ranker.config.paths import READER
from ranker.data.collection import Candidates, Collection, Splits
from ranker.data.datamodule import RankData
from ranker.data.instructions import refuse_instructions
from ranker.data.query_docs import with_allowed
from ranker.data.ragged import row_offsets
from ranker.data.score_batches import top_candidates
from ranker.data.scorer_inputs import ScorerInputs, TextLimits
from ranker.data.splits import check_candidates
from ranker.data.text_encoder import tokenizer_fingerprint
from ranker.data.trec import read_candidates, read_run
from ranker.errors import ConfigError
from ranker.evaluation.scoring import Devices
from ranker.hashing import fingerprint_texts
from ranker.labelling.reader import Reader, read_answers, read_missing
from ranker.labelling.shards import ScoreShards, score_missing
from ranker.retrieval.encode import scorer_hash, weights_hash
from ranker.retrieval.first_stage import FirstStage, with_candidates
from ranker.retrieval.pipeline import add_positives
from ranker.types import Run

log = logging.getLogger(__name__)

READER_DOC_TOKENS = 448  # maximum tokens of a doc for a reader, the same as for teachers of other programs


@dataclass(frozen=True)
class Teacher:
    """A teacher: the folder of a model, or a TREC run that already has scores.

    Args:
        name: A name that no other teacher has.
        path: The folder or file.
        trained: Description of the model's training; empty for a folder of another program and for a run.
        reads: Whether the teacher is a reader, which scores a doc by the likelihood of the answers given the doc.
    """

    name: str
    path: Path
    trained: DictConfig
    reads: bool = False

    @property
    def is_run(self) -> bool:
        """Whether the teacher is a TREC run, so that its scores need not be computed."""
        return self.path.is_file() and not self.reads


def teachers_of(cfg: DictConfig) -> list[Teacher]:
    """Return the teachers that `teacher` names.

    Raises:
        ConfigError: A teacher is named twice.
        CheckpointError: A folder is not a model.
    """
    if cfg.teacher == READER:
        return [Teacher(READER, Path(cfg.reader.name).expanduser(), OmegaConf.create({}), reads=True)]
    named = [cfg.teacher] if isinstance(cfg.teacher, str) else list(cfg.teacher)
    paths = [Path(path).expanduser() for path in named]
    if len(set(paths)) < len(paths):
        raise ConfigError(f"teacher: expected each teacher once, got {named}")
    teachers = []
    for name, path in zip(short_names(paths), paths, strict=True):
        trained = OmegaConf.create({} if path.is_file() else read_description(path))
        teachers.append(Teacher(name, path, trained))
    return teachers


def short_names(paths: Sequence[Path]) -> list[str]:
    """Name each path by its last two parts, or by more parts if two names would be equal.

    >>> short_names([Path("a/b/minilm"), Path("x/r/model"), Path("y/r/model")])
    ['b/minilm', 'x/r/model', 'y/r/model']
    """
    names = []
    for path in paths:
        others = [other.parts for other in paths if other != path]
        count = 2
        while count < len(path.parts) and any(parts[-count:] == path.parts[-count:] for parts in others):
            count += 1
        names.append("/".join(path.parts[-count:]))
    return names


def docs_to_score(cfg: DictConfig, trained: DictConfig) -> Collection:
    """Return the chosen split, whose candidates are the docs to score. Queries without candidates are left out.

    Args:
        cfg: The configuration.
        trained: Description of the first teacher's training, whose data and depth are the defaults.

    Raises:
        ConfigError: `data` is not known, the split has several sets, or there are no candidates.
    """
    source = cfg.data if cfg.data is not None else trained.get("data")
    if source is None:
        raise ConfigError("data: expected data=..., since the teacher does not say what it was trained on, got null")
    loaded = load_source(source, cfg.cache_dir)
    print_notice(loaded)
    sets = chosen_sets(loaded, cfg.split)
    if len(sets) > 1:
        raise ConfigError(f"split: expected a split of one set, got {', '.join(sets)}; name one of them in data.test")
    ((name, collection),) = sets.items()
    refuse_instructions(sets)
    depth = cfg.depth or trained.get("depth", 100)
    if cfg.candidates is not None:
        collection = with_allowed(collection, read_candidates(Path(cfg.candidates)))
        check_candidates(collection, cfg.candidates)
    splits = with_candidates(Splits(None, None, {name: collection}), depth, Path(cfg.cache_dir), FirstStage.of(source))
    collection = splits.tests[name]
    if collection.candidates is None:
        raise ConfigError(
            f"candidates: expected candidates=RUN, since {name} has training triples but no ranking, got null; or set "
            "data.train_candidates=bm25, which computes a ranking"
        )
    if cfg.add_positives and collection.qrels:
        collection = add_positives(collection, depth)
        depth = None
    candidates = top_candidates(collection, depth)
    has_docs = np.diff(candidates.offsets) > 0
    if not has_docs.all():
        log.warning("%s: %d queries have no docs to score and get no labels", name, int((~has_docs).sum()))
        kept = np.flatnonzero(has_docs)
        counts = np.diff(candidates.offsets)[kept]
        ids = [candidates.query_ids[i] for i in kept]
        candidates = Candidates(ids, row_offsets(counts), candidates.doc_ids, candidates.scores)
    return replace(collection, candidates=candidates)


def shards_of(cfg: DictConfig, teacher: Teacher, collection: Collection, fabric: Any) -> ScoreShards:
    """Return the shards of a model's scores, after this process's share is scored. All processes must call this.

    Returns:
        The shards of all processes. Other processes may still be writing their shards.
    """
    assert collection.candidates is not None
    scorer = load_scorer(teacher.path, cfg.weights, trust_remote_code=cfg.trust_remote_code)
    limits = text_limits(scorer, teacher.trained)
    limits = replace(limits, query=cfg.max_query_tokens or limits.query, doc=cfg.max_doc_tokens or limits.doc)
    data = RankData(
        Splits(None, None, {}), ScorerInputs.of(scorer), batch_options(cfg), limits, cache_dir=cfg.cache_dir
    )
    collator = data.collator(collection)
    precision: Any = fabric.strategy.precision
    description = {
        "weights": scorer_hash(scorer),
        "encoder": json.loads(scorer.encoder.config.to_json_string()) | {"transformers_version": None},
        "docs": collection.docs.fingerprint,
        "queries": fingerprint_texts(collection.queries.items()),
        "tokens": [collator.max_query_tokens, collator.max_doc_tokens, collator.max_pair_tokens],
        "precision": str(precision.precision),
    }
    root = Path(cfg.cache_dir) / "labels"
    shards = ScoreShards.open(root, collection.candidates, cfg.shard_queries, description, teacher.name)
    found = len(shards) - len(shards.missing())
    log.info("%s: %d of %d shards are scored already, in %s", teacher.name, found, len(shards), shards.folder)
    score_missing(
        precision.convert_module(scorer),
        collator,
        collection,
        shards,
        Devices.of_fabric(fabric),
        data.batch_options.eval_max_tokens or data.batch_options.max_tokens,
        data.batch_options.workers,
        progress=teacher.name if cfg.trainer.enable_progress_bar else None,
    )
    return shards


def shards_of_reader(cfg: DictConfig, collection: Collection, fabric: Any) -> ScoreShards:
    """Return the shards of a reader's scores (`ranker.labelling.reader`), after this process's share is scored.

    Returns:
        The shards of all processes. Other processes may still be writing their shards.
    """
    assert collection.candidates is not None
    answers = read_answers(Path(cfg.reader.answers).expanduser(), collection.candidates.query_ids)
    tokens = (cfg.max_query_tokens or TextLimits().query, cfg.max_doc_tokens or READER_DOC_TOKENS)
    reader = Reader.load(str(cfg.reader.name), cfg.reader.prompt, tokens, cfg.trust_remote_code)
    precision: Any = fabric.strategy.precision
    description = {
        "weights": weights_hash(reader.model).hexdigest(),
        "tokenizer": tokenizer_fingerprint(reader.tokenizer),
        "docs": collection.docs.fingerprint,
        "queries": fingerprint_texts(collection.queries.items()),
        "answers": fingerprint_texts((query_id, answers[query_id]) for query_id in collection.candidates.query_ids),
        "prompt": reader.prompt,
        "tokens": list(tokens),
        "precision": str(precision.precision),
    }
    root = Path(cfg.cache_dir) / "labels"
    shards = ScoreShards.open(root, collection.candidates, cfg.shard_queries, description, READER)
    found = len(shards) - len(shards.missing())
    log.info("%s: %d of %d shards are scored already, in %s", READER, found, len(shards), shards.folder)
    reader.model = precision.convert_module(reader.model).to(fabric.device)
    options = batch_options(cfg)
    max_tokens = options.eval_max_tokens or options.max_tokens
    read_missing(reader, shards, collection, answers, Devices.of_fabric(fabric), max_tokens)
    return shards


def scores_of_run(path: Path, candidates: Candidates) -> np.ndarray:
    """Return the scores of a TREC run for the docs to score, float64 [pairs]; NaN for pairs that the run lacks."""
    run: Run = read_run(path, single=True)
    return np.array(
        [run.get(query_id, {}).get(doc_id, np.nan) for query_id in candidates for doc_id in candidates[query_id]]
    )
