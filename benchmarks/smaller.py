"""Smaller models made from one teacher: nDCG@10, parameters, megabytes and pairs/s of each way to make one.

    python benchmarks/smaller.py data=cwe --device cuda                 # MiniLM's 6 layers, three seeds
    python benchmarks/smaller.py data=cwe --seeds 1 --epochs 1 --ways plain3 student3 int8
    python benchmarks/smaller.py data=cwe --encoder tiny --epochs 1 --tune-epochs 1 --seeds 1 --ways plain1 student1
    python benchmarks/smaller.py data=cwe --curve --device cuda         # cuts to many sizes, each trained further
    python benchmarks/smaller.py data=cwe --speed --device cuda --out speeds    # sizes and speeds, nearly untrained

Each step is a command as a user would type it, and is printed before it runs. Finished steps are reused, and a killed
step is repeated. The table has means over seeds, and paired tests over queries against the teacher (with the seeds'
means). It also has the speed of the models of seed 0. For this, all models score the same pairs in turn on one CPU
thread, and the best round counts, in CPU seconds; with `--device cuda` also on the GPU, in seconds. `smaller.png` shows
nDCG@10 over the number of parameters, and over the time of a pair. `--speed` trains for one step, because the speed
does not depend on the weights, and writes `speed.md` and `speed.json`.

The ways:

- `plainN`, `studentN`: N layers, trained without and with the teacher's layers; `studentN_long`: with three times as
  many epochs;
- `layers`, `heads`, `units`: the teacher cut to half and trained further; `..._raw`: before this training;
- `exit`, `exit_last`: an early head at the middle layer, and the last layer of the same model;
- `int8`, `student_int8`: the teacher, and the student with half of its layers, in int8; `fp8`: the teacher in fp8 on a
  GPU.
"""

import argparse
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from one_line import one_line
from students import MEASURE, Step, against, values

ROOT = Path(__file__).resolve().parents[1]
WAYS = ["plain3", "student3", "student3_long", "plain2", "student2", "layers_raw", "layers", "heads_raw", "heads",
        "units_raw", "units", "exit_last", "exit", "int8", "student_int8"]  # fmt: skip
CURVE = [f"cut_layers_{count}" for count in (5, 4, 3, 2, 1)] + [
    f"cut_{part}_{share}" for part in ("heads", "units") for share in (0.75, 0.5, 0.25)
]


@dataclass(frozen=True)
class Way:
    """One row of the table.

    Args:
        steps: Commands of the way, in order.
        evaluated: Folder with the evaluation of the model.
        model: Folder of the model.
        inference: How the model computes, the options of `inference`.
    """

    steps: tuple[Step, ...]
    evaluated: Path
    model: Path
    inference: dict[str, Any] = field(default_factory=dict)


class Plan:
    """The commands of all ways.

    Args:
        options: The command line.
        seed: The seed.
    """

    def __init__(self, options: argparse.Namespace, seed: int) -> None:
        self.options, self.seed, self.out = options, seed, options.out
        self.common = (*options.data, f"trainer.accelerator={'gpu' if options.device == 'cuda' else 'cpu'}")
        self.encoder = (f"encoder={options.encoder}", *options.with_)
        self.half = options.layers // 2
        self.teacher = self.trained("teacher", ())

    def folder(self, name: str) -> Path:
        """Return the folder of a step."""
        return self.out / f"{name}_{self.seed}"

    def trained(self, name: str, more: tuple[str, ...], before: tuple[Step, ...] = (), times: int = 1) -> Way:
        """Train a new model, for `times` as many epochs as the options say. The run also evaluates it."""
        epochs = f"trainer.max_epochs={times * self.options.epochs}"
        budget = (epochs, f"seed={self.seed}", "logger=none", "report=none")
        budget += ("trainer.max_steps=1", "depth=1", "val_depth=1") if self.options.speed else ()
        step = Step(self.folder(name), "train", (*self.common, *self.encoder, *budget, *more))
        return Way((*before, step), step.folder, step.folder)

    def cut(self, name: str, arguments: tuple[str, ...]) -> tuple[Way, Way]:
        """Cut the teacher; return the cut model without further training, and the model trained further."""
        shared = (f"checkpoint={self.teacher.model}", *self.options.data)
        step = Step(self.folder(f"{name}_model"), "compress", (*shared, *arguments))
        before = (*self.teacher.steps, step)
        raw = self.evaluated(f"{name}_raw", Way(before, step.folder, step.folder / "model"), {})
        budget = (
            f"trainer.max_epochs={self.options.tune_epochs}", f"optim.lr={self.options.tune_lr}", f"seed={self.seed}",
            "logger=none", "report=none",
        )  # fmt: skip
        more = (*self.common, f"checkpoint={step.folder / 'model'}", *budget, *self.options.with_)
        further = Step(self.folder(name), "train", more)
        return raw, Way((*before, further), further.folder, further.folder)

    def evaluated(self, name: str, way: Way, inference: dict[str, Any]) -> Way:
        """Evaluate a model with options of `inference`; int8 runs on the CPU."""
        arguments = [f"checkpoint={way.model}", *self.common, "report=none"]
        arguments += [f"inference.{key}={value}" for key, value in inference.items()]
        if inference.get("quantize") == "int8":
            arguments += ["trainer.accelerator=cpu", "trainer.precision=32-true"]
        step = Step(self.folder(name), "evaluate", tuple(arguments))
        return Way((*way.steps, step), step.folder, way.model, inference)

    def way(self, name: str) -> Way:
        """Return the way with a name."""
        taught = ("distill=layers", f"distill.teacher={self.teacher.model}")
        if name.startswith("plain"):
            return self.trained(name, (f"encoder.layers={name[5:]}",))
        if name.startswith("student") and name != "student_int8":
            layers, _, long = name.removeprefix("student").partition("_")
            return self.trained(name, (f"encoder.layers={layers}", *taught), self.teacher.steps, 3 if long else 1)
        if name.startswith("cut_"):
            _, part, size = name.split("_")
            more = ("drop=alternate",) if part == "layers" else ()
            return self.cut(name, (f"{part}={size}", *more))[1]
        if name.removesuffix("_raw") in ("layers", "heads", "units"):
            part = name.removesuffix("_raw")
            size = {"layers": (f"layers={self.half}", "drop=alternate")}.get(part, (f"{part}=0.5",))
            return self.cut(part, size)[0 if name.endswith("_raw") else 1]
        if name in ("exit", "exit_last"):
            early = self.trained("exit_last", ("model=early_exit", f"model.exits=[{self.half}]", "model.trunk=true"))
            return early if name == "exit_last" else self.evaluated("exit", early, {"exit": self.half})
        if name == "student_int8":
            return self.evaluated(name, self.way(f"student{self.half}"), {"quantize": "int8"})
        return self.evaluated(name, self.teacher, {"quantize": name})

    def untrained(self, name: str) -> Way:
        """Return the way with a name, without the training of a cut model and without evaluations."""
        way = self.way(f"{name}_raw" if name in ("layers", "heads", "units") else name)
        return replace(way, steps=tuple(step for step in way.steps if step.command != "evaluate"))


def pairs_of(options: argparse.Namespace, count: int) -> list[tuple[str, str]]:
    """Return `count` pairs of texts, the first candidates of the test queries; equal pairs would be scored once."""
    from hydra import compose, initialize_config_dir

    from ranker.assembly.data import load_splits
    from ranker.cli import entry

    entry.register()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = compose("train", [*options.data, "name=pairs", f"cache_dir={options.out / 'cache'}"])
    (collection,) = load_splits(cfg).tests.values()
    ids = collection.candidates.query_ids
    depth = -(-count // len(ids))
    pairs = [
        (collection.queries[q], collection.docs[d].full_text) for q in ids for d in collection.candidates[q][:depth]
    ]
    return pairs[:count]


def timed(ways: dict[str, Way], options: argparse.Namespace, accelerator: str) -> dict[str, dict[str, float]]:
    """Return parameters, megabytes and pairs/s of each way's model; the models run in turn."""
    import torch

    from ranker import Reranker

    torch.set_num_threads(1)
    clock: Callable[[], float] = time.process_time if accelerator == "cpu" else time.perf_counter
    pairs = pairs_of(options, options.pairs * (1 if accelerator == "cpu" else options.gpu_factor))
    precision = {"cpu": "32-true"}.get(accelerator)
    rerankers, facts = {}, {}
    for name, way in ways.items():
        plain = Reranker.load(way.model, accelerator="cpu", precision="32-true")
        parameters = sum(weight.numel() for weight in plain.scorer.parameters())
        rerankers[name] = Reranker.load(
            way.model, accelerator=accelerator, precision=precision, inference=way.inference
        )
        state = rerankers[name].scorer.state_dict().values()
        megabytes = sum(value.numel() * value.element_size() for value in state) / 1e6
        facts[name] = {"parameters": parameters / 1e6, "megabytes": megabytes, "seconds": float("inf")}
    for _ in range(options.rounds):
        for name, reranker in rerankers.items():
            started = clock()
            reranker.score(pairs, progress=False)
            facts[name]["seconds"] = min(facts[name]["seconds"], clock() - started)
    return {name: {**part, "speed": len(pairs) / part["seconds"]} for name, part in facts.items()}


def table(
    plans: list[Plan], names: list[str], speeds: dict[str, dict[str, dict[str, float]]]
) -> tuple[list[str], dict]:
    """Return the lines of the table in Markdown, and the numbers of each way."""
    devices = list(speeds)
    heads = [f"pairs/s, {'one CPU thread' if device == 'cpu' else 'GPU'}" for device in devices]
    lines = [
        f"| way | {MEASURE}, each seed | mean | against the teacher | million parameters | MB | "
        + " | ".join(heads)
        + " |",
        "| --- " * (6 + len(devices)) + "|",
    ]
    teacher, content = None, {}
    for name in names:
        seeds = [values((plan.teacher if name == "teacher" else plan.way(name)).evaluated)[0] for plan in plans]
        mean = np.mean(seeds, axis=0)
        teacher = mean if teacher is None else teacher
        facts = next((speeds[device][name] for device in devices if name in speeds[device]), {})
        each = ", ".join(f"{part.mean():.4f}" for part in seeds)
        compared = "" if name == "teacher" else against(mean, teacher)
        rates = [f"{speeds[device][name]['speed']:.0f}" if name in speeds[device] else "" for device in devices]
        sizes = f"{facts['parameters']:.2f} | {facts['megabytes']:.1f}" if facts else " | "
        lines.append(f"| {name} | {each} | {mean.mean():.4f} | {compared} | {sizes} | " + " | ".join(rates) + " |")
        content[name] = {"measure": float(mean.mean()), **facts, "speeds": {d: speeds[d].get(name) for d in devices}}
    return lines, content


def speed_table(speeds: dict[str, dict[str, dict[str, float]]]) -> list[str]:
    """Return the lines of the table of `--speed` in Markdown."""
    lines = [f"| way | million parameters | MB | {' | '.join(f'pairs/s, {device}' for device in speeds)} |"]
    lines.append("| --- " * (3 + len(speeds)) + "|")
    for name in dict.fromkeys(name for part in speeds.values() for name in part):
        facts = next(part[name] for part in speeds.values() if name in part)
        rates = [f"{part[name]['speed']:.0f}" if name in part else "" for part in speeds.values()]
        lines.append(f"| {name} | {facts['parameters']:.2f} | {facts['megabytes']:.1f} | {' | '.join(rates)} |")
    return lines


def run(ways: list[Way], jobs: int) -> None:
    """Run the steps of all ways, each step once."""
    done: set[Step] = set()
    with ThreadPoolExecutor(jobs) as pool:
        for place in range(max(len(way.steps) for way in ways)):
            stage = {way.steps[place] for way in ways if len(way.steps) > place} - done
            list(pool.map(Step.run, sorted(stage, key=lambda step: str(step.folder))))
            done |= stage


def draw(content: dict, path: Path) -> None:
    """Draw the measure over the number of parameters, and over the time of a pair on one CPU thread."""
    from ranker.evaluation.figures import BLUE, new_figure

    figure, axes = new_figure(9, 3.6, 1, 2)
    for number, part in enumerate(content.values(), 1):
        speed = part["speeds"]["cpu"]
        positions = (part.get("parameters"), 1000 / speed["speed"] if speed else None)
        for axis, x in zip(axes, positions, strict=True):
            if x is not None:
                axis.plot(x, part["measure"], "o", color=BLUE, markersize=3)
                axis.annotate(str(number), (x, part["measure"]), fontsize=7, xytext=(2, 2), textcoords="offset points")
    for axis, label in zip(axes, ("million parameters", "ms per pair, one CPU thread"), strict=True):
        axis.set_xlabel(label)
        axis.set_ylabel(MEASURE)
    names = "\n".join(f"{number} {name}" for number, name in enumerate(content, 1))
    figure.text(0.92, 0.88, names, fontsize=7, va="top")
    figure.savefig(path, dpi=160, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="+", help="the collection, as for train.py")
    parser.add_argument("--out", type=Path, default=Path("smaller"))
    parser.add_argument("--encoder", default="minilm")
    parser.add_argument("--layers", type=int, default=6, help="layers of the encoder")
    parser.add_argument("--ways", nargs="+", default=WAYS)
    parser.add_argument("--curve", action="store_true", help="cuts to many sizes in place of --ways")
    parser.add_argument("--speed", action="store_true", help="only sizes and speeds")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--tune-epochs", type=int, default=2, help="of a cut model")
    parser.add_argument("--tune-lr", type=float, default=5e-5)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--pairs", type=int, default=256, help="pairs of the timing on the CPU")
    parser.add_argument("--gpu-factor", type=int, default=32, help="how many times as many on the GPU")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="commands at a time")
    parser.add_argument("--with", dest="with_", nargs="*", default=[], metavar="KEY=VALUE", help="for all trainings")
    options = parser.parse_args()
    if options.speed and options.curve:
        parser.error("--speed: expected it without --curve, got both")
    options.out = options.out.absolute()
    names = CURVE if options.curve else options.ways
    if options.device == "cuda" and not options.curve:
        names = [*names, "fp8"]
    plans = [Plan(options, seed) for seed in range(1 if options.speed else options.seeds)]
    ways = [
        {"teacher": plan.teacher} | {name: plan.untrained(name) if options.speed else plan.way(name) for name in names}
        for plan in plans
    ]
    run([way for of_seed in ways for way in of_seed.values()], options.jobs)
    on_gpu = {name: way for name, way in ways[0].items() if way.inference.get("quantize") != "int8"}
    on_cpu = {name: way for name, way in ways[0].items() if way.inference.get("quantize") != "fp8"}
    speeds = {"cpu": timed(on_cpu, options, "cpu")}
    if options.device == "cuda":
        speeds["cuda"] = timed(on_gpu, options, "cuda")
    if options.speed:
        lines = speed_table(speeds)
        (options.out / "speed.md").write_text("\n".join(lines) + "\n")
        (options.out / "speed.json").write_text(json.dumps(speeds, indent=2) + "\n")
        print("\n".join(lines))
        return
    lines, content = table(plans, ["teacher", *names], speeds)
    stem = options.out / ("curve" if options.curve else "smaller")
    stem.with_suffix(".md").write_text("\n".join(lines) + "\n")
    stem.with_suffix(".json").write_text(json.dumps(content, indent=2) + "\n")
    draw(content, stem.with_suffix(".png"))
    print("\n".join(lines))


if __name__ == "__main__":
    one_line(main)
