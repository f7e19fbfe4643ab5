"""Hydra's composition at half its cost, with the same results: tests compose many hundreds of configurations."""

import copy
from functools import cache
from pathlib import Path

import omegaconf._utils
import omegaconf.base
from hydra._internal import defaults_list
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins


def remember() -> None:
    """Keep what two compositions have in common; a process forked later has it, too. A second call changes nothing."""
    if omegaconf.base.parse is omegaconf._utils.parse and hasattr(omegaconf.base.parse, "cache_info"):
        return
    Plugins.instance()  # imports the source of files anew
    files = SourcesRegistry.instance().resolve("file")
    read_file, parse = files.load_config, cache(omegaconf.base.parse)
    name_choices, read = defaults_list._create_interpolation_map, {}

    def load_config(self, config_path):
        path = Path(self.path, self._normalize_file_name(config_path)).resolve()
        if not path.exists():
            return read_file(self, config_path)
        state = path.stat()
        key = self.provider, self.path, path, state.st_ino, state.st_size, state.st_mtime_ns
        if key not in read:
            read[key] = read_file(self, config_path)
        return copy.deepcopy(read[key])

    def create_interpolation_map(overrides, defaults, self_added):
        if any(default.is_interpolation() for default in defaults):
            return name_choices(overrides, defaults, self_added)
        return None

    files.load_config = load_config
    # trees of `${...}`, which nobody changes
    omegaconf.base.parse = omegaconf._utils.parse = parse
    # read only for interpolations in a list of defaults
    defaults_list._create_interpolation_map = create_interpolation_map
    # each composition copies its sources, and with them the store, which itself copies what it returns
    ConfigStore.__deepcopy__ = lambda self, memo: self
