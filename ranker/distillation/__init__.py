"""Distillation of a teacher ranker's layers to a smaller student: hidden states, attention and scores."""
