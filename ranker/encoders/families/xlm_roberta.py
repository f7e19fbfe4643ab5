"""XLM-RoBERTa (Conneau et al., 2020, arXiv:1911.02116)."""

from ranker.encoders.family import Classifier, Family

FAMILY = Family(
    "xlm-roberta",
    layers="bert",
    positions_after_padding=True,
    classifier=Classifier("classifier.dense", "classifier.out_proj"),
)
