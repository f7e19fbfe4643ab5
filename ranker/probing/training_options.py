"""Options of the training of a probe."""

from __future__ import annotations

from dataclasses import dataclass

from ranker.errors import ConfigError


@dataclass(frozen=True)
class TrainingOptions:
    """Options of the training of a probe. The validation loss is computed after each round.

    Args:
        lr: Adam's learning rate at the start.
        batch_pairs: Pairs per batch.
        max_rounds: Maximum number of rounds.
        round_steps: Minimum number of steps of a round. A round is the smallest number of whole passes over the
            training pairs with at least this number of steps.
        patience: Training stops after this many consecutive rounds without a lower validation loss.
        small_val_pairs: Maximum number of validation pairs for portions below 5 % of the training pairs; None: all.
        lr_factor: Factor that multiplies the learning rate after each round without a lower validation loss.
        clip: Maximum norm of a member's gradient.
        hidden: Size of a projected span and of the hidden layer.
        dropout: Dropout rate before the output layer.
        head: `edge`, `mlp2` or `linear`.

    Raises:
        ConfigError: A value is out of its range.
    """

    lr: float = 1e-3
    batch_pairs: int = 64
    max_rounds: int = 50
    round_steps: int = 5
    patience: int = 2
    small_val_pairs: int | None = 2000
    lr_factor: float = 0.5
    clip: float = 5.0
    hidden: int = 256
    dropout: float = 0.3
    head: str = "edge"

    def __post_init__(self) -> None:
        for name, least in (("batch_pairs", 1), ("max_rounds", 1), ("round_steps", 1), ("patience", 1), ("hidden", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"training.{name}: expected at least {least}, got {getattr(self, name)}")
        if self.small_val_pairs is not None and self.small_val_pairs < 1:
            raise ConfigError(f"training.small_val_pairs: expected at least 1 or null, got {self.small_val_pairs}")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"training.dropout: expected at least 0 and below 1, got {self.dropout}")
        if not self.lr > 0:
            raise ConfigError(f"training.lr: expected a number above 0, got {self.lr}")
        if not self.clip > 0:
            raise ConfigError(
                f"training.clip: expected a number above 0, got {self.clip}; set training.clip=.inf to clip nothing"
            )
        if not 0 < self.lr_factor <= 1:
            raise ConfigError(
                f"training.lr_factor: expected above 0 and at most 1, got {self.lr_factor}; 1 keeps the rate"
            )
