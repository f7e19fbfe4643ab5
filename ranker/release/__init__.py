"""Exports for other programs, which are compared with the original, and published folders with a model card."""
