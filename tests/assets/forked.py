"""Run a function in a forked child, which has all imported modules, where a new process would import them anew."""

import os
import re
import sys
import tempfile
import traceback
from collections.abc import Callable


def forked(work: Callable[[], object], forgotten: re.Pattern[str], **environment: str) -> str:
    """Run a function in a child; return what it prints.

    Args:
        work: The function; None or 0 means success.
        forgotten: The start of the names of modules that the child imports anew.
        **environment: Environment variables of the child.

    Raises:
        AssertionError: The function raised an exception, or returned another value.
    """
    with tempfile.TemporaryFile() as output:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
                sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1, closefd=False)
                os.environ |= environment
                for name in [name for name in sys.modules if forgotten.match(name)]:
                    del sys.modules[name]
                code = int(work() or 0)
            except SystemExit as end:
                code = int(end.code or 0)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        output.seek(0)
        text = output.read().decode(errors="replace")
    assert code == 0, text[-5000:]
    return text


def in_copy(folder: str | os.PathLike[str], work: Callable[[], object], **environment: str) -> str:
    """Run a function in a child whose working directory and first import folder is a copy of the project."""

    def start() -> object:
        os.chdir(folder)
        sys.path[:] = [str(folder), *sys.path]
        import ranker

        assert ranker.__file__.startswith(str(folder)), ranker.__file__
        return work()

    return forked(start, re.compile(r"(ranker|hydra_plugins|tests|conftest)(\.|$)|(.*\.)?test_\w+$"), **environment)
