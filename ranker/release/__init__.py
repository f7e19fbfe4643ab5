"""Exports for other programs, with their comparison with the original, and published folders with a model card."""
