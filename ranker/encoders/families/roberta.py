"""RoBERTa (Liu et al., 2019, arXiv:1907.11692)."""

from ranker.encoders.family import ClassifierLayers, Family

FAMILY = Family(
    "roberta",
    layers="bert",
    positions_after_padding=True,
    classifier=ClassifierLayers("classifier.dense", "classifier.out_proj"),
)
