"""No path of a machine and no user name gets into published files."""

import getpass
import json
from pathlib import Path

import pytest

from ranker.errors import DataError
from ranker.release.privacy import check_private, forget_origins, has_local, without_local


def test_origins_are_removed_and_other_keys_stay(tmp_path):
    content = {"_name_or_path": "/data/models/bert", "model_type": "bert", "name_or_path": "org/bert"}
    (tmp_path / "config.json").write_text(json.dumps(content))
    forget_origins(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == {"model_type": "bert", "name_or_path": "org/bert"}


@pytest.mark.parametrize("text", ["{run}/x", "at /home/{user}/data.", "C:\\Users\\{user}\\x", "{home}/y"])
def test_a_trace_is_named_with_its_file(text, tmp_path):
    folder = tmp_path / "published/evaluation"
    folder.mkdir(parents=True)
    filled = text.format(run=tmp_path / "run", user=getpass.getuser(), home=Path.home())
    (folder / "note.txt").write_text(f"a\n{filled}\n")
    with pytest.raises(DataError, match=r"^evaluation/note.txt: expected no path of this machine in a published file"):
        check_private(tmp_path / "published", [tmp_path / "run"])
    (folder / "note.txt").write_text("beir/scifact/test and /usr/share\n")
    check_private(tmp_path / "published", [tmp_path / "run"])


def test_local_paths_in_settings():
    settings = {"data": {"path": "/mnt/x/scifact", "ids": ["beir/scifact"]}, "encoder": {"name": "~/bert/"}}
    assert has_local(settings["data"]) and not has_local({"train": "beir/scifact"})
    assert without_local(settings) == {
        "data": {"path": "scifact", "ids": ["beir/scifact"]},
        "encoder": {"name": "bert"},
    }
