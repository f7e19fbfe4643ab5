"""Ranking together with probing tasks: options, rows, sampling, heads, module."""
