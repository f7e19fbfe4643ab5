"""From hidden states to vectors and scores: pooling, MaxSim, the grid of scores."""
