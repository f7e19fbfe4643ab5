"""Compile functions with numba, and keep the machine code on disk under a hash of all sources of this package.

The machine code of a function contains that of the functions and intrinsics that it calls. Numba's own cache compares
only the file that defines the function, so after a change of another file it would load old machine code.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from numba import config, njit

_options: Any = config  # settings of NUMBA_CACHE_DIR
Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Return a function that numba compiles at its first use; it runs without Python's global lock.

    The machine code is kept on disk if a folder can be written to.
    """
    folder, before = _folder(), _options.CACHE_DIR
    _options.CACHE_DIR = folder  # numba reads the setting when it wraps the function
    try:
        result: Any = njit(nogil=True, cache=bool(folder))(function)
    finally:
        _options.CACHE_DIR = before
    return result  # type: ignore[no-any-return]


@cache
def _folder() -> str:
    """Return the folder of the machine code; empty: no folder can be written to.

    It is in the folder of NUMBA_CACHE_DIR or, without this setting, beside the sources or in the user's cache.
    """
    own, digest = Path(__file__).parent, hashlib.blake2b(digest_size=8)
    for path in sorted(own.glob("*.py")):
        digest.update(path.read_bytes())
    user = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "ranker"
    for place in [Path(_options.CACHE_DIR)] if _options.CACHE_DIR else [own / "__pycache__", user]:
        try:
            folder = place.expanduser() / f"late-{digest.hexdigest()}"
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except (OSError, RuntimeError):  # a read-only folder, or no home
            continue
        return str(folder)
    return ""
