"""Compare runs on one, two, four and eight GPUs: losses, speed, evaluation and encoding of docs, memory.

    python benchmarks/scaling.py                                # 1, 2, 4 ... up to all GPUs; on a CPU 1 and 2 processes
    python benchmarks/scaling.py --devices 1 2 --out scaling.json

Each part (a model, a job and a number of devices) is a separate program (scaling_part.py) with its own time limit. If a
part fails, this is reported, and the others run. If `--out` and `--folder` already contain a part with the same
settings from the same machine, it is not run again, so a measurement can be spread over several calls. The first number
of devices is the baseline of the others.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from one_line import one_line  # noqa: E402
from scaling_report import report  # noqa: E402

MODELS = {
    "monobert": ("losses", "speed", "evaluate"),
    "dpr": ("losses", "speed", "evaluate", "encode"),
    "colbert": ("losses", "speed", "evaluate"),
}
ON_GPU = {
    "size": "base",
    "pairs": 744,
    "max_tokens": 69632,
    "steps": 60,
    "exact_pairs": 1024,
    "exact_tokens": 12288,
    "graphs": "auto",
    "queries": 30000,
}
ON_CPU = {
    "size": "tiny",
    "pairs": 32,
    "max_tokens": 4096,
    "steps": 8,
    "exact_pairs": 32,
    "exact_tokens": 3072,
    "graphs": "auto",
    "queries": 64,
}


def main() -> None:
    gpus = torch.cuda.device_count()
    usual = ON_GPU if gpus else ON_CPU
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--devices", type=int, nargs="+", default=[n for n in (1, 2, 4, 8) if n <= (gpus or 2)])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--parts", nargs="+", choices=MODELS["dpr"], default=MODELS["dpr"])
    parser.add_argument("--size", choices=["tiny", "minilm", "base", "large"], default=usual["size"])
    parser.add_argument("--pairs", type=int, default=usual["pairs"], help="speed: pairs per step and device")
    parser.add_argument("--max-tokens", type=int, default=usual["max_tokens"], help="speed: token budget")
    parser.add_argument("--steps", type=int, default=usual["steps"], help="speed: optimizer steps")
    parser.add_argument(
        "--exact-pairs", type=int, default=usual["exact_pairs"], help="losses: pairs per step over all devices"
    )
    parser.add_argument("--exact-tokens", type=int, default=usual["exact_tokens"], help="losses: token budget")
    parser.add_argument("--graphs", choices=["auto", "true", "false"], default=usual["graphs"])
    parser.add_argument("--queries", type=int, default=usual["queries"], help="evaluation in bf16: queries of 8 docs")
    parser.add_argument("--timeout", type=float, default=300, help="seconds that a part may take")
    parser.add_argument("--out", type=Path, help="JSON file of results; the parts that it contains are not run again")
    parser.add_argument(
        "--folder", type=Path, help="folder of collections, runs and vectors; default: a temporary folder"
    )
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # exit normally, so that the running part also ends
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        found = measure(args, folder, gpus)
    lines = report(found, gpus)
    print("\n" + "\n".join(lines), flush=True)
    if args.out:
        found["report"] = lines
        write(args.out, found)


def measure(args: argparse.Namespace, folder: Path, gpus: int) -> dict[str, Any]:
    """Run the missing parts, first the baseline, then the largest number of devices; return all results."""
    settings = {name: getattr(args, name) for name in ON_GPU}
    settings["graphs"] = {"true": True, "false": False}.get(args.graphs, args.graphs)
    # the data must be the same for any number of devices, because a later call may add another number
    settings["groups"] = max(args.pairs // 8 * args.steps * max(gpus, 2), args.queries)
    found: dict[str, Any] = {
        "environment": environment(gpus),
        "settings": settings,
        "base": args.devices[0],
        "parts": {},
    }
    if args.out and args.out.exists():
        before = json.loads(args.out.read_text(encoding="utf-8"))
        for key in ("environment", "settings", "base"):
            if before[key] != found[key]:
                sys.exit(
                    f"{args.out}: expected the same {key} as now, {found[key]}; got {before[key]}; name another file"
                )
        found["parts"] = {key: part for key, part in before["parts"].items() if "failed" not in part}
    for key, value in {**found["environment"], **settings}.items():
        print(f"{key}: {value}", flush=True)
    order = [args.devices[0], *sorted(args.devices[1:], reverse=True)]
    wanted = [(model, what, n) for n in order for model in args.models for what in MODELS[model] if what in args.parts]
    if not all((folder / f"{name}.pickle").exists() for name in ("small", "large")):
        prepared = run(folder, "monobert", "prepare", 1, settings, args.timeout)
        if "failed" in prepared:
            sys.exit(f"prepare failed: {prepared['failed']}")
    for model, what, devices in wanted:
        key = f"{model} {what} {devices}"
        baseline = folder / f"{model}-{what}-{devices}-bf16{'.trec' if what == 'evaluate' else ''}"
        if key in found["parts"] and (what in ("losses", "speed") or devices != order[0] or baseline.exists()):
            print(f"{key}: from {args.out}", flush=True)
            continue
        part = run(folder, model, what, devices, settings, args.timeout)
        if what in ("evaluate", "encode") and "failed" not in part:
            try:
                part["result"] = {"evaluate": runs_compared, "encode": vectors_compared}[what](
                    folder, model, devices, args.devices[0], part
                )
            except Exception as error:  # an error counts as a failed part
                part["failed"] = repr(error)[:500]
        found["parts"][key] = part
        if args.out:
            write(args.out, found)
    return found


def run(folder: Path, model: str, what: str, devices: int, settings: dict[str, Any], timeout: float) -> dict[str, Any]:
    """Run one part in a separate process group; return the result of each process.

    The output of the part goes to a file, so that no orphaned process can keep a pipe open.
    """
    name = f"{model}-{what}-{devices}"
    out, log = folder / f"{name}.json", folder / f"{name}.log"
    for old in folder.glob(f"{name}[-.]*"):
        shutil.rmtree(old) if old.is_dir() else old.unlink()
    part = {
        "what": what,
        "devices": devices,
        "model": model,
        **settings,
        "folder": str(folder),
        "out": str(out),
        "seconds": timeout,
        "dump_at": time.time() + 0.9 * timeout,
    }
    command = [sys.executable, "-W", "ignore", str(ROOT / "benchmarks" / "scaling_part.py"), json.dumps(part)]
    started = time.monotonic()
    print(f"{name.replace('-', ' ')}:", flush=True)
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONFAULTHANDLER": "1"},
            start_new_session=True,
        )
    ranks = [Path(f"{out}.{i}") for i in range(devices)]
    failure = ""
    try:
        with log.open(encoding="utf-8", errors="replace") as output:
            while process.poll() is None:
                time.sleep(0.5)
                for line in output:
                    if line.startswith("@ rank 0,"):
                        print("  " + line[2:].rstrip(), flush=True)
                if time.monotonic() - started > timeout:
                    failure = f"not done after {timeout:.0f} s"
                    break
        ends = time.monotonic() + 30
        while (
            not failure
            and process.returncode == 0
            and not all(path.exists() for path in ranks)
            and time.monotonic() < ends
        ):
            time.sleep(0.5)  # the other processes end a little later
    finally:
        kill(process)
    if not failure and (process.returncode or not all(path.exists() for path in ranks)):
        failure = f"exit status {process.returncode}"
    if failure:
        last = log.read_text(encoding="utf-8", errors="replace").splitlines()[-100:]
        print(f"  FAILED: {failure}; {log} ends with:\n    " + "\n    ".join(last), flush=True)
        return {"failed": failure, "log": last}
    return {
        "seconds": time.monotonic() - started,
        "ranks": [json.loads(path.read_text(encoding="utf-8")) for path in ranks],
    }


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the process group of the part."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def runs_compared(folder: Path, model: str, devices: int, base: int, part: dict[str, Any]) -> dict[str, Any]:
    """Compare the written run with that of the baseline number of devices, for each precision."""
    compared = {}
    for precision in ("float32", "bf16"):
        rows = list(rows_of(folder / f"{model}-evaluate-{devices}-{precision}.trec"))
        scores, first = dict(rows), dict(rows_of(folder / f"{model}-evaluate-{base}-{precision}.trec"))
        docs = Counter(query for query, _ in scores)
        spans = [rank[precision] for rank in part["ranks"]]
        gap = max(abs(score - first[pair]) for pair, score in scores.items()) if scores.keys() == first.keys() else None
        seconds = max(span["ended"] for span in spans) - min(span["started"] for span in spans)
        compared[precision] = {
            "queries": len(docs),
            "pairs": len(rows),
            "pairs_twice": len(rows) - len(scores),
            "docs_of_a_query": sorted(set(docs.values())),
            "same_ids": scores.keys() == first.keys(),
            "gap": gap,
            "gap_of_spread": None if gap is None else gap / max(float(np.std(list(scores.values()))), 1e-12),
            "pairs_of_ranks": [span["pairs"] for span in spans],
            "pairs_per_second": sum(span["pairs"] for span in spans) / max(seconds, 1e-9),
        }
    return compared


def rows_of(path: Path) -> Iterator[tuple[tuple[str, str], float]]:
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            query, _, doc, _, score, _ = line.split()
            yield (query, doc), float(score)


def vectors_compared(folder: Path, model: str, devices: int, base: int, part: dict[str, Any]) -> dict[str, Any]:
    """Compare the encoded docs with those of the baseline number of devices, for each precision.

    Check that each doc occurs once, in the order of the collection. Then delete all vectors except the baseline's.
    """
    from ranker.retrieval.vector_store import VectorStore

    compared = {}
    for precision in ("float32", "bf16"):
        here = folder / f"{model}-encode-{devices}-{precision}"
        encoded, first = VectorStore(here), VectorStore(folder / f"{model}-encode-{base}-{precision}")
        same = len(encoded.doc_ids) == len(first.doc_ids) and bool((encoded.doc_ids == first.doc_ids).all())
        gap = (
            max(float(np.abs(a - b).max()) for a, b in zip(encoded.chunks(), first.chunks(), strict=True))
            if same
            else None
        )
        spans = [rank[precision] for rank in part["ranks"]]
        seconds = max(span["ended"] for span in spans) - min(span["started"] for span in spans)
        compared[precision] = {
            "docs": encoded.num_docs,
            "docs_twice": encoded.num_docs - len(np.unique(encoded.doc_ids)),
            "same_ids": same,
            "gap": gap,
            "in_order": encoded.doc_ids.tolist() == [f"d{i}".encode() for i in range(encoded.num_docs)],
            "docs_per_second": encoded.num_docs / max(seconds, 1e-9),
        }
        del encoded, first
        if devices != base:
            shutil.rmtree(here)
    return compared


def environment(gpus: int) -> dict[str, Any]:
    """Return the hardware, versions and environment variables on which the results depend."""
    shared = Path("/dev/shm")
    return {
        "card": torch.cuda.get_device_name() if gpus else f"CPU ({platform.machine()})",
        "gpus": gpus,
        "cores": os.cpu_count(),
        **{name: version(name) for name in ("torch", "lightning", "transformers")},
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if gpus else None,
        "shared_memory_gb": round(shutil.disk_usage(shared).total / 1e9, 1) if shared.exists() else None,
        "variables": {
            key: value for key, value in sorted(os.environ.items()) if key.startswith(("NCCL_", "TORCH_NCCL", "OMP_"))
        },
    }


def write(path: Path, found: dict[str, Any]) -> None:
    """Write the results to a file atomically."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


if __name__ == "__main__":
    one_line(main)
