"""MRA (Zeng et al., 2022, arXiv:2207.10284)."""

from ranker.encoders.family import Family

FAMILY = Family(
    "mra",
    refused="its attention is a CUDA kernel from the hub, and returns zeros without it",
)
