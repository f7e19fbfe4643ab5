"""Models that read the docs of a query together: their scores depend on all of them."""
