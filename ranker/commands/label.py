"""`ranker label`: score a training set's candidates with one or several teachers, as labels for `data.teacher=`."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig

from ranker.assembly.labelling import docs_to_score, scores_of_run, shards_of, shards_of_reader, teachers_of
from ranker.assembly.rehearsal import rehearse_fabric
from ranker.assembly.run import one_run, open_run, quiet_libraries
from ranker.assembly.trainer import build_fabric
from ranker.data.collection import Candidates, Collection
from ranker.data.ragged import row_offsets
from ranker.data.trec import write_run
from ranker.errors import DataError
from ranker.evaluation.report import first_stage_run
from ranker.labelling.agreement import report
from ranker.labelling.scaling import at_quantiles, mean_of_teachers
from ranker.labelling.table import print_report
from ranker.training.run_writer import write_json

log = logging.getLogger(__name__)


@one_run()
def label(cfg: DictConfig) -> None:
    """Score a split's candidates with each teacher; write the mean of their scaled scores, and a report.

    Raises:
        RankerError: A teacher, the data or a score is wrong.
    """
    quiet_libraries()
    teachers = teachers_of(cfg)
    rehearse_fabric(cfg)
    collection = docs_to_score(cfg, teachers[0].trained)
    assert collection.candidates is not None
    folder = open_run(cfg)
    fabric = build_fabric(cfg, folder, "label")
    scored: dict[str, Any] = {}
    for teacher in teachers:
        if teacher.reads:
            scored[teacher.name] = shards_of_reader(cfg, collection, fabric)
        elif teacher.is_run:
            scored[teacher.name] = scores_of_run(teacher.path, collection.candidates)
        else:
            scored[teacher.name] = shards_of(cfg, teacher, collection, fabric)
    fabric.barrier()
    if fabric.global_rank > 0:
        return
    scores = {name: part if isinstance(part, np.ndarray) else part.read() for name, part in scored.items()}
    _write(cfg, folder, collection, scores)


def _write(cfg: DictConfig, folder: Path, collection: Collection, scores: dict[str, np.ndarray]) -> None:
    """Write the labels, each teacher's own scores and the report.

    Args:
        cfg: The configuration.
        folder: The run folder.
        collection: The collection; its candidates are the docs that were scored.
        scores: Teacher -> scores [pairs]; NaN where a given run has no score.
    """
    assert collection.candidates is not None
    known: np.ndarray = ~np.isnan(np.stack(list(scores.values()))).any(axis=0)
    candidates = _where(collection.candidates, known)
    if not known.any():
        raise DataError(f"teacher: expected scores for the docs of {cfg.split}, got none; check the ids of the run")
    if not known.all():
        log.warning("teacher: %d of %d docs are left out, since a teacher's run lacks them", (~known).sum(), len(known))
    teachers = {name: values[known] for name, values in scores.items()}
    scaling = cfg.scale if cfg.scale != "auto" else "none" if len(teachers) == 1 else "zscore"
    labels = mean_of_teachers(list(teachers.values()), candidates.offsets, scaling)
    kept = np.ones(len(labels), bool)
    if cfg.keep is not None:
        kept = at_quantiles(labels, candidates.offsets, _relevant(collection, candidates), cfg.keep)
    runs = {"labels": _run(_where(candidates, kept), labels[kept])}
    if len(teachers) > 1 or scaling != "none" or not kept.all():
        runs |= {name: _run(candidates, values) for name, values in teachers.items()}
    for number, run in enumerate(runs.values()):
        write_run(folder / ("labels.trec" if not number else f"teacher_{number}.trec"), run, cfg.name)
    first_stage = first_stage_run(replace(collection, candidates=candidates), len(labels))
    if first_stage is not None:
        write_run(folder / "first_stage.trec", first_stage, "first_stage")
        runs["first stage"] = first_stage
    content = report(runs, dict(collection.qrels), list(cfg.measures), collection.relevance)
    content = {"teachers": list(teachers), "scale": scaling, "queries": len(candidates), **content}
    write_json(folder / "label.json", content)
    print_report(content)
    log.info("labels: data.teacher=%s", folder / "labels.trec")


def _where(candidates: Candidates, kept: np.ndarray) -> Candidates:
    """Return the candidates where `kept`, bool [pairs], is true; a query without kept docs is left out."""
    part = candidates.where(kept)
    counts = np.diff(part.offsets)
    ids = [query_id for query_id, count in zip(part.query_ids, counts, strict=True) if count]
    return Candidates(ids, row_offsets(counts[counts > 0]), part.doc_ids, part.scores)


def _relevant(collection: Collection, candidates: Candidates) -> np.ndarray:
    return np.array(
        [
            grades.get(doc_id, 0) >= collection.relevance
            for query_id in candidates
            for grades in [collection.qrels.get(query_id, {})]
            for doc_id in candidates[query_id]
        ],
        dtype=bool,
    )


def _run(candidates: Candidates, scores: np.ndarray) -> dict[str, dict[str, float]]:
    return Candidates(candidates.query_ids, candidates.offsets, candidates.doc_ids, scores).to_run()
