"""CamemBERT (Martin et al., 2020, arXiv:1911.03894)."""

from ranker.encoders.family import ClassifierLayers, Family

FAMILY = Family(
    "camembert",
    layers="bert",
    positions_after_padding=True,
    classifier=ClassifierLayers("classifier.dense", "classifier.out_proj"),
)
