"""BigBird (Zaheer et al., 2020, arXiv:2007.14062)."""

from ranker.encoders.family import Family

FAMILY = Family(
    "big_bird",
    path="by_length",
    why_padded="its block-sparse attention depends on the padded length",
)
