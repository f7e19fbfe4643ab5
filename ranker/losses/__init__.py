"""Ranking losses: each file has one loss, and `_groups` has shared functions. Read `hinge` first."""
