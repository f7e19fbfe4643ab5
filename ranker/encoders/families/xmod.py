"""X-MOD: RoBERTa with an adapter per language."""

from ranker.encoders.family import Family

FAMILY = Family(
    "xmod",
    positions_after_padding=True,
    why_float32="transformers' language adapters mix float32 and half precision under autocast",
)
