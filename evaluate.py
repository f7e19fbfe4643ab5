"""Evaluate a checkpoint or an existing run file: measures, baseline, paired tests.

`python evaluate.py --help` lists the keys.
"""

from ranker.cli.main import run

if __name__ == "__main__":
    run("evaluate")
