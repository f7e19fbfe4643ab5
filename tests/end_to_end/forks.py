"""Run the entry scripts in forked children of one process that has imported everything.

A run in a forked child takes one second, while importing everything takes ten. The child is a real process that can be
killed. `Forks` is the interface for tests. If this file is run as a script, it is the process that forks: it reads one
JSON line for each command and writes one JSON line for each answer. With `preloaded`, the processes that a run starts
as `python SCRIPT` or `python -m MODULE` are also forked.
"""

import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import os
import pkgutil
import resource
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# modules that a training imports late; the forking process imports them before the first fork
LATE = (
    "ranker.cli.main",
    "ranker.commands.train",
    "ranker.commands.evaluate",
    "ranker.commands.search",
    "ranker.commands.probe",
    "ranker.commands.label",
    "bm25s",
    "Stemmer",
    "transformers.models.bert.modeling_bert",
    "rich.table",
    "scipy.stats",
    "lightning.pytorch.loggers",
    "matplotlib.pyplot",
    "matplotlib.backends.backend_agg",
    "PIL.PngImagePlugin",
    "jinja2",
    "pandas",
    "torch._dynamo",
    "ranker.probing.examples",
    "ranker.losses.lce",
    "ranker.training.schedules",
    "rich._emoji_codes",
    "hydra.experimental",
    "hydra_plugins.ranker_sweeps",
    "torch.utils.serialization",
    "pytrec_eval",
)
# This program replaces `python`. It asks the forking process for a child with the same arguments, folder, environment
# and open files, and exits like this child.
STAND_IN = """#!{python} -IS
import json, os, re, signal, socket, sys
arguments = sys.argv[1:]
while arguments and arguments[0].startswith("-W"):
    arguments.pop(0)
if not arguments or not (arguments[0] == "-m" or arguments[0].endswith(".py")):
    os.execv("{python}", ["{python}", *sys.argv[1:]])
files = sorted(int(name) for name in os.listdir("/proc/self/fd"))
files = [file for file in files if os.path.exists("/proc/self/fd/%d" % file)]
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.connect("{address}")
order = dict(arguments=arguments, cwd=os.getcwd(), environment=dict(os.environ), files=files)
socket.send_fds(server, [json.dumps(order).encode()], files)
pid = int(server.recv(99))
signal.signal(signal.SIGTERM, lambda *_: os.kill(pid, signal.SIGTERM))
code = int(server.recv(99) or b"99")
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
    os.kill(os.getpid(), -code)
os._exit(code)
"""
FREE = 500  # file descriptors from this number on are unused


@dataclass
class Done:
    """The result of a run. A negative exit code is the number of the signal that ended the process."""

    codes: list[int]
    out: str
    seconds: float

    @property
    def code(self) -> int:
        return self.codes[0]


class Forks:
    """Run commands in forked processes. The forking process starts at the first use.

    Args:
        also: Modules that the forking process imports in addition to `LATE`.
    """

    def __init__(self, *also: str) -> None:
        self.also = also
        self.process: subprocess.Popen | None = None

    def run(
        self,
        script: str,
        *arguments: str,
        cwd: Path,
        devices: int = 1,
        timeout: float = 900,
        signals: list | None = None,
        limit: int = 0,
        preloaded: bool = False,
        **environment: str,
    ):
        """Run `python SCRIPT arguments` in a folder.

        Args:
            script: The entry script.
            arguments: Its command line.
            cwd: The working directory.
            devices: Number of processes; they get the environment variables of torchrun.
            timeout: Seconds after which all processes are killed and the test fails.
            signals: Rows `[device, target, signal name, audit event, part of its arguments, count, seconds]`. The
                signal is sent `seconds` after the count-th such event in the process of `device`. Events are Python's
                audit events, such as `open` or `os.rename`. `target` is a device, or `child`, the process that `device`
                started.
            limit: Largest size of a written file, in bytes; 0: no limit.
            preloaded: Whether Python processes that the run starts are forked, too. They are then not children of the
                processes that start them.
            **environment: Environment variables.
        """
        if self.process is None:
            variables = {
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "CUDA_VISIBLE_DEVICES": "",
                "HF_HUB_OFFLINE": "1",
                "COLUMNS": "200",
                "MPLBACKEND": "agg",
            }
            self.process = subprocess.Popen(
                [sys.executable, __file__, *self.also],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=variables,
                text=True,
                cwd=ROOT,
            )
        command = {
            "script": script,
            "arguments": arguments,
            "cwd": str(cwd),
            "devices": devices,
            "timeout": timeout,
            "signals": signals or [],
            "limit": limit,
            "preloaded": preloaded,
            "environment": environment,
        }
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


def send_at(
    ask: int, device: int, target: int | str, name: str, event: str, part: str, count: int, seconds: float
) -> None:
    """Send a signal `seconds` after the `count`-th audit event of this name and argument."""
    number = getattr(signal, name)
    remaining = [count]

    def send() -> None:
        time.sleep(seconds)
        if target == "child":
            (started,) = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
            os.kill(int(started), number)
        elif target == device:
            os.kill(os.getpid(), number)
        else:
            os.write(ask, f"{target} {int(number)}\n".encode())

    def hook(name: str, arguments: tuple) -> None:
        if name == event and part in str(arguments[:2]):
            remaining[0] -= 1
            if remaining[0] == 0:
                threading.Thread(target=send, daemon=True).start() if seconds else send()

    sys.addaudithook(hook)


def perform(arguments: list[str], stand_in: str | None) -> int:
    """Do in this process what `python arguments` would do; return the exit code."""
    sys.stdout, sys.stderr = (
        os.fdopen(1, "w", buffering=1, closefd=False),
        os.fdopen(2, "w", buffering=1, closefd=False),
    )
    warnings.simplefilter("ignore")
    code = 0
    try:
        if stand_in:
            sys.executable = stand_in
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 99
    if stand_in:  # the functions below end joblib's workers
        threading._shutdown()
        atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def child(command: dict, device: int, port: int, out: int, ask: int, stand_in: str) -> int:
    """Set up and run one process of a run; return the exit code."""
    os.setsid()
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.chdir(command["cwd"])
    os.environ |= command["environment"]
    if command["devices"] > 1:
        os.environ |= {
            "RANK": str(device),
            "LOCAL_RANK": str(device),
            "WORLD_SIZE": str(command["devices"]),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GROUP_RANK": "0",
            "LOCAL_WORLD_SIZE": str(command["devices"]),
            "TORCHELASTIC_RUN_ID": "test",
        }
    if command["limit"]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (command["limit"], command["limit"]))
    for source, *rest in command["signals"]:
        if source == device:
            send_at(ask, device, *rest)
    return perform([str(ROOT / command["script"]), *command["arguments"]], stand_in if command["preloaded"] else None)


def grandchild(order: dict, files: list[int], stand_in: str) -> int:
    """Set up and run a process that a stand-in requested; return the exit code."""
    os.setsid()
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD, FREE) for file in files]
    os.closerange(0, FREE)
    for file, number in zip(moved, order["files"], strict=True):
        os.dup2(file, number)
        os.close(file)
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["environment"])
    os.environ.pop("RANKER_PARENT", None)  # it is no child of the process that it would watch; its stand-in ends it
    return perform(order["arguments"], stand_in)


def fork(work: Callable[[], int]) -> int:
    """Fork a process that runs `work` and exits with its result; return the process id."""
    pid = os.fork()
    if pid == 0:
        code = 98
        try:
            code = work()
        finally:
            os._exit(code)
    return pid


class StandIns:
    """The processes that runs have started through a stand-in. They are forked here, after all imports."""

    def __init__(self) -> None:
        folder = Path(tempfile.mkdtemp())
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(str(folder / "socket"))
        self.listener.listen(64)
        self.path = folder / "python"
        self.path.write_text(STAND_IN.format(python=sys.executable, address=folder / "socket"))
        self.path.chmod(0o755)
        # file descriptor of a process (readable when the process has ended) -> process id and stand-in
        self.running: dict[int, tuple[int, socket.socket]] = {}

    def files(self) -> list:
        """Return the files and sockets to wait for."""
        return [self.listener, *self.running, *(stand_in for _, stand_in in self.running.values())]

    def serve(self, ready: list) -> None:
        """Start requested processes, report those that have ended, and kill those whose stand-in has died."""
        if self.listener in ready:
            stand_in, _ = self.listener.accept()
            text, files, _, _ = socket.recv_fds(stand_in, 1 << 20, 250)
            pid = fork(lambda: grandchild(json.loads(text), files, str(self.path)))
            for file in files:
                os.close(file)
            stand_in.send(str(pid).encode())
            self.running[os.pidfd_open(pid)] = pid, stand_in
        for file, (pid, stand_in) in list(self.running.items()):
            if file in ready:
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with contextlib.suppress(BrokenPipeError):
                    stand_in.send(str(code).encode())
                del self.running[file]
                os.close(file)
                stand_in.close()
            elif stand_in in ready:
                os.kill(pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill the remaining processes."""
        for pid, _ in self.running.values():
            os.kill(pid, signal.SIGKILL)
        while self.running:
            self.serve(select.select(list(self.running), [], [])[0])


def run(command: dict, stand_ins: StandIns) -> dict:
    """Fork the processes of a run and wait for them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (read, write), (requests, ask) = os.pipe(), os.pipe()
    started = time.monotonic()
    pids = []
    for device in range(command["devices"]):
        pids.append(fork(partial(child, command, device, port, write, ask, str(stand_ins.path))))
    os.close(write)
    text, hung = b"", False
    while True:  # until every process of the run, and every process that they started, has closed the pipe
        left = command["timeout"] - (time.monotonic() - started)
        if left <= 0:
            hung = True
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            break
        ready = select.select([read, requests, *stand_ins.files()], [], [], min(left, 1.0))[0]
        stand_ins.serve(ready)
        if requests in ready:
            for target, number in (line.split() for line in os.read(requests, 4096).decode().splitlines()):
                os.kill(pids[int(target)], int(number))
        if read in ready:
            part = os.read(read, 65536)
            if not part:
                break
            text += part
    stand_ins.end()
    for end in (read, requests, ask):
        os.close(end)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    return {"codes": codes, "out": text.decode(errors="replace"), "seconds": time.monotonic() - started, "hung": hung}


def fill_caches() -> None:
    """Compute what each run would compute first: Hydra's list of plugins, parsers' tables, signatures, fonts, rules.

    These values depend on the installed packages and on `conf/` alone. Pictures get a sixteenth of their dots.
    """
    from hydra import compose, initialize_config_dir
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.plugins import Plugins
    from omegaconf import OmegaConf
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    from ranker.cli import entry
    from ranker.config.check import check
    from ranker.encoders import families
    from ranker.evaluation import figures
    from tests.assets.composition import remember

    remember()
    for module in pkgutil.iter_modules(families.__path__, families.__name__ + "."):
        importlib.import_module(module.name)
    Plugins.instance()
    OverridesParser.create().parse_overrides(["a.b=1e-3", "+c=[d,'e']", "f@g.h={i: 2}", "~j", "k=l,m"])
    OmegaConf.to_container(OmegaConf.create({"a": "${b}/${oc.env:HOME}", "b": "x"}), resolve=True)
    get_checkpoint_conversion_mapping("bert")
    entry.register()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        check(compose("train", ["name=x", "encoder=tiny", "data=files", "data.path=."]))
        check(compose("evaluate", ["name=x", "checkpoint=."]))
    with tempfile.TemporaryDirectory() as folder:
        figure, _ = figures.new_figure(2, 2)
        figures.save(figure, Path(folder), "empty")
    figures.DPI = 50


def main() -> None:
    """Answer commands until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.path.insert(0, str(ROOT))
    warnings.simplefilter("ignore")
    for name in (*LATE, *sys.argv[1:]):
        with contextlib.suppress(ImportError):
            __import__(name)
    fill_caches()
    gc.freeze()
    stand_ins = StandIns()
    for line in sys.stdin:
        answers.write(json.dumps(run(json.loads(line), stand_ins)) + "\n")
        answers.flush()
    shutil.rmtree(stand_ins.path.parent)
    os._exit(0)  # a normal exit would take seconds to unload the imported modules


if __name__ == "__main__":
    main()
