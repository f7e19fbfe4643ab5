"""Compute vectors and scores from hidden states: pooling, MaxSim, term weights, the grid of scores."""
