"""Does learning a probing task beside ranking help, and does it matter at which layer? nDCG@10 on the built-in collection.

    python benchmarks/multitask.py                      # train what is not there yet, then the table and the picture
    python benchmarks/multitask.py --report --page docs/multitask.md   # only measure what is there, and write it into
    the page

Ranking only, and one task or three beside it, with heads at the middle layer or at the last of the 2-layer encoder
`splade_tiny`. All trainings see the same ranking groups in the same order. A finished run is not made again.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

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
    """One `python train.py`."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".log").open("wb") as log:
        command = [sys.executable, "-W", "ignore", str(ROOT / "train.py"), f"hydra.run.dir={folder}", *overrides]
        if subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, check=False).returncode:
            raise SystemExit(f"{folder} failed; see {log.name}")


def values(folder: Path) -> dict[str, float]:
    """The measure of each test query."""
    rows = [json.loads(line) for line in (folder / "evaluation" / "cwe" / "per_query.jsonl").read_text().splitlines()]
    return {row["query_id"]: row["measures"][MEASURE] for row in rows}


def compare(one: np.ndarray, other: np.ndarray) -> dict[str, float]:
    """Paired over queries, each query's mean over seeds [seeds, queries]."""
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


def tables(found: dict[str, np.ndarray]) -> str:
    """The figures in Markdown, and in plain words what is significant."""
    pairs = [(name, BASELINE) for name in found if name != BASELINE]
    pairs += [(name.replace("layer 2", "layer 1"), name) for name in found if "layer 2" in name]
    tested = {
        f"{one} - {other}": compare(found[one], found[other]) for one, other in pairs if one in found and other in found
    }
    corrected = holm({name: row["p"] for name, row in tested.items()})
    seeds = max(len(own) for own in found.values())
    lines = [f"| training | {MEASURE}, each seed | mean |", "| --- | --- | --- |"]
    lines += [
        f"| {name} | {', '.join(f'{mean:.3f}' for mean in own.mean(axis=1))} | **{own.mean():.4f}** |"
        for name, own in found.items()
    ]
    lines += [
        "",
        "| difference | delta | p | p (Holm) | detectable | wins/losses/ties |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, row in tested.items():
        counts = f"{row['wins']}/{row['losses']}/{row['ties']}"
        lines.append(
            f"| {name} | {row['delta']:+.4f} | {row['p']:.3f} | {corrected[name]:.3f} | {row['detectable']:.4f} | {counts} |"
        )
    sure = [f"{name} ({tested[name]['delta']:+.4f})" for name in tested if corrected[name] <= 0.05]
    said = (
        f"Significant at 5 %: {'; '.join(sure)}. All other differences are not."
        if sure
        else "No difference is significant at 5 %."
    )
    how = "p: paired randomisation test over queries on each query's mean over seeds; detectable: 80 % power at 5 %, uncorrected."
    return "\n".join([*lines, "", f"{said} {seeds} seeds, {next(iter(found.values())).shape[1]} test queries; {how}"])


def put_into(page: Path, text: str) -> None:
    """Replace what stands between the page's marks."""
    before, rest = page.read_text(encoding="utf-8").split(MARKS[0])
    page.write_text(f"{before}{MARKS[0]}\n{text}\n{MARKS[1]}{rest.split(MARKS[1])[1]}", encoding="utf-8")


def draw(found: dict[str, np.ndarray], picture: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 0.6 * len(found) + 1), layout="constrained")
    for place, own in enumerate(found.values()):
        means = own.mean(axis=1)
        axes.plot(means, [place] * len(means), "o", color="tab:blue", alpha=0.5)
        axes.plot([means.mean()], [place], "|", color="black", markersize=18)
    axes.axvline(found[BASELINE].mean(), color="grey", linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(found)), list(found))
    axes.invert_yaxis()
    axes.set_xlabel(
        f"{MEASURE}, {found[BASELINE].shape[1]} test queries, BM25's top 20\npoints: seeds, bar: their mean"
    )
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmark-multitask"))
    parser.add_argument("--picture", type=Path, default=ROOT / "docs" / "multitask.png")
    parser.add_argument("--page", type=Path, help="put the tables into this page, between its marks")
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
    found = {}
    for variant in VARIANTS:
        rows = [
            values(folder)
            for seed in args.seeds
            if ((folder := folder_of(out, variant, seed)) / "result.json").is_file()
        ]
        if len(rows) == len(args.seeds):
            found[variant] = np.array([[row[query] for query in sorted(row)] for row in rows])
    if BASELINE not in found or len(found) < 2:
        raise SystemExit(
            f"nothing to compare yet in {out}: expected {BASELINE} and another training with all of the seeds {args.seeds}"
        )
    text = tables(found)
    print(text)
    draw(found, args.picture)
    if args.page:
        put_into(args.page, f"{text}\n\n![nDCG@10 of each training and seed]({args.picture.name})")


if __name__ == "__main__":
    main()
