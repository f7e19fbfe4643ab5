"""Run kernels in Triton's interpreter: in a forked child, because Triton chooses it when a kernel is defined."""

import re
from collections.abc import Callable

import pytest

from tests.assets.forked import forked

DEFINES_KERNELS = re.compile(r"triton(?!\._C)|ranker\..*kernels|(.*\.)?test_\w+$")


def interpreted(work: Callable[[], object]) -> str:
    """Run a function in a child where `TRITON_INTERPRET` is 1 and kernels are defined anew; see `forked`."""
    return forked(work, DEFINES_KERNELS, TRITON_INTERPRET="1")


def run_interpreted(file: str, *arguments: str) -> str:
    """Run a file's tests in the child; return pytest's output."""
    options = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "addopts=")
    return interpreted(lambda: pytest.main([*options, file, *arguments]))
