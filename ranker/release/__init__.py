"""Write exports for other programs, compare them with the original, and write published folders with a model card."""
