"""DistilBERT (Sanh et al., 2019, arXiv:1910.01108)."""

from ranker.encoders.family import Family

FAMILY = Family("distilbert", layers="distilbert", positions_after_padding=False)
