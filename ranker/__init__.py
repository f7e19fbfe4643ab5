"""Train, evaluate and probe neural rerankers: the same optimisation on any hardware, every number from a run file.

`from ranker import Reranker` ranks texts with a trained model. torch is imported when the name is first used.
"""

from typing import Any

__all__ = ["Ranked", "Reranker"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from ranker.assembly import reranker

        return getattr(reranker, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
