"""Every command in the README runs, or stands where it is said to need a network or GPUs."""

import re
import shlex

import pytest
from commands import ROOT, run_all

TINY = [
    "encoder=tiny",
    "trainer.max_steps=2",
    "batch.docs=3",
    "batch.depth=5",
    "depth=3",
    "val_depth=3",
    "trainer.enable_progress_bar=false",
]
SMALL = {"search.py": [], "probe.py": []}


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


@pytest.fixture(scope="module")
def done(tmp_path_factory, small_files):
    """All commands that need neither network nor GPU, made small, one after another in one process; the folder, and what each said."""
    where = tmp_path_factory.mktemp("readme")
    (where / "a.trec").write_text("".join(f"q{i} Q0 d{i} 1 1.0 t\n" for i in range(32, 40)))
    places = {
        "DIR": str(small_files), "q.txt": str(small_files / "qrels.test.txt"), "b.trec": "a.trec", "outputs/monobert/STAMP": "@outputs/first/*",
    }  # fmt: skip
    commands = {"first": ["train.py", *TINY, "data=files", f"data.path={small_files}", "name=first"]}
    for number, command in enumerate(OFFLINE):
        script, *arguments = shlex.split(command)[1:]
        for name, place in places.items():
            arguments = [re.sub(rf"(?<=[=]){re.escape(name)}$", place, argument) for argument in arguments]
        if script in ("train.py", "search.py", "probe.py") and "--help" not in arguments:
            # what the command chooses stays; the rest is made small
            own = {argument.split("=")[0] for argument in arguments}
            small = TINY if script == "train.py" else SMALL[script]
            arguments += [part for part in small if part.split("=")[0] not in own]
            if "encoder=minilm" in arguments:
                arguments += ["batch.queries=2", "depth=1", "val_depth=1"]
        elif "checkpoint" in " ".join(arguments):
            arguments += ["depth=3", "trainer.enable_progress_bar=false"]
        commands[command] = [script, *arguments, *([] if "--help" in arguments else [f"name=command{number}"])]
    return where, run_all(commands, where)


@pytest.mark.parametrize("command", OFFLINE)
def test_a_command_of_the_readme_runs(command, done):
    where, results = done
    assert results[command]["code"] == 0, results[command]["out"][-3000:]
    left = [*where.glob(f"*/command{OFFLINE.index(command)}/**/*")]
    if "--help" in command:
        assert "save_every_steps" in results[command]["out"]
    elif command.startswith("python probe.py"):
        assert any(path.name == "probe_results.csv" for path in left)
    else:
        assert any(path.name == "metrics.json" for path in left)
