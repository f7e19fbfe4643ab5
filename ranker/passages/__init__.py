"""Docs as windows: a scorer whose rows are windows, and how the windows of a doc become its score."""
