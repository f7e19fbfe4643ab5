"""Every command in the README and the pages on training and bi-encoders runs, or is marked: needs network or GPUs."""

import re
import shlex

import pytest
from commands import ROOT, run_all

PAGES = ("README.md", "docs/training.md", "docs/bi_encoders.md")
TINY = {
    "train.py": [
        "encoder=tiny",
        "trainer.max_steps=2",
        "batch.queries=2",
        "batch.docs=3",
        "batch.depth=5",
        "depth=3",
        "val_depth=3",
        "trainer.enable_progress_bar=false",
        "report=none",
    ],
    "evaluate.py": ["depth=3", "trainer.enable_progress_bar=false", "report=none"],
    "search.py": ["depth=10", "report=none"],
    "probe.py": [],
}


def blocks(page: str) -> list[tuple[str, list[str]]]:
    """Each bash block of a page: the paragraph before it, and its commands."""
    text = (ROOT / page).read_text(encoding="utf-8")
    result = []
    for match in re.finditer(r"```bash\n(.*?)```", text, re.S):
        before = text[: match.start()].rstrip().rsplit("\n\n", 1)[-1]
        lines = match.group(1).replace("\\\n", " ").splitlines()
        result.append((before, [line for line in lines if line.strip() and not line.startswith("#")]))
    return result


COMMANDS = [(before, command) for page in PAGES for before, commands in blocks(page) for command in commands]
OFFLINE = list(
    dict.fromkeys(
        command.split("  #")[0].strip()
        for before, command in COMMANDS
        if command.startswith("python ")
        and not re.search(r"network|GPU", before + command)
        and not command.startswith("python benchmarks/")
    )
)


def test_the_readme_promises_the_two_commands():
    commands = [command.split("  #")[0].strip() for _, command in COMMANDS]
    assert {"make demo", "make test", "python train.py"} <= {command.split(" #")[0].strip() for command in commands}
    for command in commands:
        if command.startswith("make "):
            assert re.search(rf"^{command.split()[1]}:", (ROOT / "Makefile").read_text(), re.M), command
        if command.startswith("python benchmarks/"):
            assert (ROOT / command.split()[1]).is_file(), command


@pytest.fixture(scope="module")
def done(forks, tmp_path_factory, small_files):
    """Results of all commands that need no network and no GPU, with small settings, run in one process."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "a.trec").write_text("".join(f"q{i} Q0 d{i} 1 1.0 t\n" for i in range(32, 40)))
    paths = {"DIR": str(small_files), "q.txt": str(small_files / "qrels.test.txt"), "b.trec": "a.trec"}
    commands = {}
    for number, command in enumerate(OFFLINE):
        script, *arguments = shlex.split(command)[1:]
        for name, path in paths.items():
            arguments = [re.sub(rf"(?<=[=]){re.escape(name)}$", path, argument) for argument in arguments]
        # the run folder of an earlier command
        arguments = [re.sub(r"(?<==)outputs/(\w+)/STAMP", r"@outputs/\1/*", argument) for argument in arguments]
        if "--help" not in arguments and not any(argument.startswith("run=") for argument in arguments):
            # the command's choices stay; all other settings become small
            chosen = {argument.split("=")[0] for argument in arguments}
            arguments += [part for part in TINY[script] if part.split("=")[0] not in chosen]
            if "checkpoint" in chosen:
                arguments = [argument for argument in arguments if argument != "encoder=tiny"]
            if not number:  # the first command uses the built-in collection
                arguments = [argument for argument in arguments if argument != "report=none"] + ["name=builtin"]
            elif "data" not in chosen and (script == "train.py" or "checkpoint" not in chosen):
                arguments += ["data=files", f"data.path={small_files}"]
            if "encoder=minilm" in arguments:
                arguments += ["depth=1", "val_depth=1"]
        commands[command] = [script, *arguments]
    return run_all(commands, folder, forks=forks)


@pytest.mark.parametrize("command", OFFLINE)
def test_a_command_of_the_pages_runs(command, done):
    result = done[command]
    assert result["code"] == 0, result["out"][-3000:]
    if "--help" in command:
        assert "save_every_steps" in result["out"]
    elif "split=null" not in command:
        assert any(path.endswith(("/metrics.json", "/probe_results.csv")) for path in result["left"]), result["left"]
