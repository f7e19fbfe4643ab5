"""Every command in the README runs, or stands where it is said to need a network or GPUs."""

import re
import shlex
from pathlib import Path

import pytest
from commands import ROOT, run, run_folder

TINY = [
    "encoder=tiny",
    "trainer.max_steps=2",
    "batch.docs=3",
    "batch.depth=5",
    "depth=3",
    "val_depth=3",
    "trainer.enable_progress_bar=false",
]


def blocks() -> list[tuple[str, list[str]]]:
    """Each bash block of the README: the words before it, and its commands."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = []
    for match in re.finditer(r"```bash\n(.*?)```", text, re.S):
        before = text[: match.start()].rstrip().rsplit("\n\n", 1)[-1]
        lines = match.group(1).replace("\\\n", " ").splitlines()
        found.append((before, [line.split("  #")[0].strip() for line in lines if line.strip()]))
    return found


COMMANDS = [(before, command) for before, commands in blocks() for command in commands]
OFFLINE = [command for before, command in COMMANDS if command.startswith("python ") and not re.search(r"network|GPU", before)]


def test_the_readme_promises_the_two_commands():
    commands = [command for _, command in COMMANDS]
    assert {"make demo", "make test", "python train.py"} <= set(commands)
    for command in commands:
        if command.startswith("make "):
            assert re.search(rf"^{command.split()[1]}:", (ROOT / "Makefile").read_text(), re.M), command


@pytest.mark.parametrize("command", OFFLINE)
def test_a_command_of_the_readme_runs(command, small_files, tmp_path):
    script, *arguments = shlex.split(command)[1:]
    places = {
        "DIR": str(small_files),
        "a.trec": str(tmp_path / "a.trec"),
        "q.txt": str(small_files / "qrels.test.txt"),
        "b.trec": str(tmp_path / "a.trec"),
    }
    (tmp_path / "a.trec").write_text("".join(f"q{i} Q0 d{i} 1 1.0 t\n" for i in range(32, 40)))
    if any("STAMP" in argument for argument in arguments):
        done = run("train.py", *TINY, "data=files", f"data.path={small_files}", "name=first", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        places["outputs/monobert/STAMP"] = str(run_folder(tmp_path))
    for name, place in places.items():
        arguments = [re.sub(rf"(?<=[=]){re.escape(name)}$", place, argument) for argument in arguments]
    if script == "train.py" and "--help" not in arguments:
        # what the command chooses stays; the rest is made small
        own = {argument.split("=")[0] for argument in arguments}
        arguments += [small for small in TINY if small.split("=")[0] not in own]
        if "encoder=minilm" in arguments:
            arguments += ["batch.queries=2"]
    elif "checkpoint" in " ".join(arguments):
        arguments += ["depth=3", "trainer.enable_progress_bar=false"]
    done = run(script, *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "nDCG@10" in done.stdout or "--help" in arguments or "-m" in arguments
    results = [
        *Path(tmp_path).glob("*/*/*/result.json"),
        *Path(tmp_path).glob("*/*/*/*/result.json"),
        *Path(tmp_path).glob("*/*/*/evaluation"),
    ]
    assert results or "--help" in arguments
