"""Run the entry scripts in forked children of one process that has imported everything: a run costs a second, and its death is real.

`Forks` is the tests' side; the same file as a script is the process that forks, one JSON line a command, one JSON line an answer.
"""

import contextlib
import json
import os
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# what a training imports late: loaded once, before the first fork
LATE = (
    "ranker.run", "bm25s", "Stemmer", "transformers.models.bert.modeling_bert", "rich.table", "scipy.stats", "lightning.pytorch.loggers",
    "matplotlib.pyplot", "pandas", "torch._dynamo", "ranker.probing.examples",
)  # fmt: skip


@dataclass
class Done:
    """How a run ended; a negative code is a signal's number."""

    codes: list[int]
    out: str
    seconds: float

    @property
    def code(self) -> int:
        return self.codes[0]


class Forks:
    """Starts the forking process at first use."""

    def __init__(self) -> None:
        self.process: subprocess.Popen | None = None

    def run(
        self, script: str, *arguments: str, cwd: Path, devices: int = 1, timeout: float = 900, signals: list | None = None, limit: int = 0
    ):
        """Run `python SCRIPT arguments` in a folder.

        Args:
            script: The entry script.
            arguments: Its command line.
            cwd: The folder.
            devices: Processes, which find each other as under torchrun.
            timeout: Seconds after which all are killed and the test fails.
            signals: `[device, target, signal name, audit event, part of its arguments, count, seconds]`: so many seconds after the count-th
                such event in the device's process (Python's audit events: `open`, `os.rename`, ...) the signal is sent to the target:
                another device, or `child`, the process that it started.
            limit: Largest file that may be written, in bytes; 0 is no limit.
        """
        if self.process is None:
            environment = {
                **os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "COLUMNS": "200",
                "MPLBACKEND": "agg",
            }  # fmt: skip
            self.process = subprocess.Popen(
                [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True, cwd=ROOT
            )
        command = {
            "script": script, "arguments": arguments, "cwd": str(cwd), "devices": devices, "timeout": timeout, "signals": signals or [],
            "limit": limit,
        }  # fmt: skip
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        assert not answer.pop("hung"), f"{script} {arguments} hung\n{answer['out']}"
        return Done(**answer)

    def close(self) -> None:
        """End the forking process."""
        if self.process is not None:
            self.process.stdin.close()
            self.process.wait()


def send_at(ask: int, device: int, target: int | str, name: str, event: str, part: str, count: int, seconds: float) -> None:
    """Send a signal some time after an audit event has been seen so many times."""
    number = getattr(signal, name)
    left = [count]

    def send() -> None:
        time.sleep(seconds)
        if target == "child":
            (started,) = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
            os.kill(int(started), number)
        elif target == device:
            os.kill(os.getpid(), number)
        else:
            os.write(ask, f"{target} {int(number)}\n".encode())

    def hook(seen: str, arguments: tuple) -> None:
        if seen == event and part in str(arguments[:2]):
            left[0] -= 1
            if left[0] == 0:
                threading.Thread(target=send, daemon=True).start() if seconds else send()

    sys.addaudithook(hook)


def child(command: dict, device: int, port: int, out: int, ask: int) -> int:
    """Be one process of a run; returns its exit code."""
    os.setsid()
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1, closefd=False), os.fdopen(2, "w", buffering=1, closefd=False)
    warnings.simplefilter("ignore")
    os.chdir(command["cwd"])
    if command["devices"] > 1:
        os.environ |= {
            "RANK": str(device), "LOCAL_RANK": str(device), "WORLD_SIZE": str(command["devices"]), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port), "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": str(command["devices"]), "TORCHELASTIC_RUN_ID": "test",
        }  # fmt: skip
    if command["limit"]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (command["limit"], command["limit"]))
    for source, *rest in command["signals"]:
        if source == device:
            send_at(ask, device, *rest)
    sys.argv = [str(ROOT / command["script"]), *command["arguments"]]
    code = 0
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 99
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def run(command: dict) -> dict:
    """Fork a run's processes and wait for them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (read, write), (asked, ask) = os.pipe(), os.pipe()
    started = time.monotonic()
    pids = []
    for device in range(command["devices"]):
        pid = os.fork()
        if pid == 0:
            code = 98
            try:
                os.close(read)
                code = child(command, device, port, write, ask)
            finally:
                os._exit(code)
        pids.append(pid)
    os.close(write)
    text, hung = b"", False
    while True:  # until every process, also what they started, has closed its end
        left = command["timeout"] - (time.monotonic() - started)
        if left <= 0:
            hung = True
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            break
        ready = select.select([read, asked], [], [], min(left, 1.0))[0]
        if asked in ready:
            for target, number in (line.split() for line in os.read(asked, 4096).decode().splitlines()):
                os.kill(pids[int(target)], int(number))
        if read in ready:
            part = os.read(read, 65536)
            if not part:
                break
            text += part
    for end in (read, asked, ask):
        os.close(end)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    return {"codes": codes, "out": text.decode(errors="replace"), "seconds": time.monotonic() - started, "hung": hung}


def main() -> None:
    """Answer commands until there are no more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.path.insert(0, str(ROOT))
    warnings.simplefilter("ignore")
    for name in LATE:
        with contextlib.suppress(ImportError):
            __import__(name)
    for line in sys.stdin:
        answers.write(json.dumps(run(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
