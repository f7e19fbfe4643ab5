"""Longformer (Beltagy et al., 2020, arXiv:2004.05150). Its attention is sparse, so it runs padded."""

from ranker.encoders.family import Family

FAMILY = Family("longformer", positions_after_padding=True)
