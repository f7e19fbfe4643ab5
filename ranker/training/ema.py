"""Keep an exponential moving average of the weights. It is validated and stored in place of the trained weights."""

from __future__ import annotations

from lightning.pytorch.callbacks import EMAWeightAveraging

from ranker.errors import ConfigError


class EMA(EMAWeightAveraging):
    """Lightning's average of the weights: average = decay * average + (1 - decay) * weights after each update.

    Validation, the `state_dict` of checkpoints, and `model/` use the average. Checkpoints also contain the trained
    weights, so a resume is exact.

    Args:
        decay: Factor of the old average in an update, at least 0 and below 1.
        every_n_steps: Steps between two updates of the average.
        start: First step that updates the average. Before it, the average is the initial weights.

    Raises:
        ConfigError: A value is out of range.
    """

    def __init__(self, decay: float = 0.999, every_n_steps: int = 1, start: int = 0) -> None:
        if not 0 <= decay < 1:
            raise ConfigError(f"callbacks.ema.decay: expected at least 0 and below 1, got {decay}")
        if every_n_steps < 1:
            raise ConfigError(f"callbacks.ema.every_n_steps: expected at least 1, got {every_n_steps}")
        super().__init__(
            use_buffers=False,  # the models have no buffers that change in training
            decay=decay,
            update_every_n_steps=every_n_steps,
            update_starting_at_step=start,
        )
