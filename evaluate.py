"""Evaluate a checkpoint or an existing run file: measures, baseline, paired tests. `python evaluate.py --help` lists the keys."""

import hydra
from omegaconf import DictConfig

from ranker.cli.entry import job, register, user_errors
from ranker.cli.usage import answer_help

register("evaluate")


@hydra.main(version_base="1.3", config_path="conf", config_name="evaluate")
def main(cfg: DictConfig) -> float | None:
    """Evaluate as the configuration says."""
    return job("evaluate", cfg)


if __name__ == "__main__":
    answer_help("evaluate")
    with user_errors():
        main()
