"""Compare SPLADE with sentence-transformers' SparseEncoder, trained on the same pairs, over full collections.

    python benchmarks/sparse_quality.py data=cwe
    python benchmarks/sparse_quality.py data=files data.path=../scifact --jobs 6 --precision bf16-mixed   # on a GPU

The encoder is `splade_tiny`, with several seeds. The other program's trainings are those of sparse_peer.py and need the
package datasets. Each step is a command as a user would type it, and is printed before it runs. Finished steps are
reused. Every search ranks the whole collection by term weights, with `index=sparse`. The output is a table with means
over seeds and paired tests over queries (with these means). A last line has the largest difference between both
programs' scores of the untrained model.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from one_line import one_line  # noqa: E402
from students import Step, against  # noqa: E402

MEASURES = ("nDCG@10", "R@100")
PROGRAMS = {"ours": "this program", "theirs": "sentence-transformers"}


@dataclass(frozen=True)
class Peer:
    """A training with the other program."""

    run_folder: Path
    start: Path
    folder: Path

    def run(self) -> None:
        """Run the training unless its result exists."""
        words = [str(ROOT / "benchmarks" / "sparse_peer.py"), str(self.run_folder), str(self.start), str(self.folder)]
        print("python", shlex.join(words), flush=True)
        if not (self.folder / "model" / "modules.json").is_file():
            shutil.rmtree(self.folder, ignore_errors=True)
            with self.folder.with_suffix(".log").open("w") as log:
                subprocess.run([sys.executable, "-W", "ignore", *words], check=True, stdout=log, stderr=log)


def start_folder(folder: Path, options: argparse.Namespace) -> Path:
    """Write the untrained model."""
    from ranker.encoders.loading import load_encoder
    from ranker.models.splade import SPLADE

    if not (folder / "modules.json").is_file():
        scorer = SPLADE(load_encoder("model", package="cognition", dropout=0.0))
        scorer.save(folder, options.doc_tokens + 2, options.query_tokens + 2)
    return folder


def stages(options: argparse.Namespace, start: Path) -> list[list[Step | Peer]]:
    """Return the steps by stages. The steps of a stage can run at the same time."""
    out, data = options.out, tuple(options.data)
    lengths = (f"max_query_tokens={options.query_tokens}", f"max_doc_tokens={options.doc_tokens}")
    own = f"trainer.precision={options.precision}"
    batch = (f"batch.queries={options.queries}", "batch.docs=2", f"trainer.max_epochs={options.epochs}", own)
    untested = ("monitor=null", "depth=2", "val_depth=2", "logger=none", "report=none")
    cache = f"cache_dir={out / 'cache'}"
    search = (*data, *lengths, "index=sparse", "report=none", cache)
    seeds = range(options.seeds)
    trainings = [
        Step(
            out / f"ours_{seed}",
            "train",
            ("model=splade", "encoder=splade_tiny", *data, *lengths, *batch, *untested, cache, f"seed={seed}",
             *options.with_),
        )
        for seed in seeds
    ]  # fmt: skip
    peers = [Peer(step.folder, start, out / f"theirs_{seed}") for seed, step in enumerate(trainings)]
    untrained = (f"checkpoint={start}", *search, "trainer.precision=32-true")
    searches = [Step(out / "search_untrained", "search", untrained)]
    for seed in seeds:
        for name, folder in (("ours", out / f"ours_{seed}"), ("theirs", out / f"theirs_{seed}" / "model")):
            arguments = (f"checkpoint={folder}", *search, own)
            searches.append(Step(out / f"search_{name}_{seed}", "search", arguments))
    return [trainings[:1], trainings[1:], list(peers), searches[:1], searches[1:]]


def values(folder: Path, measure: str, key: str = "measures") -> np.ndarray:
    """Return a measure of each query of a finished search, or of BM25 (key `baseline`), float64 [queries]."""
    (path,) = folder.glob("evaluation/*/per_query.jsonl")
    rows = sorted(map(json.loads, path.read_text().splitlines()), key=lambda row: row["query_id"])
    return np.array([row[key][measure] for row in rows])


def table(options: argparse.Namespace) -> list[str]:
    """Return the lines of the table in Markdown."""
    lines = [
        f"| {options.name}, full collection | " + " | ".join(MEASURES) + " | words of a query | words of a doc |",
        "| --- | --- | --- | --- | --- |",
    ]
    bm25 = [values(options.out / "search_untrained", measure, "baseline").mean() for measure in MEASURES]
    lines.append(f"| BM25 | {' | '.join(f'{value:.4f}' for value in bm25)} | | |")
    means = {}
    for name, title in {"untrained": "untrained", **PROGRAMS}.items():
        seeds = [""] if name == "untrained" else [f"_{seed}" for seed in range(options.seeds)]
        folders = [options.out / f"search_{name}{seed}" for seed in seeds]
        costs = [next(iter(json.loads((folder / "search.json").read_text()).values())) for folder in folders]
        cells = []
        for measure in MEASURES:
            found = [values(folder, measure) for folder in folders]
            means[name, measure] = np.mean(found, axis=0)
            each = f" ({', '.join(f'{part.mean():.4f}' for part in found)})" if len(found) > 1 else ""
            cells.append(f"{means[name, measure].mean():.4f}{each}")
        cells += [f"{np.mean([cost[key] for cost in costs]):.0f}" for key in ("query_terms", "doc_terms")]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    lines.append("")
    for measure in MEASURES:
        lines.append(f"{measure}, this program less the other: {against(*(means[p, measure] for p in PROGRAMS))}")
    return lines


def difference(options: argparse.Namespace, start: Path) -> str:
    """Compare both programs' scores of the untrained model, over the rankings of the first queries."""
    import torch
    from sentence_transformers import SparseEncoder
    from sparse_peer import cut

    from ranker.assembly.data import load_source
    from ranker.config.stored import load_stored
    from ranker.data.trec import read_run

    (path,) = (options.out / "search_untrained").glob("evaluation/*/run.trec")
    (test,) = load_source(load_stored(options.out / "search_untrained" / "config.yaml").data).tests.values()
    run = dict(list(read_run(path).items())[:50])
    model = SparseEncoder(str(start), device="cuda" if torch.cuda.is_available() else "cpu")
    model.max_seq_length = options.doc_tokens + 2
    texts = {doc.doc_id: doc.full_text for doc in test.docs}
    doc_ids = sorted({doc_id for scores in run.values() for doc_id in scores})
    queries = cut(model.tokenizer, [test.queries[query_id] for query_id in run], options.query_tokens)
    docs = cut(model.tokenizer, [texts[doc_id] for doc_id in doc_ids], options.doc_tokens)
    vectors = [
        encode(some, convert_to_sparse_tensor=False).double().cpu()
        for encode, some in ((model.encode_query, queries), (model.encode_document, docs))
    ]
    scores, place = vectors[0] @ vectors[1].T, {doc_id: i for i, doc_id in enumerate(doc_ids)}
    pairs = [(row, place[doc], score) for row, found in enumerate(run.values()) for doc, score in found.items()]
    rows, columns, ours = (torch.tensor(part) for part in zip(*pairs, strict=True))
    furthest = float((scores[rows, columns] - ours.double()).abs().max())
    return f"untrained, {len(pairs)} scores of up to {float(ours.max()):.1f}: largest difference {furthest:.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="+", help="the collection, as for train.py")
    parser.add_argument("--out", type=Path, help="default: sparse_quality/SET")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--queries", type=int, default=16, help="queries of a step; each has a positive and a negative")
    parser.add_argument("--query-tokens", type=int, default=64)
    parser.add_argument("--doc-tokens", type=int, default=128)
    parser.add_argument("--precision", default="32-true", help="of trainings and searches: 32-true or bf16-mixed")
    parser.add_argument("--jobs", type=int, default=1, help="commands at a time")
    parser.add_argument("--with", dest="with_", nargs="*", default=[], metavar="KEY=VALUE", help="for our trainings")
    options = parser.parse_args()
    source = next((part.split("=", 1)[1] for part in options.data if part.startswith("data.path=")), options.data[0])
    options.name = Path(source).name.removeprefix("data=")
    options.out = (options.out or Path("sparse_quality") / options.name).absolute()
    options.out.mkdir(parents=True, exist_ok=True)
    start = start_folder(options.out / "start", options)
    with ThreadPoolExecutor(options.jobs) as pool:
        for stage in stages(options, start):
            list(pool.map(lambda step: step.run(), stage))
    lines = [*table(options), difference(options, start)]
    (options.out / "table.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    one_line(main)
