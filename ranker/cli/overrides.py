"""Quote the values of text keys: without quotes, Hydra reads `name=1e3` as 1000.0 and refuses `name=Zürich`."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from ranker.config.roots import CONF, ROOTS
from ranker.config.sets import as_alone
from ranker.config.signatures import parameters_of
from ranker.config.targets import SHARED_KEYS
from ranker.config.text_keys import text_keys

_PLAIN = re.compile(r"[\w.+:/ -]+", re.ASCII)  # a value without quotes, brackets and Hydra's functions
PAIRS = ("explain",)  # keys whose value is two texts with a comma; elsewhere a comma separates the jobs of a sweep
_NOT_ASCII = re.compile(r"(?=.*[^\x00-\x7f])[^'\"()\[\]{}$\\=]+")  # Hydra takes these characters only in quotes


def quote_texts(command: str, arguments: list[str]) -> list[str]:
    """Quote each value that is not ASCII, and each value of a text key that Hydra would read as a number or boolean.

    >>> quote_texts("search", ["explain=q1,7"])
    ["explain='q1,7'"]
    >>> quote_texts("train", ["name=1e3", "name=a,10", "optim.lr=1e3", "-m", "hydra.run.dir=/home/Zoë"])
    ["name='1e3'", "name=a,'10'", 'optim.lr=1e3', '-m', "hydra.run.dir='/home/Zoë'"]
    """
    return [_quoted(command, argument) for argument in arguments]


def _quoted(command: str, argument: str) -> str:
    key, equals, value = argument.partition("=")
    if not equals or key.startswith(("-", "~")):
        return argument
    if key in PAIRS and _PLAIN.fullmatch(value.replace(",", "")):
        return f"{key}='{value}'"
    is_list = value.startswith("[") and value.endswith("]")
    parts = (value[1:-1] if is_list else value).split(",")
    if not all(_PLAIN.fullmatch(part) or _NOT_ASCII.fullmatch(part) for part in parts):
        return argument
    is_text = takes_text(command, key.lstrip("+"))
    text = ",".join(
        f"'{part.strip(' ')}'" if not part.isascii() or (is_text and _is_not_text(part)) else part for part in parts
    )
    return f"{key}=[{text}]" if is_list else f"{key}={text}"


def _is_not_text(part: str) -> bool:
    try:
        return isinstance(OverridesParser.create().parse_override(f"key={part}").value(), (bool, int, float))
    except HydraException:  # Hydra reports the mistake
        return False


@cache
def takes_text(command: str, key: str) -> bool:
    """Return whether a dotted key takes text and no numbers, in every choice of its group that has the key."""
    key = as_alone(key)
    group, _, name = key.partition(".")
    if key in text_keys(ROOTS[command]):
        return True
    choices = [SHARED_KEYS.get(group, {}).get(name, ())]
    choices += [_types(path.read_text(encoding="utf-8"), group, key) for path in sorted((CONF / group).glob("*.yaml"))]
    annotated = [types for types in choices if types]
    return bool(annotated) and all("str" in types and not {"int", "float", "bool"} & set(types) for types in annotated)


@cache
def _content(text: str) -> Any:
    return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def _types(text: str, group: str, key: str) -> tuple[str, ...]:
    """Return the types that the class of a yaml's node accepts for a dotted key; empty without such a parameter."""
    package = re.search(r"^# @package ([\w.]+)$", text, re.M)
    prefix = package.group(1) if package else group
    if not key.startswith(f"{prefix}."):
        return ()
    parent, _, name = key.removeprefix(f"{prefix}.").rpartition(".")
    node = _content(text)
    for part in parent.split(".") if parent else ():
        node = node.get(part) if isinstance(node, dict) else None
    target = node.get("_target_") if isinstance(node, dict) else None
    try:
        parameter = (parameters_of(str(target)) or {}).get(name) if target else None
    except LookupError:
        return ()
    return parameter.types if parameter is not None else ()
