"""T5Gemma (Zhang et al., 2025, arXiv:2504.06225)."""

from ranker.encoders.family import Family

FAMILY = Family(
    "t5gemma",
    config_changes={"is_encoder_decoder": False},  # the encoder refuses a configuration with True
    window_excess=1,  # a token also attends to tokens at exactly the distance `sliding_window`
)
