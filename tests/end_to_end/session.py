"""Run several command lines one after another in one process, so that imports happen once, as in a Hydra multirun.

Input: a JSON file of {name: [script, argument, ...]}. If the value of an argument is `@GLOB`, it is replaced by the
first path that matches when the command starts.
Output: a JSON file of {name: {"code", "out", "err", "left"}}. `err` is the part of `out` that went to stderr, and
`left` lists the files that the command created.
"""

import contextlib
import io
import json
import re
import runpy
import sys
import traceback
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def resolved(argument: str) -> str:
    """Return the argument with its glob replaced."""
    match = re.search(r"(?<==)@(\S+)$", argument)
    if not match:
        return argument
    path = min(Path.cwd().glob(match.group(1)), default=None)
    assert path is not None, argument
    return argument[: match.start()] + str(path)


class Both(io.StringIO):
    """A text stream that stores its text and passes it to a second stream."""

    def __init__(self, to: io.StringIO) -> None:
        super().__init__()
        self.to = to

    def write(self, text: str) -> int:
        self.to.write(text)
        return super().write(text)


def files() -> set[str]:
    """Return all files in the working directory and its subfolders."""
    return {str(path) for path in Path().rglob("*") if path.is_file()}


def main() -> None:
    """Run the commands of the input file."""
    warnings.simplefilter("ignore")
    results = {}
    for name, (script, *arguments) in json.loads(Path(sys.argv[1]).read_text()).items():
        out, code, before = io.StringIO(), 0, files()
        err = Both(out)
        argv = sys.argv
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                sys.argv = [str(ROOT / script), *map(resolved, arguments)]
                runpy.run_path(sys.argv[0], run_name="__main__")
            except SystemExit as end:
                code = int(end.code or 0)
            except Exception:
                code = 99
                traceback.print_exc()
        sys.argv = argv
        results[name] = {"code": code, "out": out.getvalue(), "err": err.getvalue(), "left": sorted(files() - before)}
    Path(sys.argv[2]).write_text(json.dumps(results))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
