"""`ranker merge`: one model whose weights are a mean of several models' weights."""

from __future__ import annotations

import logging
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from ranker.assembly.labelling import docs_to_score
from ranker.assembly.merging import Merged, Shares, merge_scorers, search_shares
from ranker.assembly.run import one_run, open_run, quiet_libraries
from ranker.assembly.scored import run_of
from ranker.checkpoint import load_scorer, read_description, save_model, without_adapters
from ranker.errors import ConfigError
from ranker.evaluation.fusion import simplex
from ranker.evaluation.measure_names import parse_measures
from ranker.evaluation.metrics import evaluate
from ranker.training.run_writer import write_json

log = logging.getLogger(__name__)


@one_run()
def merge(cfg: DictConfig) -> None:
    """Write `model/` with the merged weights into the run folder. Adapters are merged into their weights first.

    With `tune.measure`, a search on the queries of `split` chooses the shares; `merge.json` has the shares and all
    trials.

    Raises:
        RankerError: A run can't be loaded, or the runs do not fit together.
    """
    quiet_libraries()
    paths = [Path(path) for path in cfg.runs]
    descriptions = [OmegaConf.create(read_description(path)) for path in paths]
    described = next((part for part in descriptions if part.get("encoder") and part.get("model")), None)
    if described is None:
        raise ConfigError("runs: expected at least one run of this program, got only folders of other programs")
    scorers = []
    for path in paths:
        scorer = load_scorer(path, cfg.weights, trust_remote_code=cfg.trust_remote_code)
        scorers.append(without_adapters(scorer, described)[0])
    named = dict(zip(map(str, paths), scorers, strict=True))
    if cfg.tune.measure is None:
        merged, content = merge_scorers(named, cfg.shares, cfg.interpolation), None
        folder = open_run(cfg)
    else:
        measure = str(parse_measures([cfg.tune.measure])[0])
        both = Merged(named, cfg.interpolation)
        trials = simplex(len(paths), cfg.tune.step)
        collection = docs_to_score(cfg, described)
        folder = open_run(cfg)

        def value(shares: Shares) -> float:
            run = run_of(cfg, both.at(shares), described, collection)
            means = evaluate(run, dict(collection.qrels), [measure], collection.relevance).means
            return next(iter(means.values()))

        shares, done = search_shares(both.groups, trials, value, cfg.tune.per_layer)
        merged = both.at(shares)
        highest = max(trial["value"] for trial in done)
        content = {"measure": measure, "split": cfg.split, "value": highest, "shares": shares, "trials": done}
        log.info("%s of %s: %.4f, the best of %d mixtures", measure, cfg.split, highest, len(done))
    if content is not None:
        write_json(folder / "merge.json", content)
    save_model(folder / "model", merged, without_adapters(merged, described)[1])
    log.info("merged model: checkpoint=%s", folder / "model")
