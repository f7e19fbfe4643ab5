"""Train a reranker and test it. `python train.py` trains the demo; `python train.py --help` lists groups and keys."""

from ranker.cli.main import run

if __name__ == "__main__":
    run("train")
