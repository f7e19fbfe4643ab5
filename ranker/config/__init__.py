"""Configuration: typed roots, checks, what stored files may name."""
