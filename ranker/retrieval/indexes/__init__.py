"""Types of vector indexes, one file each; see `ranker.retrieval.index_type.IndexType`."""
