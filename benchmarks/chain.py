"""The whole chain on one collection: BM25 -> monoBERT -> its scores teach DPR and ColBERT -> mined negatives -> a second round.

    python benchmarks/chain.py data=cwe
    python benchmarks/chain.py data=files data.path=../scifact

Each step is a command that stands here as a user would type it; it is printed before it runs, and a finished one is not repeated. Ends
with a table of measures, latency and index size.
"""

import argparse
import json
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MEASURES = ("nDCG@10", "AP@100", "RR@10", "R@100")


class Chain:
    """Commands over one collection; each leaves a folder below `out`."""

    def __init__(self, out: Path, training: list[str]) -> None:
        self.out, self.training = out, training

    def run(self, name: str, script: str, *arguments: str) -> Path:
        """Run a command unless its folder is finished."""
        folder = self.out / name
        finished = {"train.py": "result.json", "evaluate.py": "evaluation", "search.py": "search.json"}[script]
        goes_on = any(argument.startswith("checkpoint=") for argument in arguments)  # then the encoder is the checkpoint's
        more = [own for own in self.training if script == "train.py" and not (goes_on and own.startswith("encoder"))]
        command = [script, *arguments, *more, f"hydra.run.dir={folder}"]
        print("python", shlex.join(command), flush=True)
        if not (folder / finished).exists():
            command = [sys.executable, "-W", "ignore", str(ROOT / script), *command[1:]]
            if script != "search.py":
                command.append("trainer.enable_progress_bar=false")
            subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        return folder

    def scores(self, name: str, teacher: Path, *more: str) -> Path:
        """The teacher's run over candidates and positives of the training queries."""
        folder = self.run(
            name, "evaluate.py", f"checkpoint={teacher}", "split=train", "add_positives=true", "depth=30", "measures=[nDCG@10]", *more
        )
        return folder / "evaluation/train+positives/run.trec"

    def search(self, name: str, *arguments: str) -> Path:
        """Search the whole collection."""
        return self.run(name, "search.py", *arguments)


def set_of(folder: Path) -> Path:
    """The one set's evaluation."""
    (found,) = (folder / "evaluation").iterdir()
    return found


def row(name: str, folder: Path, cost: dict | None) -> str:
    """One line of the table."""
    measures = json.loads((set_of(folder) / "metrics.json").read_text())["measures"]
    numbers = [f"{measures[measure]:.3f}" for measure in MEASURES]
    latency = (
        [f"{cost['latency_ms']['p50']:.1f}", f"{cost['latency_ms']['p95']:.1f}", f"{cost['index_bytes'] / 2**20:.1f}"]
        if cost
        else ["", "", ""]
    )
    return f"| {name} | " + " | ".join([*numbers, *latency]) + " |"


def searched(chain: Chain, label: str, name: str, *arguments: str) -> tuple[Path, str]:
    """A search's folder, and its line of the table."""
    folder = chain.search(name, *arguments)
    (cost,) = (value for key, value in json.loads((folder / "search.json").read_text()).items() if key != "mined")
    return folder, row(label, folder, cost)


def taught(chain: Chain, model: str, data: list[str], teacher: Path, scores: Path) -> list[str]:
    """Both rounds of a bi-encoder; their lines of the table."""
    first = chain.run(f"{model}-1", "train.py", f"experiment=taught_{model}", *data, f"data.teacher={scores}")
    mining = ("mine=train", "mining.count=20", "mining.last=50")
    mined, one = searched(chain, f"{model}, first round", f"{model}-1-search", f"checkpoint={first}", *mining)
    again = chain.scores(f"{model}-teacher", teacher, f"candidates={mined / 'negatives.trec'}")
    second = chain.run(
        f"{model}-2", "train.py", f"experiment=taught_{model}", *data, f"checkpoint={first}", f"data.teacher={again}",
        f"data.negatives={mined / 'negatives.trec'}", "trainer.max_epochs=2",
    )  # fmt: skip
    return [one, searched(chain, f"{model}, second round", f"{model}-2-search", f"checkpoint={second}")[1]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=Path("outputs/chain"))
    parser.add_argument("--training", nargs="*", default=[], help="further overrides for every training")
    parser.add_argument(
        "--at-once", action="store_true", help="teach both bi-encoders at the same time; their latencies then disturb each other"
    )
    parser.add_argument("data", nargs="+", help="data=... and its keys")
    args = parser.parse_args()
    chain = Chain(args.out.resolve(), args.training)
    rows = [searched(chain, "BM25", "bm25", "model=bm25", *args.data)[1]]
    teacher = chain.run("monobert", "train.py", "model=monobert", *args.data)
    rows.append(row("monoBERT over BM25's top 100", teacher, None))
    scores = chain.scores("teacher", teacher)
    with ThreadPoolExecutor(2 if args.at_once else 1) as pool:
        for lines in pool.map(lambda model: taught(chain, model, args.data, teacher, scores), ("dpr", "colbert")):
            rows += lines
    print("| | " + " | ".join(MEASURES) + " | ms a query, p50 | p95 | index, MiB |\n|" + " --- |" * (len(MEASURES) + 4))
    print("\n".join(rows))


if __name__ == "__main__":
    main()
