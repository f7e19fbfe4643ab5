"""Evaluate a checkpoint or an existing run file: compute measures, compare with a baseline, run paired tests.

`python evaluate.py --help` lists the keys.
"""

from ranker.cli.main import run

if __name__ == "__main__":
    run("evaluate")
