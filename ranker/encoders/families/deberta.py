"""DeBERTa, first version (DeBERTa v2 and v3 have another `model_type`)."""

from ranker.encoders.family import Family

FAMILY = Family("deberta", why_float32="transformers' mask of the attention logits overflows half precision")
