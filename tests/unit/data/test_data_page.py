"""The commands of docs/data.md compose and pass the check of the configuration; what they load is tested with each source."""

import re
import shlex
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from ranker.config import check as config
from ranker.config import roots

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
COMMANDS = [
    line
    for block in re.findall(r"```\n(.*?)```", PAGE, re.DOTALL)
    for line in block.splitlines()
    if line.startswith("python ")
]


def test_the_page_shows_every_source():
    named = {word for command in COMMANDS for word in re.findall(r"data=(\w+)", command)}
    assert named == {path.stem for path in (ROOT / "conf" / "data").glob("[!_]*.yaml")}
    assert all(f"## {name}" in PAGE for name in named)


@pytest.mark.parametrize("command", COMMANDS)
def test_command_passes_the_check(command, tmp_path):
    script, *overrides = shlex.split(command, comments=True)[1:]
    assert (ROOT / script).is_file()
    overrides = [override.replace("RUN_FOLDER", str(tmp_path)).replace("DIR", str(tmp_path)) for override in overrides]
    roots.register()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = compose(Path(script).stem, overrides=["name=test", *overrides])
    config.check(cfg)


@pytest.mark.parametrize("option", sorted(set(re.findall(r"(?<!`)`'?(data\.[a-z_]+=\S[^`']*)'?`", PAGE))))
def test_options_named_in_the_text_exist(option):
    key = option.partition("=")[0].removeprefix("data.")
    assert any(
        re.search(rf"^{key}:", path.read_text(), re.MULTILINE) for path in (ROOT / "conf" / "data").glob("*.yaml")
    )
