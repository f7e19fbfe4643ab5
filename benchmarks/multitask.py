"""Does training on a probing task help ranking, and does the layer of its head matter? nDCG@10, built-in collection.

    python benchmarks/multitask.py                                     # trains missing runs, prints the tables
    python benchmarks/multitask.py --report --page docs/multitask.md   # trains nothing, writes the tables into the page

The trainings are: ranking only, and ranking with one or with three tasks, whose heads are at the first or at the last
layer of the 2-layer encoder `splade_tiny`. All trainings see the same ranking groups in the same order. Finished runs
are reused.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from one_line import one_line  # noqa: E402

from ranker.evaluation.significance import holm, randomisation_test, wins_losses_ties  # noqa: E402

BASELINE = "ranking only"


def heads(layer: int, *tasks: str) -> list[str]:
    return ["model=multitask", f"model.heads=[{','.join(f'{{task: {task}, layer: {layer}}}' for task in tasks)}]"]


VARIANTS = {
    BASELINE: ["model=monobert"],
    "+ BM25 at layer 1": heads(1, "bm25"),
    "+ BM25 at layer 2": heads(2, "bm25"),
    "+ BM25, TF, SEM at layer 1": heads(1, "bm25", "tf", "sem"),
    "+ BM25, TF, SEM at layer 2": heads(2, "bm25", "tf", "sem"),
}
COMMON = [
    "trainer.max_epochs=4", "trainer.check_val_every_n_epoch=4", "depth=20", "measures=[nDCG@10,RR@10]",
    "trainer.enable_progress_bar=false", "logger=csv",
]  # fmt: skip
LABELS = ["model.labels.docs_per_query=3"]
MEASURE = "nDCG@10"
MARKS = ("<!-- figures -->", "<!-- end of figures -->")


def folder_of(out: Path, variant: str, seed: int) -> Path:
    return out / f"{variant.replace('+ ', '').replace(', ', '-').replace(' ', '-')}-{seed}"


def train(folder: Path, overrides: list[str]) -> None:
    """Run `python train.py` with these overrides."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".log").open("wb") as log:
        command = [sys.executable, "-W", "ignore", str(ROOT / "train.py"), f"hydra.run.dir={folder}", *overrides]
        if subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, check=False).returncode:
            raise SystemExit(f"{folder} failed; see {log.name}")


def values(folder: Path) -> dict[str, float]:
    """Return query id -> measure, for all test queries."""
    rows = [json.loads(line) for line in (folder / "evaluation" / "cwe" / "per_query.jsonl").read_text().splitlines()]
    return {row["query_id"]: row["measures"][MEASURE] for row in rows}


def compare(one: np.ndarray, other: np.ndarray) -> dict[str, float]:
    """Compare two trainings by paired tests over queries, with each query's mean over seeds; both [seeds, queries]."""
    differences = (one - other).mean(axis=0)
    error = differences.std(ddof=1) / np.sqrt(len(differences))
    wins, losses, ties = wins_losses_ties(differences)
    return {
        "delta": differences.mean(),
        "p": randomisation_test(differences),
        "detectable": 2.8 * error,
        "wins": wins,
        "losses": losses,
        "ties": ties,
    }


def tables(results: dict[str, np.ndarray]) -> str:
    """Return the results in Markdown, with a sentence that names the significant differences."""
    pairs = [(name, BASELINE) for name in results if name != BASELINE]
    pairs += [(name.replace("layer 2", "layer 1"), name) for name in results if "layer 2" in name]
    tested = {
        f"{one} - {other}": compare(results[one], results[other])
        for one, other in pairs
        if one in results and other in results
    }
    corrected = holm({name: row["p"] for name, row in tested.items()})
    seeds = max(len(scores) for scores in results.values())
    lines = [f"| training | {MEASURE}, each seed | mean |", "| --- | --- | --- |"]
    lines += [
        f"| {name} | {', '.join(f'{mean:.3f}' for mean in scores.mean(axis=1))} | **{scores.mean():.4f}** |"
        for name, scores in results.items()
    ]
    lines += [
        "",
        "| difference | delta | p | p (Holm) | detectable | wins/losses/ties |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, row in tested.items():
        counts = f"{row['wins']}/{row['losses']}/{row['ties']}"
        lines.append(
            f"| {name} | {row['delta']:+.4f} | {row['p']:.3f} | {corrected[name]:.3f} "
            f"| {row['detectable']:.4f} | {counts} |"
        )
    significant = [f"{name} ({tested[name]['delta']:+.4f})" for name in tested if corrected[name] <= 0.05]
    summary = (
        f"Significant at 5 %: {'; '.join(significant)}. All other differences are not."
        if significant
        else "No difference is significant at 5 %."
    )
    method = (
        "p: paired randomisation test over queries on each query's mean over seeds; "
        "detectable: 80 % power at 5 %, uncorrected."
    )
    queries = next(iter(results.values())).shape[1]
    return "\n".join([*lines, "", f"{summary} {seeds} seeds, {queries} test queries; {method}"])


def put_into(page: Path, text: str) -> None:
    """Replace the text between the marks of the page."""
    before, rest = page.read_text(encoding="utf-8").split(MARKS[0])
    page.write_text(f"{before}{MARKS[0]}\n{text}\n{MARKS[1]}{rest.split(MARKS[1])[1]}", encoding="utf-8")


def draw(results: dict[str, np.ndarray], picture: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 0.6 * len(results) + 1), layout="constrained")
    for row, scores in enumerate(results.values()):
        means = scores.mean(axis=1)
        axes.plot(means, [row] * len(means), "o", color="tab:blue", alpha=0.5)
        axes.plot([means.mean()], [row], "|", color="black", markersize=18)
    axes.axvline(results[BASELINE].mean(), color="grey", linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(results)), list(results))
    axes.invert_yaxis()
    axes.set_xlabel(
        f"{MEASURE}, {results[BASELINE].shape[1]} test queries, BM25's top 20\npoints: seeds, bar: their mean"
    )
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmark-multitask"))
    parser.add_argument("--picture", type=Path, default=ROOT / "docs" / "multitask.png")
    parser.add_argument("--page", type=Path, help="write the tables into this page, between its marks")
    parser.add_argument("--report", action="store_true", help="train nothing")
    parser.add_argument("extra", nargs="*", help="further overrides for every training")
    args = parser.parse_args()
    out = args.out.resolve()
    if not args.report:
        for seed in args.seeds:
            for variant, overrides in VARIANTS.items():
                folder = folder_of(out, variant, seed)
                if not (folder / "result.json").is_file():
                    train(
                        folder,
                        [*overrides, *COMMON, *(LABELS if variant != BASELINE else []), f"seed={seed}", *args.extra],
                    )
                result = json.loads((folder / "result.json").read_text())
                print(
                    variant,
                    seed,
                    f"{result['measures']['cwe'][MEASURE]:.4f}",
                    f"{result['train_seconds']:.0f} s",
                    flush=True,
                )
    results = {}
    for variant in VARIANTS:
        rows = [
            values(folder)
            for seed in args.seeds
            if ((folder := folder_of(out, variant, seed)) / "result.json").is_file()
        ]
        if len(rows) == len(args.seeds):
            results[variant] = np.array([[row[query] for query in sorted(row)] for row in rows])
    if BASELINE not in results or len(results) < 2:
        raise SystemExit(
            f"{out}: expected {BASELINE!r} and another training with all seeds {args.seeds}, got {list(results)}"
        )
    text = tables(results)
    print(text)
    draw(results, args.picture)
    if args.page:
        put_into(args.page, f"{text}\n\n![nDCG@10 of each training and seed]({args.picture.name})")


if __name__ == "__main__":
    one_line(main)
