"""Encoder families, one file for each: the properties of the family as a `Family`."""
