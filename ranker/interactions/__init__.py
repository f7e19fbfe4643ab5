"""Hidden states to vectors and scores: pooling, MaxSim."""
