"""Train, evaluate and probe neural rerankers. Training is the same on any hardware; results come from run files.

`from ranker import Reranker` ranks texts with a trained model. torch is imported when `Reranker` is first used.
"""

from typing import Any

__all__ = ["Ranked", "Reranker"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from ranker.assembly import reranker

        return getattr(reranker, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
