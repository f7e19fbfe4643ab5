"""XLNet (Yang et al., 2019, arXiv:1906.08237)."""

from ranker.encoders.family import Family

FAMILY = Family(
    "xlnet",
    frozen=("mask_emb",),  # weights that are used only in XLNet's pretraining
)
