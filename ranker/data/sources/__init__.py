"""Data sources, one per file: what a yaml of conf/data builds, see `Source` in ranker/data/collection.py."""
