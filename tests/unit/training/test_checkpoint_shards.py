"""Checkpoints in parts: read as one, refused if parts are missing or of other steps, linked and removed together."""

import pytest
import torch

from ranker.errors import CheckpointError
from ranker.training.checkpoint_files import WholeFiles, fault, link, read_checkpoint
from ranker.training.checkpoint_shards import as_part, part_of

WEIGHT, MOMENT = torch.arange(10.0).reshape(5, 2), torch.arange(5.0)


def write(path, step=7, parts=2, missing=()):
    """Write a checkpoint of two devices; the second has the last two rows."""
    for number in range(parts):
        rows = slice(0, 3) if number == 0 else slice(3, 5)
        content = {
            "global_step": step,
            "state_dict": {"weight": WEIGHT[rows], "step": torch.tensor(4)},
            "optimizer_states": [{"state": {0: {"exp_avg": MOMENT[rows]}}, "param_groups": [{"params": [0]}]}],
            "loops": {"position": 3},
        }
        sharded = ["/state_dict/weight", "/optimizer_states/0/state/0/exp_avg"]
        if number not in missing:
            WholeFiles().save_checkpoint(as_part(content, number, 2, sharded), part_of(path, number))


def test_parts_are_read_as_one(tmp_path):
    write(tmp_path / "last.ckpt")
    content = read_checkpoint(tmp_path / "last.ckpt")
    assert torch.equal(content["state_dict"]["weight"], WEIGHT)
    assert content["state_dict"]["step"] == 4
    assert torch.equal(content["optimizer_states"][0]["state"][0]["exp_avg"], MOMENT)
    assert content["loops"] == {"position": 3} and "shards" not in content
    assert "loops" not in torch.load(tmp_path / "last.ckpt.1", weights_only=True)


def test_parts_that_do_not_belong_together_are_a_fault(tmp_path):
    write(tmp_path / "last.ckpt", missing=(1,))
    assert fault(tmp_path / "last.ckpt") == "1 of 2 parts"
    with pytest.raises(CheckpointError, match="expected a whole checkpoint, got 1 of 2 parts"):
        read_checkpoint(tmp_path / "last.ckpt")
    write(tmp_path / "last.ckpt")
    write(tmp_path / "last.ckpt", step=8, missing=(0,))
    assert fault(tmp_path / "last.ckpt") == "parts of different steps"
    write(tmp_path / "last.ckpt")
    part = tmp_path / "last.ckpt.1"
    part.write_bytes(part.read_bytes()[:-100])
    assert "broken" in fault(tmp_path / "last.ckpt")


def test_parts_are_linked_and_removed_together(tmp_path):
    write(tmp_path / "last.ckpt")
    link(tmp_path / "last.ckpt", tmp_path / "previous.ckpt")
    write(tmp_path / "last.ckpt", step=8)
    assert read_checkpoint(tmp_path / "previous.ckpt")["global_step"] == 7
    assert read_checkpoint(tmp_path / "last.ckpt")["global_step"] == 8
    WholeFiles().remove_checkpoint(tmp_path / "last.ckpt")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["previous.ckpt", "previous.ckpt.1"]
