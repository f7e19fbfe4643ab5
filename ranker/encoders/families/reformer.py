"""Reformer (Kitaev et al., 2020, arXiv:2001.04451)."""

from ranker.encoders.family import Family

FAMILY = Family(
    "reformer",
    refused="training needs rows padded to the product of its axial position shape",
)
