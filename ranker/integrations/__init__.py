"""Use a trained model in other programs: one module per program."""
