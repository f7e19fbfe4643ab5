"""Run several command lines one after another in one process, as a multirun does: what they import is imported once.

Input: a JSON file of {name: [script, argument, ...]}; `@glob` as an argument's value stands for the one path that matches it by then.
Output: a JSON file of {name: {"code", "out"}}.
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
    """The argument with its glob replaced."""
    found = re.search(r"(?<==)@(\S+)$", argument)
    if not found:
        return argument
    (path,) = Path.cwd().glob(found.group(1))
    return argument[: found.start()] + str(path)


def main() -> None:
    """Run them."""
    warnings.simplefilter("ignore")
    results = {}
    for name, (script, *arguments) in json.loads(Path(sys.argv[1]).read_text()).items():
        out, code = io.StringIO(), 0
        argv = sys.argv
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            try:
                sys.argv = [str(ROOT / script), *map(resolved, arguments)]
                runpy.run_path(sys.argv[0], run_name="__main__")
            except SystemExit as end:
                code = int(end.code or 0)
            except Exception:
                code = 99
                traceback.print_exc()
        sys.argv = argv
        results[name] = {"code": code, "out": out.getvalue()}
    Path(sys.argv[2]).write_text(json.dumps(results))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
