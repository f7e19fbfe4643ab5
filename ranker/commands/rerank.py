"""`ranker rerank`: re-rank a TREC run into another, or JSON lines from standard input to standard output."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from ranker import run_folder
from ranker.assembly.probabilities import read_calibration
from ranker.assembly.reranker import Reranker
from ranker.assembly.run import one_run, open_run
from ranker.data.corpus_files import JsonlDocs, read_queries
from ranker.data.parsing import parse_json
from ranker.data.trec import read_candidates, write_run
from ranker.errors import ConfigError, DataError

log = logging.getLogger(__name__)


@one_run()
def rerank(cfg: DictConfig) -> None:
    """Re-rank the run of `run=`, or the lines of standard input.

    Raises:
        RankerError: The checkpoint, a file or a line is wrong.
    """
    if cfg.run is not None:
        _rerank_file(cfg)
        return
    run_folder.discard(Path(HydraConfig.get().runtime.output_dir))  # answers go to standard output, so it stays empty
    reranker = Reranker.of_config(cfg, probabilities=cfg.probabilities, calibration=cfg.calibration)
    for number, line in enumerate(sys.stdin, 1):
        if line.strip():
            answer = _answer(reranker, parse_json(line, f"standard input:{number}"), number, cfg.top_k)
            sys.stdout.write(json.dumps(answer, ensure_ascii=False) + "\n")
            sys.stdout.flush()  # the reader of a pipe gets each answer at once


def _rerank_file(cfg: DictConfig) -> None:
    calibration = read_calibration(cfg.checkpoint, cfg.probabilities, cfg.calibration)
    if calibration is not None and not calibration.keeps_order:
        raise ConfigError(
            f"probabilities: with run=, expected a map that keeps different scores different, such as platt, "
            f"got {calibration.method}, which can give two docs the same probability"
        )
    queries, docs = read_queries(Path(cfg.queries)), JsonlDocs(Path(cfg.docs))
    candidates = read_candidates(Path(cfg.run))
    wanted = {query_id: candidates[query_id][: cfg.depth] for query_id in candidates}
    for query_id, doc_ids in wanted.items():
        if query_id not in queries:
            raise DataError(f"{cfg.queries}: expected the text of query {query_id!r} of {cfg.run}, got none")
        missing = next((doc_id for doc_id in doc_ids if doc_id not in docs), None)
        if missing is not None:
            raise DataError(f"{cfg.docs}: expected doc {missing!r} of query {query_id!r} in {cfg.run}, got none")
    reranker = Reranker.of_config(cfg, probabilities=cfg.probabilities, calibration=cfg.calibration)
    folder = open_run(cfg)
    rankings = reranker.rank(
        [queries[query_id] for query_id in wanted],
        [[docs[doc_id] for doc_id in doc_ids] for doc_ids in wanted.values()],
        cfg.top_k,
        progress=cfg.trainer.enable_progress_bar,
    )
    run = {
        query_id: {doc.doc_id: doc.score for doc in ranking} for query_id, ranking in zip(wanted, rankings, strict=True)
    }
    write_run(folder / "run.trec", run, cfg.name)
    log.info("run: %s", folder / "run.trec")


def _answer(reranker: Reranker, request: Any, number: int, top_k: int | None) -> dict[str, Any]:
    """Return the answer to one line; the answer repeats all keys of the line except docs and top_k."""
    where = f"standard input:{number}"
    if not isinstance(request, dict) or not isinstance(request.get("query"), str):
        raise DataError(f'{where}: expected a JSON object with "query" and "docs", got {request!r:.200}')
    docs = request.get("docs")
    if not isinstance(docs, list):
        raise DataError(f'{where}: expected a list as "docs", got {docs!r:.200}')
    try:
        ranking = reranker.rank(request["query"], docs, request.get("top_k", top_k), progress=False)
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
    results = [{"id": doc.doc_id, "score": doc.score, "position": doc.position} for doc in ranking]
    return {key: value for key, value in request.items() if key not in ("docs", "top_k")} | {"results": results}
