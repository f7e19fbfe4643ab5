"""ModernBERT (Warner et al., 2024, arXiv:2412.13663), and models with its modules, such as Ettin's encoders."""

from ranker.encoders.family import Family

FAMILY = Family("modernbert", layers="modernbert", positions_after_padding=False)
