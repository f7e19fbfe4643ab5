"""Triton kernels of interactions between vectors; `ranker.interactions` has the same functions in torch."""
