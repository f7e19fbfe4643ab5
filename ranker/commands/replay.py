"""`ranker replay RUN/nonfinite/step-N`: repeat a training step whose loss or gradient was NaN or infinite.

The same hardware and software give the same loss. `python -m ranker.commands.replay FOLDER` does the same.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import lightning.pytorch as pl
from hydra.utils import instantiate
from torch.utils.data import DataLoader

from ranker.assembly.scorer import build_loss, training_module
from ranker.cli.entry import user_errors
from ranker.config.stored import load_stored
from ranker.config.targets import constructor_keys
from ranker.errors import CheckpointError, NonFinite
from ranker.passages.build import with_passages
from ranker.training.nonfinite import read_dump
from ranker.training.options import Optimization

NEEDED = ("model", "encoder", "loss", "optim", "schedule", "trainer")


def replay(dump: Path) -> tuple[float, float]:
    """Repeat a stored step on one device, from the weights before this step.

    Returns:
        The step's loss and gradient norm.

    Raises:
        CheckpointError: The folder is not a stored step.
        ConfigError: The stored configuration has a value that a stored file may not have, since the file may be someone
            else's.
    """
    step, weights, about = read_dump(dump)
    cfg = load_stored(dump / "config.yaml")
    lacking = [key for key in NEEDED if not cfg.get(key)]
    if lacking:
        raise CheckpointError(
            f"{dump / 'config.yaml'}: expected the configuration of a training, got one without {', '.join(lacking)}"
        )
    scorer = with_passages(
        instantiate(
            constructor_keys("model", cfg.model), encoder=instantiate(constructor_keys("encoder", cfg.encoder))
        ),
        cfg.get("passages"),
    )
    module = training_module(cfg, scorer)(
        scorer,
        [],
        loss=build_loss(cfg),
        optimization=Optimization(
            instantiate(cfg.optim),
            instantiate(cfg.schedule),
            total_steps=1,
            max_norm=cfg.trainer.gradient_clip_val,
            seed=cfg.seed,
        ),
    )
    try:
        module.load_state_dict(weights)
    except RuntimeError as error:
        raise CheckpointError(
            f"{dump}: expected weights of the configured model, got {' '.join(str(error).split())}"
        ) from error
    module.train()
    trainer = pl.Trainer(
        accelerator=cfg.trainer.accelerator,
        devices=1,
        precision=about["precision"],
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    try:
        trainer.fit(module, train_dataloaders=DataLoader([step], batch_size=None))  # type: ignore[arg-type]
    except NonFinite as error:
        return error.loss, error.grad_norm
    return float(trainer.callback_metrics["train/loss"]), float(trainer.callback_metrics["train/grad_norm"])


def main() -> None:
    """Repeat the step in the folder `sys.argv[1]`; print its loss and gradient norm beside those of the training.

    Raises:
        CheckpointError: The folder is not a stored step, or the repeated step is finite.
    """
    if len(sys.argv) != 2:
        raise CheckpointError(
            f"ranker replay: expected one folder RUN/nonfinite/step-N, got {' '.join(sys.argv[1:]) or 'none'}"
        )
    dump = Path(sys.argv[1])
    about = read_dump(dump)[2]
    loss, norm = replay(dump)
    print(f"step {about['step']}, queries {', '.join(about['query_ids'])}")  # noqa: T201
    print(  # noqa: T201
        f"loss {loss}, gradient norm {norm}; the training had loss {about['loss']}, gradient norm {about['grad_norm']}"
    )
    if math.isfinite(loss) and math.isfinite(norm):
        raise CheckpointError(
            f"{dump}: expected a loss or gradient that is not finite, got a step that is; other hardware or software?"
        )


if __name__ == "__main__":
    with user_errors():
        main()
