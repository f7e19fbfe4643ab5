"""Write the text of `--help`: groups with their choices, and keys with the comments of the configuration files."""

from __future__ import annotations

import sys

from omegaconf import OmegaConf

from ranker.config.roots import CONF


def answer_help(command: str) -> None:
    """If the command line has --help or -h, print the help of a command and exit.

    This replaces Hydra's help, which takes seconds with many groups and omits the comments on the keys.
    """
    arguments = sys.argv[1:]
    if not {"--help", "-h"} & set(arguments):
        return
    try:
        sys.stdout.write(usage(command, arguments))
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        sys.stderr.close()
    raise SystemExit(0)


def usage(command: str, arguments: list[str]) -> str:
    """Return the help text of a command; with GROUP=CHOICE in `arguments`, also the keys of that choice."""
    root = CONF / f"{command}.yaml"
    defaults = {
        key.removeprefix("override ").removeprefix("optional "): value
        for entry in OmegaConf.load(root).defaults
        if not isinstance(entry, str)
        for key, value in entry.items()
    }
    groups = {path.name: sorted(part.stem for part in path.glob("[!_]*.yaml")) for path in sorted(CONF.iterdir())
              if path.is_dir() and path.name in defaults and any(path.glob("*.yaml"))}  # fmt: skip
    chosen = dict(part.split("=", 1) for part in arguments if "=" in part)
    lines = [
        f"ranker {command} [GROUP=CHOICE ...] [KEY=VALUE ...] [-m]",
        "",
        "-m: run every combination of comma-separated values; --cfg job: print the configuration and end; "
        "--hydra-help: Hydra's options.",
        f"ranker {command} GROUP=CHOICE --help shows a choice's keys. docs/ explains them.",
        "",
        "Groups and their choices (* is the default):",
    ]
    for group, names in groups.items():
        lines.append(f"  {group}: " + ", ".join(f"{name}*" if name == defaults[group] else name for name in names))
    lines += ["", f"Keys, conf/{command}.yaml:", ""]
    text = root.read_text(encoding="utf-8")
    lines += [line for line in _below_defaults(text) if line]
    for group in groups:
        if group in chosen and (path := CONF / group / f"{chosen[group]}.yaml").is_file():
            text = path.read_text(encoding="utf-8")
            lines += ["", f"{group}={chosen[group]}, conf/{group}/{path.name}:", "", *text.splitlines()]
            shared = path.with_name("_shared.yaml")
            if "- _shared" in text:
                lines += [
                    "",
                    f"and, unless set there, conf/{group}/_shared.yaml:",
                    "",
                    *shared.read_text(encoding="utf-8").splitlines(),
                ]
    return "\n".join(lines) + "\n"


def _below_defaults(text: str) -> list[str]:
    """Return the lines of a root yaml between its list of defaults and its settings for Hydra."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line == "defaults:") + 1
    start = next(i for i in range(start, len(lines)) if not lines[i].startswith("  "))
    end = next((i for i, line in enumerate(lines) if line == "hydra:"), len(lines))
    return lines[start:end]
