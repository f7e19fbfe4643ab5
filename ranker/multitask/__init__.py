"""Train ranking together with probing tasks: options, rows, sampling, heads and the Lightning module."""
