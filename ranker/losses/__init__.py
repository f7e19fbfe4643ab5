"""Ranking losses, one file each; `_groups` has shared functions. Read `hinge` first."""
