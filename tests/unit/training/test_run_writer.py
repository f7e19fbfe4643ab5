"""Files of a run folder: the bytes of a JSON file, and what the record of the environment says."""

import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from importlib import metadata
from pathlib import Path

import torch

from ranker.training.run_writer import environment, write_json

ROOT = Path(__file__).resolve().parents[3]


def test_a_json_file_is_text_that_people_read(tmp_path):
    write_json(tmp_path / "a.json", {"query": "Äpfel", "depth": 3})
    assert (tmp_path / "a.json").read_bytes() == '{\n  "query": "Äpfel",\n  "depth": 3\n}\n'.encode()


def test_the_environment_of_this_process():
    found = environment(17)
    assert abs(datetime.fromisoformat(found["time"]) - datetime.now(UTC)) < timedelta(minutes=1)
    assert found["command"] == [sys.executable, *sys.argv] and found["seed"] == 17
    assert found["python"] == ".".join(map(str, sys.version_info[:3])) and found["cpus"] == os.cpu_count()
    assert found["packages"]["torch"] == metadata.version("torch") and found["threads"] == torch.get_num_threads()
    assert len(found["gpus"]) == torch.cuda.device_count() and found["cuda"] == torch.version.cuda
    assert not {"time", "command", "seed", "python", "platform", "cpus", "packages", "git"} - set(found)


def test_the_revision_of_the_source():
    git = ["git", "-C", str(ROOT)]
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    changed = subprocess.run([*git, "diff", "--quiet", "HEAD"], capture_output=True, check=False).returncode
    expected = head.stdout.strip() + ("-dirty" if changed else "") if (ROOT / ".git").exists() else None
    assert environment(0)["git"] == expected
