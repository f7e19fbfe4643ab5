"""Probe each layer of an encoder or of a trained ranker. `python probe.py --help` lists the tasks and keys."""

import hydra
from omegaconf import DictConfig

from ranker.cli.entry import job, register, user_errors
from ranker.cli.usage import answer_help

register("probe")


@hydra.main(version_base="1.3", config_path="conf", config_name="probe")
def main(cfg: DictConfig) -> float | None:
    """Probe as the configuration says."""
    return job("probe", cfg)


if __name__ == "__main__":
    answer_help("probe")
    with user_errors():
        main()
