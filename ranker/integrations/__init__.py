"""A trained model in other programs: one module per program."""
