"""Train, evaluate and probe neural rerankers: the same optimisation on any hardware, every number from a run file."""
