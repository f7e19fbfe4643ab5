"""T5Gemma (Zhang et al., 2025, arXiv:2504.06225)."""

from ranker.encoders.family import Family

FAMILY = Family(
    "t5gemma",
    window_excess=1,  # its masks include the distance `sliding_window`
)
