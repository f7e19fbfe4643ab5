"""The keys of each command and their types: one module per command; conf/ explains them."""
