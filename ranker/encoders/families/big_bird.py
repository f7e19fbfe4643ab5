"""BigBird (Zaheer et al., 2020, arXiv:2007.14062).

transformers switches a model permanently from block-sparse to full attention when it first reads a short text. The
scores of long texts would then depend on texts read before. So attention is full from the start.
"""

from ranker.encoders.family import Family

FAMILY = Family(
    "big_bird",
    config_changes={"attention_type": "original_full"},
)
