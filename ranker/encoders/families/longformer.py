"""Longformer (Beltagy et al., 2020, arXiv:2004.05150). It runs padded, because its attention is sparse.

The `_global` weights are used for the first token of a pair, see `Encoder.make_first_token_global`.
"""

from ranker.encoders.family import Family

FAMILY = Family(
    "longformer",
    positions_after_padding=True,
    frozen=("_global.",),
)
