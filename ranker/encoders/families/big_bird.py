"""BigBird (Zaheer et al., 2020, arXiv:2007.14062).

transformers switches a model from block-sparse to full attention for good at the first short text, so the scores of
long texts would depend on what was read before. Full attention from the start gives each text the same score always.
"""

from ranker.encoders.family import Family

FAMILY = Family(
    "big_bird",
    config_changes={"attention_type": "original_full"},
)
