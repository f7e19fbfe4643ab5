"""BERT (Devlin et al., 2019, arXiv:1810.04805)."""

from ranker.encoders.family import ClassifierLayers, Family

FAMILY = Family(
    "bert",
    layers="bert",
    positions_after_padding=False,
    reads_single_segment=True,
    classifier=ClassifierLayers("bert.pooler.dense", "classifier"),
)
