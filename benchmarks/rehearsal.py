"""Rehearse training and evaluation at MS MARCO's size, with its file formats, generated texts and a tiny model.

    python benchmarks/rehearsal.py --share 0.01                 # 88,418 passages, 400,000 triples, 70 dev queries
    python benchmarks/rehearsal.py --share 0.25 --threads 8     # a quarter
    python benchmarks/rehearsal.py --device cuda                # full size; the model runs on a GPU

At share 1 there are 8,841,823 passages, 500,000 training queries, 40 million training triples, and 6,980 dev queries
with 1,000 candidates each. Each part is a separate process:

- generate: writes the files where ir_datasets looks for them (rehearsal_files.py). This part uses nothing of ranker.
- read: reads the collection with `data=msmarco_passage`, tokenizes docs and queries into the token stores, and looks up
  the triples in them, as the first `train.py` does before its first step.
- train: runs some steps of `train.py data=msmarco_passage` with the cached stores.
- evaluate: `evaluate.py` re-ranks a TREC run of all dev queries with the trained model, and compares both.

A table shows for each part the seconds, the processor time, the largest memory, and the bytes that it left on the disk.
Memory is the proportional set size of the process and all its children: pages that several processes share count once,
and mapped files count if they are in memory. The value in brackets is without mapped files. The exit status is 1 if a
part needs more than 4 GiB.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from one_line import one_line

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("generate", "read", "train", "evaluate")
LIMIT_GIB = 4.0
# stages of the part `read`: module and name of the function that the module calls for the stage
STAGES = {
    "texts and candidates": ("ranker.commands.train", "load_splits"),
    "token stores": ("ranker.data.text_stores", "token_store"),
    "triples": ("ranker.data.training_groups", "triple_rows"),
}
STEPS = 50


@dataclass
class Measured:
    """What a part needed."""

    seconds: float
    cpu_seconds: float
    memory: float  # GiB
    anonymous: float  # GiB without pages of files
    disk: int
    facts: str


class Memory:
    """Measure the largest memory of a process and its children, by samples in a thread."""

    def __init__(self, process: int) -> None:
        self.process, self.peak, self.anonymous = process, 0, 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(0.25):
            sizes = [_memory_of(process) for process in _tree(self.process)]
            self.peak = max(self.peak, sum(size for size, _ in sizes))
            self.anonymous = max(self.anonymous, sum(size for _, size in sizes))


def _tree(process: int) -> list[int]:
    """Return the ids of a process and of all its descendants."""
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])  # the name in brackets may contain blanks
        except OSError:  # the process has ended
            continue
        parents.setdefault(parent, []).append(int(path.parent.name))
    found = [process]
    for member in found:
        found += parents.get(member, [])
    return found


def _memory_of(process: int) -> tuple[int, int]:
    """Return KiB of the proportional set size (else of the resident set), and KiB of it that are not pages of files."""
    for name, whole, anonymous in (("smaps_rollup", "Pss:", "Pss_Anon:"), ("status", "VmRSS:", "RssAnon:")):
        try:
            lines = Path(f"/proc/{process}/{name}").read_text().splitlines()
        except OSError:
            continue
        fields = {words[0]: int(words[1]) for words in map(str.split, lines) if words[-1:] == ["kB"]}
        if whole in fields:
            return fields[whole], fields.get(anonymous, 0)
    return 0, 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=1.0, help="share of MS MARCO's numbers")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="CPU cores to use")
    parser.add_argument("--folder", type=Path, default=Path(".cache/rehearsal"), help="for all files; at 1 some 20 GB")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="parts to run, in this order")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--inside", choices=("generate", "read"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.folder = options.folder.resolve() / f"share-{options.share:g}"
    if options.inside:
        {"generate": _generate, "read": _read}[options.inside](options)
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-options.threads :])
    measured = {part: run(part, options) for part in options.parts}
    print_table(measured, options)
    if any(part.memory > LIMIT_GIB for name, part in measured.items() if name != "generate"):
        raise SystemExit(f"resident memory: expected at most {LIMIT_GIB:g} GiB for each part")


def run(part: str, options: argparse.Namespace) -> Measured:
    """Run a part in a process, and measure the process."""
    imported = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    environment = {
        **os.environ, "PYTHONPATH": imported, "IR_DATASETS_HOME": str(options.folder / "home"),
        "IR_DATASETS_SKIP_DISK_FREE": "true", "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(options.threads), "MKL_NUM_THREADS": str(options.threads),
        **({"CUDA_VISIBLE_DEVICES": ""} if options.device == "cpu" else {}),
    }  # fmt: skip
    if part == "generate":
        shutil.rmtree(options.folder / "home", ignore_errors=True)
    shutil.rmtree(options.folder / part, ignore_errors=True)
    if part == "read":
        shutil.rmtree(options.folder / "cache", ignore_errors=True)
    command = [sys.executable, *_command(part, options)]
    print(f"{part}: {' '.join(command)}", flush=True)
    before, started = _disk(options.folder), time.perf_counter()
    cpu = resource.getrusage(resource.RUSAGE_CHILDREN)
    log = options.folder / f"{part}.log"
    with log.open("w") as output:
        process = subprocess.Popen(command, env=environment, cwd=options.folder, stdout=output, stderr=output)
        with Memory(process.pid) as memory:
            status = process.wait()
    if status:
        raise SystemExit(
            f"{part}: exit status {status}; the end of {log}:\n" + "\n".join(log.read_text().splitlines()[-25:])
        )
    seconds, used = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    result = Measured(
        seconds, used.ru_utime + used.ru_stime - cpu.ru_utime - cpu.ru_stime, memory.peak / 2**20,
        memory.anonymous / 2**20, _disk(options.folder) - before, _facts(part, options),
    )  # fmt: skip
    print(f"  {seconds:.0f} s, {result.memory:.2f} GiB; {result.facts}", flush=True)
    return result


def _command(part: str, options: argparse.Namespace) -> list[str]:
    """Return the command of a part, without the interpreter."""
    if part in ("generate", "read"):
        return [
            str(Path(__file__).resolve()), "--inside", part, "--share", str(options.share),
            "--threads", str(options.threads), "--folder", str(options.folder.parent), "--device", options.device,
        ]  # fmt: skip
    if part == "train":
        return [str(ROOT / "train.py"), *_training(options), "hydra.run.dir=train"]
    run_file = options.folder / "home/msmarco-passage/dev/first_stage.run"
    return [
        str(ROOT / "evaluate.py"), "checkpoint=train", "data=msmarco_passage", "data.train=null", "data.test=[]",
        f"candidates={run_file}", "split=val", "depth=1000", "measures=[RR@10,nDCG@10]", "cache_dir=cache",
        "batch.max_tokens=32768",
        "hydra.run.dir=evaluate", *_device(options),
    ]  # fmt: skip


def _training(options: argparse.Namespace) -> list[str]:
    """Return the overrides of the training. Part `read` composes the same configuration."""
    return [
        "data=msmarco_passage", "data.test=[]", "data.candidates=scoreddocs", "data.val_queries=20", "model=monobert",
        f"encoder.name={options.folder / 'encoder'}", "encoder.package=null", "optim.lr=1e-3",
        "batch.queries=32", "batch.max_tokens=16384", "max_doc_tokens=256", "max_pair_tokens=256", "depth=1000",
        f"trainer.max_steps={STEPS}", "trainer.max_epochs=-1", "trainer.log_every_n_steps=1", "cache_dir=cache",
        *_device(options),
    ]  # fmt: skip


def _device(options: argparse.Namespace) -> list[str]:
    gpu = options.device == "cuda"
    return [f"trainer.accelerator={'gpu' if gpu else 'cpu'}", "trainer.devices=1", "trainer.enable_progress_bar=false"]


def _facts(part: str, options: argparse.Namespace) -> str:
    """Return what a part reports about itself."""
    if part in ("generate", "read"):
        return (options.folder / f"{part}.txt").read_text()
    if part == "train":
        result = json.loads((options.folder / "train/result.json").read_text())
        return f"{result['steps']} steps; " + ", ".join(
            f"{key} {result[key]:,.0f}" for key in ("pairs_per_second", "tokens_per_second") if key in result
        )
    metrics = json.loads((options.folder / "evaluate/evaluation/val/metrics.json").read_text())
    return f"{metrics['num_queries']} queries, {metrics['measures']}"


def _disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def print_table(measured: dict[str, Measured], options: argparse.Namespace) -> None:
    """Print the table in Markdown."""
    print(
        f"\nshare {options.share:g}, {options.threads} cores, {options.device}, load average at the end "
        f"{os.getloadavg()[0]:.1f}\n\n"
        "| part | seconds | processor time, s | resident GiB (without files) | disk, GB | |\n"
        "| --- | --- | --- | --- | --- | --- |"
    )
    for name, part in measured.items():
        print(
            f"| {name} | {part.seconds:.0f} | {part.cpu_seconds:.0f} | {part.memory:.2f} ({part.anonymous:.2f}) | "
            f"{part.disk / 1e9:.2f} | {part.facts} |"
        )


# these functions run in the processes of the parts
# ----------------------------------------------------------------------------------------------------------------------


def _generate(options: argparse.Namespace) -> None:
    from rehearsal_files import generate
    from token_store import bundled_tokenizer
    from transformers import AutoTokenizer, BertConfig, BertModel

    started = time.perf_counter()
    generate(options.folder / "home", options.share, options.threads)
    size = _disk(options.folder / "home")
    (options.folder / "generate.txt").write_text(f"{size / (time.perf_counter() - started) / 1e6:.0f} MB/s")
    tokenizer = AutoTokenizer.from_pretrained(bundled_tokenizer())
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=128
    )
    BertModel(config).save_pretrained(options.folder / "encoder")
    tokenizer.save_pretrained(options.folder / "encoder")


def _read(options: argparse.Namespace) -> None:
    """Run train.py up to its first step, and write the seconds of each stage."""
    from ranker.cli.main import run as run_command
    from ranker.commands import train

    seconds: dict[str, float] = {}

    def timed(module: Any, name: str, stage: str) -> None:
        function = getattr(module, name)

        def call(*arguments: Any, **named: Any) -> Any:
            started = time.perf_counter()
            result = function(*arguments, **named)
            seconds[stage] = seconds.get(stage, 0.0) + time.perf_counter() - started
            return result

        setattr(module, name, call)

    def stop(*_: object) -> None:
        """End the process at the point where train.py has its training steps."""
        facts = ", ".join(f"{stage} {taken:.0f} s" for stage, taken in seconds.items())
        (options.folder / "read.txt").write_text(facts)
        os._exit(0)

    for stage, (module, name) in STAGES.items():
        timed(importlib.import_module(module), name, stage)
    train.check_length = stop
    sys.argv = ["train.py", *_training(options), "hydra.run.dir=read"]
    run_command("train")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "benchmarks"))
    one_line(main)
