"""BigBird (Zaheer et al., 2020, arXiv:2007.14062).

At the first short text, transformers switches a model permanently from block-sparse to full attention, so the scores of
long texts would depend on what was read before. With full attention from the start, a text always has the same score.
"""

from ranker.encoders.family import Family

FAMILY = Family(
    "big_bird",
    config_changes={"attention_type": "original_full"},
)
