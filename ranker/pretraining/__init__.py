"""Pretraining on the texts of a collection, without queries and judgements: objectives, their draws and training."""
