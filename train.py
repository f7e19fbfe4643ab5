"""Train a reranker and test it. `python train.py` trains the demo; `python train.py --help` lists groups and keys."""

import hydra
from omegaconf import DictConfig

from ranker.config import check
from ranker.entry import register, user_errors

register()


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(cfg: DictConfig) -> float | None:
    """Train as the configuration says; returns the monitored value, which sweeps optimise."""
    check(cfg)  # before torch is imported: a mistake is answered at once
    from ranker.run import train

    return train(cfg)


if __name__ == "__main__":
    with user_errors():
        main()
