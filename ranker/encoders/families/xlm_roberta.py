"""XLM-RoBERTa (Conneau et al., 2020, arXiv:1911.02116)."""

from ranker.encoders.family import ClassifierLayers, Family

FAMILY = Family(
    "xlm-roberta",
    layers="bert",
    positions_after_padding=True,
    classifier=ClassifierLayers("classifier.dense", "classifier.out_proj"),
)
