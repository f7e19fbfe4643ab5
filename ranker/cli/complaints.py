"""Errors of Hydra, OmegaConf and the operating system, reworded in one line: where, expected, got, fix."""

from __future__ import annotations

import errno
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import hydra

from ranker.config import roots
from ranker.config.roots import CONF
from ranker.errors import RankerError, did_you_mean, shorten
from ranker.files.space import no_room

HYDRA, RANKER = Path(hydra.__file__).parent, Path(__file__).resolve().parents[1]
UNUSABLE_PATH = (
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,
    errno.ENAMETOOLONG,
    errno.ELOOP,
)
TYPE_WORDS = {"Integer": "an integer", "Float": "a number", "Boolean": "true or false"}


def cause_of(error: BaseException) -> RankerError | None:
    """Return the RankerError that Hydra or OmegaConf has wrapped, once or several times; None if there is none."""
    inner: BaseException | None = error
    while inner is not None and not isinstance(inner, RankerError):
        inner = inner.__cause__ or inner.__context__
    return inner


def is_hydras(error: BaseException) -> bool:
    """Return whether Hydra raised an error, as opposed to the command that Hydra ran."""
    files = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    programs = [HYDRA if HYDRA in file.parents else RANKER for file in files if {HYDRA, RANKER} & set(file.parents)]
    return bool(programs) and programs[-1] == HYDRA and not any(RANKER / "commands" in file.parents for file in files)


def path_in_one_line(error: Exception, making_folders: bool) -> str | None:
    """Reword an error about a file, a folder or a full disk; the full disk may also be the cause of the error.

    Args:
        error: The error.
        making_folders: Whether Hydra raised the error while it created the run folder. Then every OSError with a file
            name is reworded, with any error number.

    Returns:
        The message; None if the error is about something else.
    """
    if isinstance(error, OSError) and (error.errno in UNUSABLE_PATH or making_folders) and error.filename is not None:
        name = str(error.filename)
        shown = name if len(name) < 200 else f"{name[:200]}..."
        return (
            f"{shown}: expected a file or folder that this user can use, got {error.strerror!r}; "
            "check it, or set hydra.run.dir or cache_dir"
        )
    reason = no_room(error)
    if reason is not None:
        return (
            f"{getattr(error, 'filename', None) or 'disk'}: expected room to write to, got {reason!r}; "
            "make room, and go on with checkpoint=RUN_FOLDER resume=true where the run has a checkpoints/last.ckpt"
        )
    return None


def memory_in_one_line(error: Exception) -> str | None:
    """Reword an error of Python, torch or CUDA about memory; return None for any other error."""
    text = " ".join(str(error).split())
    place = "GPU memory" if re.search("CUDA|GPU", text) else "memory"
    if not isinstance(error, MemoryError) and not re.search(r"out of memory|can't allocate memory", text):
        return None
    got = ". ".join(re.split(r"\. (?=[A-Z])", text)[:3]).rstrip(".") or "MemoryError"
    return (
        f"{place}: expected enough memory for the computation, got {shorten(got)!r}; set a smaller batch.max_tokens, "
        "encoder.checkpointing=true, or end other programs that use the same memory; go on with checkpoint=RUN_FOLDER "
        "resume=true where the run has a checkpoints/last.ckpt"
    )


def in_one_line(error: BaseException) -> str:
    """Reword an error of Hydra or OmegaConf as: where, expected, got, fix."""
    text = str(error)
    for part in (error.__cause__, error.__context__):
        text += f"\n{part}" if part is not None and str(part) not in text else ""
    messages = (reword(text) for reword in REWORDINGS)
    return shorten(" ".join(next((message for message in messages if message), _first_paragraph(text)).split()))


def _missing_choice(text: str) -> str | None:
    match = re.search(
        r"Could not find '([^']+)/([^'/]*)'(?:\s+Available options in '[^']+':\s+(.*?)(?:\n\n|\nConfig search|$))?",
        text,
        re.S,
    )
    if match is None:
        return None
    group, got, options = match.groups()
    known = re.findall(r"\S+", options or "") or sorted(path.stem for path in (CONF / group).glob("*.yaml"))
    known = [name for name in known if not name.startswith("_")]
    if not known:
        return f"{group}: no such file conf/{group}/{got}.yaml"
    return f"{group}: expected one of {', '.join(known)}; got {got!r}"


def _deleted_key(text: str) -> str | None:
    match = re.search(r"Could not delete from config\. '?([\w.]+)'?", text)
    return match and f"{match.group(1)}: expected a key that can be deleted, got ~{match.group(1)}"


def _group_without_name(text: str) -> str | None:
    if "Config group override must be" not in text:
        return None
    given = [
        re.fullmatch(r"\+?([\w/]+)(?:@[\w.]+)?=(null|[\d.eE+-]+|true|false|)", argument) for argument in sys.argv[1:]
    ]
    groups = [match.groups() for match in given if match and (CONF / match.group(1)).is_dir()]
    return "; ".join(
        f"{group}: expected the name of a file in conf/{group}/, got {got}"
        for group, got in groups or [("a group", "null")]
    )


def _unknown_interpolation(text: str) -> str | None:
    match = re.search(r"Interpolation key '([^']+)' not found", text)
    if match is None:
        return None
    key = _full_key(text) or "interpolation"
    return f"{key}: expected the name of a key in ${{...}}, got ${{{match.group(1)}}}, which is not a key"


def _wrong_class(text: str) -> str | None:
    match = re.search(r"Invalid type assigned: (\w+) is not a subclass of (\w+).*?full_key: (\S+)", text, re.S)
    if match is None:
        return None
    got, expected, key = match.groups()
    return f"{key}: expected {expected}, got {'null' if got == 'NoneType' else got}"


def _null(text: str) -> str | None:
    match = re.search(r"field '[^']*' is not Optional\s+full_key: (\S+)", text)
    return match and f"{match.group(1)}: expected a value, got null"


def _unknown_key(text: str) -> str | None:
    struct = re.search(r"Key '[^']+' is not in struct\s+full_key: (\S+)", text)
    if struct:
        return f"{struct.group(1)}: unknown key{_nearest_key(struct.group(1))}"
    match = re.search(
        r"(?:Could not override|Key|Could not append to config\. An item is already at|Error merging override) "
        r"'?\+?([\w./@-]+)'?",
        text,
    )
    if match is None or "not in" not in text:
        return None
    name = _full_key(text) or match.group(1)
    return f"{name}: unknown key{_nearest_key(name)}"


def _wrong_type(text: str) -> str | None:
    match = re.search(r"Value '([^']*)'(?: of type '[^']*')? could not be converted to (\w+)", text)
    if match is None:
        return None
    got, expected = match.groups()
    return f"{_full_key(text) or '?'}: expected {TYPE_WORDS.get(expected, expected)}, got {got!r}"


def _missing_quotes(text: str) -> str | None:
    if "mismatched input '='" not in text and "extraneous input" not in text:
        return None
    return (
        f"{_first_paragraph(text)}; quote a value that holds '=' or ',' for Hydra as well as for the shell: "
        "'key=\"a=b.ckpt\"' or key=a\\=b.ckpt"
    )


# Each function returns a message, or None if it does not know the error. The first message is used.
REWORDINGS: tuple[Callable[[str], str | None], ...] = (
    _missing_choice,
    _deleted_key,
    _group_without_name,
    _unknown_interpolation,
    _wrong_class,
    _null,
    _unknown_key,
    _wrong_type,
    _missing_quotes,
)


def _full_key(text: str) -> str | None:
    match = re.search(r"full_key: (\S+)", text)
    return match.group(1) if match else None


def _first_paragraph(text: str) -> str:
    return " ".join(text.strip().split("\n\n")[0].split())


def _nearest_key(name: str) -> str:
    if name.startswith("data.sets."):
        return f"; a key that the set's yaml does not list is added with a plus sign: +{name}=..."
    group, _, key = name.partition(".")
    choices = sorted(path.stem for path in (CONF / group).glob("*.yaml") if _has_key(path, key)) if key else []
    if choices:  # the configuration has no choice of this group yet
        shown = " or ".join(f"{group}={choice}" for choice in choices[:3]) + (" or others" if choices[3:] else "")
        return f"; it is a key of conf/{group}/: choose a file there, too, as {shown}"
    known = [key for root in roots.ROOTS.values() for key in roots.known_keys(root) if key != name]
    hint = did_you_mean(name, known)
    return hint if "did you mean" in hint else "; see --help for the keys"


def _has_key(path: Path, key: str) -> bool:
    """Return whether a yaml of a group, or the `_shared.yaml` that it includes, has a key."""
    if path.stem.startswith("_") or path.stem == "none":
        return False
    shared = path.with_name("_shared.yaml")
    texts = [path.read_text(encoding="utf-8")]
    texts += [shared.read_text(encoding="utf-8")] if shared.is_file() and "- _shared" in texts[0] else []
    return any(re.search(rf"^{re.escape(key)}:", text, re.M) for text in texts)
