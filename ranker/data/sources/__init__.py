"""Data sources, one per file, which the yaml files of conf/data build; see `Source` in ranker/data/collection.py."""
