"""Access to ir_datasets: open sets by id, let one process at a time build caches, give up early on dead servers."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from filelock import FileLock

from ranker.errors import ConfigError, DataError
from ranker.network import unreachable


def load_dataset(dataset_id: str) -> Any:
    """Return the ir_datasets object of an id.

    Raises:
        DataError: The id is unknown; the message names similar ids.
    """
    import ir_datasets  # imported here, because it is slow and reads IR_DATASETS_HOME at import

    try:
        return ir_datasets.load(dataset_id)
    except KeyError as error:
        near = difflib.get_close_matches(dataset_id, list(ir_datasets.registry), n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else "see https://ir-datasets.com for all ids"
        raise DataError(f"ir_datasets: expected an id that ir_datasets knows, got {dataset_id!r}; {hint}") from error


@contextmanager
def alone() -> Iterator[None]:
    """Let only one process at a time download and build caches, because ir_datasets does not lock them."""
    import ir_datasets

    home = ir_datasets.util.home_path()
    with _reachable_servers():
        if not os.access(home, os.W_OK):
            yield  # in a read-only folder nothing can be built
            return
        with FileLock(home / "ranker.lock"):
            yield


@contextmanager
def _reachable_servers() -> Iterator[None]:
    """Fail at once if a server can't be reached; ir_datasets would retry for minutes."""
    from ir_datasets.util import RequestsDownload

    stream = RequestsDownload.stream

    def checked(self: Any) -> Any:
        reason = unreachable(self.url)
        if reason is not None:
            raise ConnectionError(f"{self.url} is out of reach: {reason}")
        return stream(self)

    RequestsDownload.stream = checked
    try:
        yield
    finally:
        RequestsDownload.stream = stream


@contextmanager
def readable(dataset_id: str) -> Iterator[None]:
    """Convert any error of ir_datasets (network, disk, checksum, format) to a DataError of one line."""
    try:
        yield
    except (DataError, ConfigError):
        raise
    except Exception as error:
        raise DataError(
            f"ir_datasets {dataset_id}: expected to read it, got {type(error).__name__}: "
            f"{' '.join(str(error).split())}; check the network; without one, copy a filled folder of ir_datasets from "
            "elsewhere and set IR_DATASETS_HOME to it, or use data=files"
        ) from error
