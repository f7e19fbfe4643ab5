"""MPNet (Song et al., 2020, arXiv:2004.09297). It runs padded, because its attention has relative positions."""

from ranker.encoders.family import Family

FAMILY = Family("mpnet", positions_after_padding=True)
