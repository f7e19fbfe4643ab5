"""Ranking losses, one file each; `_groups` has the functions that they share. Start with `hinge`."""
