"""Model folders of other programs, one module per format.

Each module has `recognises(folder)`, `SCORER` (dotted path of the class whose `load` takes such a folder), `read`
and, except for Stanford ColBERT, `write`. `ranker.checkpoint` finds the modules by listing this package.
"""
