"""Models that read the docs of a query together, so that the score of a doc depends on the other docs."""
