"""Pretraining on the docs of a collection, without queries and judgements: objectives, random draws, training."""
