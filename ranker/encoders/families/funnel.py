"""Funnel Transformer (Dai et al., 2020, arXiv:2006.03236)."""

from ranker.encoders.family import Family

FAMILY = Family("funnel", refused="its pooled attention fails on rows of a few tokens")
