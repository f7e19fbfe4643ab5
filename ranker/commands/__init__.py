"""One command a module: train, evaluate, search, probe, replay."""
