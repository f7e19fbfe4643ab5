"""Train a reranker and test it. `python train.py` trains the demo; `python train.py --help` lists groups and keys."""

import hydra
from omegaconf import DictConfig

from ranker.cli.entry import job, register, user_errors
from ranker.cli.usage import answer_help

register("train")


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(cfg: DictConfig) -> float | None:
    """Train as the configuration says; returns the monitored value, which sweeps optimise."""
    return job("train", cfg)


if __name__ == "__main__":
    answer_help("train")
    with user_errors():
        main()
