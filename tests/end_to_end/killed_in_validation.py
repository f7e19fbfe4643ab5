"""Run train.py and kill it in its second validation."""

import os
import runpy
import signal
from pathlib import Path

from ranker.training.rerank_module import RerankModule

score = RerankModule.validation_step


def score_and_die(self, batch, batch_idx) -> None:
    score(self, batch, batch_idx)
    if self.trainer.current_epoch == 1:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":  # pytest imports every file for its doctests
    RerankModule.validation_step = score_and_die
    runpy.run_path(str(Path(__file__).resolve().parents[2] / "train.py"), run_name="__main__")
