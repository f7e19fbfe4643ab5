"""The configuration files of a sentence-transformers folder, read and written without that library.

`_module_weights` reads and writes the weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ranker.encoders.model_folder import read_json, read_object
from ranker.errors import CheckpointError
from ranker.files.folders import leads_out

MODULES, SETTINGS = "modules.json", "config_sentence_transformers.json"


def has_modules(folder: Path) -> bool:
    """Whether a folder has sentence-transformers' layout."""
    return (folder / MODULES).is_file()


def is_multi_vector(folder: Path) -> bool:
    """Whether a folder's configuration says that texts have several vectors."""
    return read_object(folder / SETTINGS).get("model_type") == "MultiVectorEncoder" or is_stanford(folder)


def is_cross_encoder(folder: Path) -> bool:
    """Whether a folder's configuration says that a query and a doc are scored together."""
    return has_modules(folder) and read_object(folder / SETTINGS).get("model_type") == "CrossEncoder"


def is_sparse(folder: Path) -> bool:
    """Whether a folder's configuration says that texts have a weight for each word."""
    return has_modules(folder) and read_object(folder / SETTINGS).get("model_type") == "SparseEncoder"


def is_masked_lm(folder: Path) -> bool:
    """Whether a folder is a masked language model of transformers, and nothing else."""
    architectures = read_object(folder / "config.json").get("architectures") or []
    return not has_modules(folder) and any(str(name).endswith("ForMaskedLM") for name in architectures)


def is_stanford(folder: Path) -> bool:
    """Whether config.json names the architecture of Stanford ColBERT."""
    return "HF_ColBERT" in (read_object(folder / "config.json").get("architectures") or [])


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file and, if needed, its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class StoredModule:
    """One entry of modules.json.

    Args:
        name: The class without its package, such as `Pooling`.
        folder: The folder of its configuration and weights.
    """

    name: str
    folder: Path

    @property
    def config(self) -> dict[str, Any]:
        """The content of its config.json."""
        return read_object(self.folder / "config.json")


def read_modules(folder: Path) -> dict[str, list[StoredModule]]:
    """Read modules.json: `{"query": [...], "document": [...]}`, two equal lists if queries and docs share all modules.

    Raises:
        CheckpointError: modules.json is missing or starts with something that is neither a Transformer nor a Router.
    """
    if not has_modules(folder):
        raise CheckpointError(
            f"{folder}: expected modules.json of sentence-transformers' layout, got a folder without it"
        )
    try:
        return _sides(folder, read_json(folder / MODULES))
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{folder}: expected modules.json to list modules with path and type, got {error!r}"
        ) from error


def _sides(folder: Path, entries: Any) -> dict[str, list[StoredModule]]:
    chain = [StoredModule(entry["type"].rpartition(".")[2], _inside(folder, entry["path"])) for entry in entries]
    first, rest = chain[0], chain[1:]
    if first.name in ("Transformer", "MLMTransformer"):
        return {"query": chain, "document": chain}
    if first.name not in ("Router", "Asym"):
        raise CheckpointError(f"{folder}: expected a Transformer or a Router as first module, got {first.name}")
    router = read_object(first.folder / "router_config.json")
    if sorted(router.get("structure", {})) != ["document", "query"]:
        raise CheckpointError(
            f"{folder}: expected a router with the routes query and document, got {sorted(router.get('structure', {}))}"
        )
    return {
        route: [StoredModule(router["types"][name].rpartition(".")[2], _inside(first.folder, name)) for name in names]
        + rest
        for route, names in router["structure"].items()
    }


def _inside(folder: Path, name: str) -> Path:
    """Return the folder of a module from its path in modules.json, which must not lead out of the model's folder."""
    if leads_out(name):
        raise CheckpointError(f"{folder}: expected the paths of its modules to stay inside it, got {name!r}")
    return folder / name


def write_modules(
    folder: Path, modules: list[tuple[str, str]], prompts: dict[str, str], model_type: str, similarity: str
) -> None:
    """Write modules.json and config_sentence_transformers.json.

    Args:
        folder: The model's folder.
        modules: Path and dotted class of each module.
        prompts: Prompt by task: `query` and `document`.
        model_type: `SentenceTransformer`, `MultiVectorEncoder`, `SparseEncoder` or `CrossEncoder`.
        similarity: `cosine`, `dot` or `maxsim`.
    """
    write_json(
        folder / MODULES,
        [{"idx": i, "name": str(i), "path": path, "type": name} for i, (path, name) in enumerate(modules)],
    )
    write_json(
        folder / SETTINGS,
        {"model_type": model_type, "prompts": prompts, "default_prompt_name": None, "similarity_fn_name": similarity},
    )


def write_router(folder: Path, routes: Mapping[str, list[tuple[str, str]]]) -> None:
    """Write router_config.json, for models whose queries and docs have different modules.

    Args:
        folder: The model's folder.
        routes: Path and dotted class of each module, by `query` and `document`.
    """
    router = {
        "types": {path: name for side in routes.values() for path, name in side},
        "structure": {route: [path for path, _ in side] for route, side in routes.items()},
        "parameters": {"default_route": "document", "allow_empty_key": True},
    }
    write_json(folder / "router_config.json", router)
