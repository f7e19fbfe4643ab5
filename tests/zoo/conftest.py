"""Checkpoints of the zoo, made at first use and shared by the tests of a process."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.zoo.checkpoints import make


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Callable[[str], Path]:
    """A family's folder by its name."""
    root, made = tmp_path_factory.mktemp("zoo"), {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = make(family, root / family)
        return made[family]

    return folder
