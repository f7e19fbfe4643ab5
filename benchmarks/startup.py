"""Processor time of start-up: evaluate.py compared with the `ir_measures` command, train.py with the imports it needs.

    python benchmarks/startup.py --run FILE.trec --qrels FILE

Each command runs once to fill caches. Then it runs --repeats times, in turn with the command with which it is compared.
The table has medians of user plus system time of the process and its children, in seconds. `train.py` trains one step
on the default data; its time ends at the first step and does not include the checkpoint, the test and the report.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from one_line import one_line

ROOT = Path(__file__).resolve().parents[1]
MEASURES = ["nDCG@10", "RR@10", "AP@100", "R@100"]
# as on a user's machine, compiled modules are cached
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
# prints the processor time at the first optimizer step, and ends
FIRST_STEP = """
import os, resource, sys
from torch.optim.optimizer import register_optimizer_step_pre_hook
sys.path.insert(0, {root!r})
from ranker.cli.main import run

def stop(optimizer, args, kwargs):
    times = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    print(sum(time.ru_utime + time.ru_stime for time in times), flush=True)
    os._exit(0)

register_optimizer_step_pre_hook(stop)
run("train")
"""


def measured(command: list[str], folder: Path) -> float:
    """Return the user and system time of a command and its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, cwd=folder, check=True, capture_output=True, env=ENVIRONMENT)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def first_step(folder: Path) -> float:
    """Return the processor time of train.py up to its first optimizer step."""
    code = FIRST_STEP.format(root=str(ROOT))
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, env=ENVIRONMENT)
    return float(done.stdout.split()[-1])


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--run", type=Path, required=True, help="a TREC run")
    parser.add_argument("--qrels", type=Path, required=True, help="its judgements")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    run, qrels = str(args.run.resolve()), str(args.qrels.resolve())
    evaluate = [sys.executable, str(ROOT / "evaluate.py"), f"run={run}", f"qrels={qrels}"]
    peer = [str(Path(sys.executable).parent / "ir_measures"), qrels, run, *MEASURES]
    imports = [sys.executable, "-c", "import lightning, transformers"]
    rows: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for i in range(args.repeats + 1):
            times = {
                "evaluate.py run=RUN qrels=QRELS": measured(evaluate, Path(folder)),
                "ir_measures": measured(peer, Path(folder)),
                "train.py to its first step": first_step(Path(folder)),
                "import lightning, transformers": measured(imports, Path(folder)),
            }
            for name, seconds in times.items() if i else ():  # the first round fills caches
                rows.setdefault(name, []).append(seconds)
    medians = {name: statistics.median(seconds) for name, seconds in rows.items()}
    names = list(medians)
    print("| command | processor time, s | peer | s | ratio | bound |\n| --- | --- | --- | --- | --- | --- |")
    for ours, theirs, bound in ((names[0], names[1], 3.0), (names[2], names[3], 1.5)):
        ratio = medians[ours] / medians[theirs]
        print(f"| {ours} | {medians[ours]:.2f} | {theirs} | {medians[theirs]:.2f} | {ratio:.2f} | {bound} |")


if __name__ == "__main__":
    one_line(main)
