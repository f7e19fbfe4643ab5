"""Kinds of vector indexes, one file each; `make` returns an untrained faiss index for inner products."""
