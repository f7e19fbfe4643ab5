"""T5Gemma (Zhang et al., 2025, arXiv:2504.06225)."""

from ranker.encoders.family import Family

FAMILY = Family(
    "t5gemma",
    config_changes={"is_encoder_decoder": False},  # its encoder refuses a configuration that says it has a decoder
    window_excess=1,  # a token attends to those at the distance `sliding_window`, too
)
