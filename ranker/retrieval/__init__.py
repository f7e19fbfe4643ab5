"""Search of whole collections: BM25 (`bm25`), and vectors (`encode`, `vector_store`, `index`, `search`).

`pipeline` has the steps of the search command, and `mining` chooses hard negatives.
"""
