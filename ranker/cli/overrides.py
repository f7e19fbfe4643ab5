"""Text keys take what was typed: Hydra would read `name=1e3` as 1000.0, and `name=1_0` as 10."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf

from ranker.config.roots import CONF, ROOTS
from ranker.config.signatures import parameters_of
from ranker.config.values import text_keys

OWN_TEXTS = ("data.negatives", "data.teacher")  # keys of every source that no class takes
_PLAIN = re.compile(r"[\w.+:/ -]+")  # no quotes, brackets or functions of Hydra's


def quote_texts(command: str, arguments: list[str]) -> list[str]:
    """The command line with quotes around values of text keys that Hydra would read as numbers or as true and false.

    >>> quote_texts("train", ["name=1e3", "name=a,10", "optim.lr=1e3", "-m"])
    ["name='1e3'", "name=a,'10'", 'optim.lr=1e3', '-m']
    """
    return [_quoted(command, argument) for argument in arguments]


def _quoted(command: str, argument: str) -> str:
    key, equals, value = argument.partition("=")
    name = key.lstrip("+")
    if not equals or key.startswith(("-", "~")) or not takes_text(command, name):
        return argument
    is_list = value.startswith("[") and value.endswith("]")
    parts = (value[1:-1] if is_list else value).split(",")
    if not all(_PLAIN.fullmatch(part) for part in parts):
        return argument
    text = ",".join(f"'{part.strip()}'" if _is_no_text(part) else part for part in parts)
    return f"{key}=[{text}]" if is_list else f"{key}={text}"


def _is_no_text(part: str) -> bool:
    try:
        return isinstance(OverridesParser.create().parse_override(f"key={part}").value(), (bool, int, float))
    except HydraException:  # Hydra says so itself
        return False


@cache
def takes_text(command: str, key: str) -> bool:
    """Whether a dotted key is text, and only text, in every choice of its group that has it."""
    group = key.partition(".")[0]
    if key in OWN_TEXTS or key in text_keys(ROOTS[command]):
        return True
    found = [
        types
        for path in sorted((CONF / group).glob("*.yaml"))
        if (types := _types(path.read_text(encoding="utf-8"), group, key))
    ]
    return bool(found) and all("str" in types and not {"int", "float", "bool"} & set(types) for types in found)


def _types(text: str, group: str, key: str) -> tuple[str, ...]:
    """The types that the class of a yaml's node takes under a dotted key; empty where it has no such key."""
    package = re.search(r"^# @package ([\w.]+)$", text, re.M)
    prefix = package.group(1) if package else group
    if not key.startswith(f"{prefix}."):
        return ()
    parent, _, name = key.removeprefix(f"{prefix}.").rpartition(".")
    content: Any = OmegaConf.create(text)
    node: Any = (OmegaConf.select(content, parent) if parent else content) or {}
    target = node.get("_target_") if hasattr(node, "get") else None
    try:
        parameter = (parameters_of(str(target)) or {}).get(name) if target else None
    except LookupError:
        return ()
    return parameter.types if parameter is not None else ()
