"""Search a whole collection with a bi-encoder or BM25, and mine hard negatives. `python search.py --help` lists groups and keys."""

import hydra
from omegaconf import DictConfig

from ranker.cli.entry import job, register, user_errors
from ranker.cli.usage import answer_help

register("search")


@hydra.main(version_base="1.3", config_path="conf", config_name="search")
def main(cfg: DictConfig) -> float | None:
    """Search as the configuration says."""
    return job("search", cfg)


if __name__ == "__main__":
    answer_help("search")
    with user_errors():
        main()
