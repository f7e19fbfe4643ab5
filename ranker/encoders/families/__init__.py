"""Encoder families, one file each: its facts as a `Family`."""
