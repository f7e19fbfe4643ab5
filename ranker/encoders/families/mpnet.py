"""MPNet (Song et al., 2020, arXiv:2004.09297). Its attention has relative positions, so it runs padded."""

from ranker.encoders.family import Family

FAMILY = Family("mpnet", positions_after_padding=True)
