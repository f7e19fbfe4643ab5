"""Search a whole collection with a bi-encoder or BM25, and mine hard negatives.

`python search.py --help` lists groups and keys.
"""

from ranker.cli.main import run

if __name__ == "__main__":
    run("search")
