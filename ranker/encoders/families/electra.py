"""ELECTRA (Clark et al., 2020, arXiv:2003.10555). Its classifier has GELU instead of tanh."""

from ranker.encoders.family import Family

FAMILY = Family("electra", layers="bert", positions_after_padding=False, reads_single_segment=True)
