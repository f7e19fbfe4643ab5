"""`ranker evaluate`: measure a run file, or re-rank with a checkpoint and measure the result.

Measuring a run file needs no torch. The code that needs torch is imported only for a checkpoint.
"""

from __future__ import annotations

import logging
from pathlib import Path

from omegaconf import DictConfig

from ranker.assembly.report import Report
from ranker.assembly.run import one_run, open_run
from ranker.data.trec import read_qrels, read_run
from ranker.evaluation.report import print_table, write_evaluation

log = logging.getLogger(__name__)


@one_run()
def evaluate(cfg: DictConfig) -> None:
    """Measure a run file, or re-rank a collection's candidates with a checkpoint and measure the result."""
    if cfg.run is not None:
        _evaluate_file(cfg)
        return
    if cfg.suite is not None:
        from ranker.assembly.suite import evaluate_suite

        evaluate_suite(cfg)
        return
    from ranker.assembly.evaluation import evaluate_checkpoint

    evaluate_checkpoint(cfg)


def _evaluate_file(cfg: DictConfig) -> None:
    run, qrels = read_run(Path(cfg.run)), read_qrels(Path(cfg.qrels))
    baseline = read_run(Path(cfg.baseline)) if cfg.baseline else None
    folder = open_run(cfg)
    name = run_name(Path(cfg.run))
    written = write_evaluation(
        folder / "evaluation" / name, run, qrels, list(cfg.measures), cfg.relevance, baseline, tag=name
    )
    report = Report(cfg)
    if report.wanted and baseline and written["measures"]:  # without judged queries there are no measures
        from ranker.evaluation import pictures

        pictures.write_comparison(folder, name, next(iter(written["measures"])), run, baseline, qrels, cfg.relevance)
    report.add(folder, name, run, ("baseline", baseline) if baseline else None, qrels)
    facts = {"Run": cfg.run, "Baseline": cfg.baseline, "Judgements": cfg.qrels}
    report.write(folder, f"Evaluation of {name}", {key: str(path) for key, path in facts.items() if path is not None})
    print_table(name, written)
    log.info("evaluation: %s", folder / "evaluation" / name)


def run_name(path: Path) -> str:
    """Return the name of a run file without its endings, as a tag and a folder name.

    Blanks become `_`. Leading dots are dropped, because they would hide the folder.

    >>> run_name(Path("my run.trec.gz")), run_name(Path(".run")), run_name(Path(".hidden.run"))
    ('my_run', 'run', 'hidden')
    """
    name = path.name.lstrip(".").removesuffix(".gz").removesuffix(".run").removesuffix(".trec")
    return "_".join(name.split()) or "run"
