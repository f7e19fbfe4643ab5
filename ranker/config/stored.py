"""Read the configuration of a run folder or model folder, which is not trusted: plain values of known keys only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ranker.config.groups import GROUPS, unknown_keys
from ranker.config.roots import root_of
from ranker.config.targets import target_faults, untrusted
from ranker.config.text_keys import text_faults
from ranker.config.writing import WRITING, parts_of, writing_faults
from ranker.errors import ConfigError
from ranker.files.checksums import SUMS, verify_folder
from ranker.files.folders import leads_out

MAX_BYTES = 1_000_000  # files of this program have some thousand bytes
MAX_DEPTH = 40
# Keys of Hydra's `instantiate`. `_args_` is left out: its values would not be compared with a signature.
SPECIAL = ("_target_", "_partial_", "_convert_", "_recursive_")
NODES = (*GROUPS, *WRITING)
# Path and content of a file, and content of checksums.json beside it -> the configuration, which passed all checks.
_CHECKED: dict[tuple[Path, bytes | None, bytes | None], DictConfig] = {}
KEPT = 16  # configurations; a command reads few, but each of them several times
PARSER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # PyYAML may be built without its C parser
# Prefixes of targets in run folders of version 0.1 -> their prefixes today.
RENAMED = {
    "ranker.layers.encoder.": "ranker.encoders.loading.",
    "ranker.models.multitask.": "ranker.multitask.multitask.",
    "ranker.data.multitask.": "ranker.multitask.options.",
}


def load_stored(path: Path) -> Any:
    """Read a stored configuration.

    The result has `trust_remote_code` false, at the top and in the encoder, even if the file has true.

    Raises:
        ConfigError: The file is not plain YAML of at most 1 MB; or it has an unknown key, a value of the wrong type, a
            `_target_` that its group may not use, an interpolation (it would be resolved after the check), or a path
            that leaves the run folder; or its checksum differs (ranker/files/checksums.py).
    """
    key = (path, _content(path), _content(path.parent / SUMS))
    if key not in _CHECKED:
        if len(_CHECKED) >= KEPT:
            _CHECKED.clear()
        _CHECKED[key] = _checked(path)
    return _CHECKED[key].copy()


def _content(path: Path) -> bytes | None:
    """Return the start of a file, which is a whole file of at most `MAX_BYTES`; None if it can't be read."""
    try:
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except OSError:
        return None


def _checked(path: Path) -> DictConfig:
    """Read and check a stored configuration; see `load_stored`."""
    cfg = _read(path)
    _rename(cfg)
    faults = stored_faults(cfg)
    if faults:
        raise ConfigError("\n".join(f"{path}: {fault}" for fault in faults))
    for node in (cfg, cfg.get("encoder")):
        if node is not None and node.get("trust_remote_code"):
            node.trust_remote_code = False
    verify_folder(path.parent, path.name, ConfigError)
    return cfg


def _read(path: Path) -> Any:
    """Parse a file, after a check of its size, depth and anchors: a few lines with anchors could fill the memory."""
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise ConfigError(f"{path}: expected a configuration of at most {MAX_BYTES} bytes, got {size}")
        depth = 0
        for event in yaml.parse(path.read_text(encoding="utf-8"), Loader=PARSER):
            if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
                raise ConfigError(
                    f"{path}: expected a configuration without anchors and aliases, "
                    f"got one in line {event.start_mark.line + 1}"
                )
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                raise ConfigError(
                    f"{path}: expected at most {MAX_DEPTH} levels, got more in line {event.start_mark.line + 1}"
                )
        cfg = OmegaConf.load(path)
    except (OSError, ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path}: expected a configuration in YAML, got {' '.join(str(error).split())}") from error
    if not isinstance(cfg, DictConfig):
        raise ConfigError(f"{path}: expected keys and values, got a list or a single value")
    return cfg


def _rename(node: Any) -> None:
    """Replace the prefixes of targets whose modules have moved since the file was written."""
    for key in list(node) if isinstance(node, DictConfig) else range(len(node)) if isinstance(node, ListConfig) else ():
        value = node._get_node(key)
        if key == "_target_":
            target = str(value)
            for old, new in RENAMED.items():
                node[key] = target = target.replace(old, new, 1) if target.startswith(old) else target
        else:
            _rename(value)


def stored_faults(cfg: DictConfig) -> list[str]:
    """Return one fault for each key or value that a stored configuration may not have."""
    content: Any = OmegaConf.to_container(cfg)
    unresolved = _unresolved(content, "")
    if unresolved:
        return unresolved
    faults = [*unknown_keys(content, root_of(content)), *untrusted(content, ""), *_nodes(content)]
    if faults:  # the next checks need known keys and trusted targets
        return faults
    faults = _types(cfg)
    if faults:
        return faults
    faults = [*text_faults(cfg), *target_faults(cfg), *writing_faults(content)]
    name = str(content.get("name") or "")
    if leads_out(name):
        faults.append(f"name: expected a name of a folder, got {name!r}")
    if (content.get("trainer") or {}).get("model_registry"):
        faults.append("trainer.model_registry: expected null, since a stored configuration uploads nothing")
    return faults


def _unresolved(node: Any, path: str) -> list[str]:
    if isinstance(node, str) and "${" in node:
        return [f"{path}: expected a plain value, since a run stores resolved values, got {node!r}; write the value"]
    return [fault for part, name in parts_of(node, path) for fault in _unresolved(part, name)]


def _nodes(content: Mapping[str, Any]) -> list[str]:
    """Return one fault for each group that is no mapping, and each key that Hydra's `instantiate` would interpret."""
    faults = [
        f"{key}: expected keys and values, got {content[key]!r}"
        for key in NODES
        if not isinstance(content.get(key) or {}, dict)
    ]

    def walk(node: Any, path: str) -> None:
        for key in node if isinstance(node, dict) else ():
            if not isinstance(key, str) or (key.startswith("_") and key not in SPECIAL):
                faults.append(f"{path}.{key}: unknown key")
        for part, name in parts_of(node, path):
            walk(part, name)

    for key in NODES:
        walk(content.get(key), key)
    return faults


def _types(cfg: DictConfig) -> list[str]:
    """Return one fault for each value whose type differs from that in the typed root."""
    try:
        OmegaConf.merge(OmegaConf.structured(root_of(cfg)), cfg)
    except OmegaConfBaseException as error:
        return [f"{error.full_key or '?'}: {str(error).splitlines()[0]}"]
    return []


def resumed_runs(folder: Path) -> list[Path]:
    """Return the folders of the runs that a run continues, oldest first, then the run folder itself."""
    chain = [folder]
    while (chain[0] / "config.yaml").is_file():
        cfg = load_stored(chain[0] / "config.yaml")
        if not cfg.get("resume") or not cfg.get("checkpoint") or Path(cfg.checkpoint) in chain:
            break
        chain.insert(0, Path(cfg.checkpoint))
    return chain
