"""Quality of a language model as a reranker: BM25, monoBERT, the model as it is, and after LoRA training.

    python benchmarks/lm_quality.py --device cuda    # SmolLM2-135M on cwe, BM25's top 20, three seeds
    python benchmarks/lm_quality.py --encoder tiny_lm --seeds 1 --rows untrained lora --with depth=2 --out small

Each step is a command as a user would type it, and is printed before it runs. Finished steps are reused, and a killed
step is repeated. Seeds differ in the order of the training data and in the adapters' first values. The table has means
over seeds, and paired tests over queries against BM25 and against the first row of monoBERT (with the seeds' means).

The rows:

- `monobert`: MiniLM fine-tuned for four epochs; `monobert_short`: for as many steps as the language model;
- `untrained`: the language model with its logits of "Yes" and "No"; `lora`: after `--steps` steps with LoRA.
"""

import argparse
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from one_line import one_line
from students import MEASURE, Step, against, values

ROWS = ["monobert", "monobert_short", "untrained", "lora"]


def model_options(options: argparse.Namespace) -> list[str]:
    """Return the options of the language model, as for train.py."""
    return ["model=lm_reranker", f"encoder={options.encoder}", "max_pair_tokens=256"]


def untrained(options: argparse.Namespace) -> Path:
    """Return the folder of the language model as it is."""
    return options.out / f"{options.encoder}_untrained"


def write_untrained(options: argparse.Namespace) -> None:
    """Write the folder of a language model that has not been trained as a reranker, unless it exists."""
    from hydra import compose, initialize_config_dir

    from ranker.assembly.scorer import build_scorer
    from ranker.checkpoint import save_model
    from ranker.cli import entry
    from ranker.config.roots import CONF

    folder = untrained(options)
    if folder.is_dir():
        return
    entry.register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("train", [*model_options(options), "name=untrained"])
    save_model(folder, build_scorer(cfg), cfg)


def steps(options: argparse.Namespace) -> dict[str, list[Step]]:
    """Return the steps of each row, one for each seed; the untrained model has one step."""
    out, common = options.out, (*options.data, "depth=20", *options.with_)
    model = model_options(options)
    budget = ["trainer.max_epochs=-1", f"trainer.max_steps={options.steps}"]
    rows = {
        "monobert": ["encoder=minilm"],
        "monobert_short": ["encoder=minilm", *budget],
        "lora": [*model, "lora=default", *budget],
    }
    device = f"trainer.accelerator={'gpu' if options.device == 'cuda' else 'cpu'}"
    found = {
        name: [
            Step(
                out / f"{name}_{seed}", "train", (*common, *more, f"seed={seed}", device, "logger=none", "report=none")
            )
            for seed in range(options.seeds)
        ]
        for name, more in rows.items()
    }
    evaluated = (f"checkpoint={untrained(options)}", *common, device, "report=none")
    found["untrained"] = [Step(out / "untrained", "evaluate", evaluated)]
    return {name: found[name] for name in options.rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="*", default=["data=cwe"], help="the collection, as for train.py")
    parser.add_argument("--out", type=Path, default=Path("lm_quality"))
    parser.add_argument("--encoder", default="smollm2_135m")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="commands at a time")
    parser.add_argument("--with", dest="with_", nargs="*", default=[], metavar="KEY=VALUE", help="for all commands")
    options = parser.parse_args()
    options.out = options.out.absolute()
    plan = steps(options)
    if "untrained" in options.rows:
        write_untrained(options)
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(Step.run, [step for row in plan.values() for step in row]))
    systems = {name: [values(step.folder)[0] for step in row] for name, row in plan.items()}
    _, bm25 = values(plan[options.rows[0]][0].folder)
    mono = np.mean(systems["monobert"], axis=0) if "monobert" in systems else None
    lines = [
        f"| {MEASURE} | each seed | mean | against BM25 | against monobert |",
        "| --- | --- | --- | --- | --- |",
        f"| BM25 | | {bm25.mean():.4f} | | |",
    ]
    for name, seeds in systems.items():
        mean = np.mean(seeds, axis=0)
        each = ", ".join(f"{part.mean():.4f}" for part in seeds)
        compared = "" if mono is None or name == "monobert" else against(mean, mono)
        lines.append(f"| {name} | {each} | {mean.mean():.4f} | {against(mean, bm25)} | {compared} |")
    (options.out / "table.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    one_line(main)
