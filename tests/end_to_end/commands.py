"""Start the entry scripts as a user does, and kill their whole process group if they hang."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forks import Forks

ROOT = Path(__file__).resolve().parents[2]


def run(
    script: str, *arguments: str, cwd: Path | None = None, timeout: int = 400, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run `python SCRIPT arguments` in the folder `cwd`, where the script writes its results."""
    variables = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": "200",
        **environment,
    }
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", str(ROOT / script), *arguments],
        cwd=cwd or ROOT,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(f"{script} {arguments} hung\n{out}\n{err}") from None
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


def run_all(
    commands: dict[str, list[str]], where: Path, timeout: int = 900, forks: "Forks | None" = None
) -> dict[str, dict]:
    """Run many commands ([script, argument, ...]) one after another in one process, see `session.py`.

    With `forks`, the process is forked from a process that has imported everything.

    Returns:
        Name -> `code` (exit code), `out` (all output), `err` (the part of the output that went to stderr), `left` (the
            new files).
    """
    (where / "commands.json").write_text(json.dumps(commands))
    script, arguments = "tests/end_to_end/session.py", ("commands.json", "results.json")
    if forks is not None:
        forked = forks.run(script, *arguments, cwd=where, timeout=timeout, preloaded=True)
        assert forked.code == 0, forked.out[-3000:]
    else:
        done = run(script, *arguments, cwd=where, timeout=timeout)
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return json.loads((where / "results.json").read_text())


def run_folder(where: Path) -> Path:
    """Return the only run folder in `where / "outputs"`."""
    (folder,) = (path.parent for path in (where / "outputs").glob("*/*/config.yaml"))
    return folder


def by_start(folder: Path) -> list[Path]:
    """Return the run folders of a folder by start time. Their names do not order runs of the same second."""
    return sorted(folder.iterdir(), key=lambda run: (run / "environment.json").stat().st_mtime_ns)
