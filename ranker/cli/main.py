"""The program `ranker COMMAND [GROUP=CHOICE ...] [KEY=VALUE ...]`; train.py and the other scripts run one command."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hydra

from ranker.cli.entry import job, register, user_errors
from ranker.cli.usage import answer_help
from ranker.config.roots import CONF
from ranker.errors import ConfigError, did_you_mean

COMMANDS = sorted(path.stem for path in CONF.glob("*.yaml"))  # each command has a root yaml

REPLAY = "replay"  # this command takes a folder and no keys, so it has no yaml


def entry_point(command: str) -> Callable[[], Any]:
    """Return Hydra's main function of a command; call `register` before the main function."""

    @hydra.main(version_base="1.3", config_path=str(CONF), config_name=command)
    def main(cfg: Any) -> float | None:
        return job(command, cfg)

    return main


def run(command: str) -> None:
    """Run a command with the arguments in `sys.argv[1:]`. After a user's mistake, print one line and exit with 1."""
    gc.disable()  # start-up creates many objects and hardly any garbage; `entry` enables collection again
    answer_help(command)
    register(command)
    with user_errors():
        entry_point(command)()


def main() -> None:
    """Run the command that `sys.argv[1]` names."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("-h", "--help"):
        sys.stdout.write("\n".join(_overview()) + "\n")
        return
    with user_errors():
        if name not in (*COMMANDS, REPLAY):
            raise ConfigError(f"ranker: expected a command, got {name!r}{did_you_mean(name, [*COMMANDS, REPLAY])}")
    sys.argv = [sys.argv[0], *sys.argv[2:]]
    if name == REPLAY:
        with user_errors():
            importlib.import_module("ranker.commands.replay").main()
        return
    run(name)


def _overview() -> list[str]:
    lines = ["ranker COMMAND [GROUP=CHOICE ...] [KEY=VALUE ...] [-m]", "", "Commands:"]
    for command in COMMANDS:
        first = Path(CONF / f"{command}.yaml").read_text(encoding="utf-8").split("\n", 1)[0]
        lines.append(f"  {command:10} {first.lstrip('# ')}")
    replay = f"`{REPLAY} RUN/nonfinite/step-N` repeats a training step whose loss or gradient was NaN or infinite."
    lines.append(f"  {REPLAY:10} {replay}")
    return [
        *lines,
        "",
        "ranker COMMAND --help lists its groups and keys; --config-dir FOLDER adds yaml files of your own.",
    ]
