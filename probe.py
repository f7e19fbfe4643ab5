"""Probe each layer of an encoder or of a trained ranker. `python probe.py --help` lists the tasks and keys."""

from ranker.cli.main import run

if __name__ == "__main__":
    run("probe")
