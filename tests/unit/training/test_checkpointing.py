"""Checkpoint files are whole or not there, damage is seen, and reading one runs no code."""

import contextlib
import csv
import os
import signal
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from torch.utils.data import DataLoader

from ranker.errors import CheckpointError, Preempted
from ranker.training.checkpoint_files import WholeFiles, fault, to_resume_from
from ranker.training.checkpointing import SaveBest, SaveLast

STATE = {"state_dict": {"weight": torch.arange(1000.0)}, "global_step": 3}


def saved(folder, name="last.ckpt", step=3):
    WholeFiles().save_checkpoint(STATE | {"global_step": step}, folder / "checkpoints" / name)
    return folder / "checkpoints" / name


def test_a_checkpoint_replaces_the_one_before_which_stays(tmp_path):
    last = saved(tmp_path, step=1)
    WholeFiles().save_checkpoint(STATE | {"global_step": 2}, last, {"previous": last.with_name("previous.ckpt")})
    assert sorted(path.name for path in last.parent.iterdir()) == ["last.ckpt", "previous.ckpt"]
    assert WholeFiles().load_checkpoint(last)["global_step"] == 2
    assert WholeFiles().load_checkpoint(last.with_name("previous.ckpt"))["global_step"] == 1
    assert torch.equal(WholeFiles().load_checkpoint(last)["state_dict"]["weight"], torch.arange(1000.0))


def test_damage_is_seen_also_where_torch_reads_on(tmp_path):
    last = saved(tmp_path)
    assert fault(last) is None
    content = bytearray(last.read_bytes())
    at = content.find(torch.arange(1000.0).numpy().tobytes()[-400:])  # within the weight's own bytes
    content[at] ^= 0xFF
    last.write_bytes(content)
    assert not torch.equal(
        torch.load(last, weights_only=True)["state_dict"]["weight"], torch.arange(1000.0)
    )  # torch says nothing
    assert "is damaged" in fault(last)
    last.write_bytes(content[: len(content) // 2])
    assert fault(last).startswith(f"a broken one of {len(content) // 2} bytes")
    last.unlink()
    assert fault(last) == "no such file"


def test_the_one_before_serves_and_is_named(tmp_path, caplog):
    last, previous = saved(tmp_path), saved(tmp_path, "previous.ckpt")
    assert to_resume_from(tmp_path) == last
    assert not caplog.records
    last.write_bytes(b"PK")
    assert to_resume_from(tmp_path) == previous
    assert str(last) in caplog.text and f"going on from {previous}" in caplog.text
    previous.unlink()
    with pytest.raises(
        CheckpointError, match=r"last.ckpt: expected a whole checkpoint.*; .*previous.ckpt: .* got no such file"
    ):
        to_resume_from(tmp_path)
    last.unlink()
    with pytest.raises(CheckpointError, match="which a training writes while it runs, got no such file"):
        to_resume_from(tmp_path)


def test_a_checkpoint_runs_no_code(tmp_path):
    marker = tmp_path / "ran"

    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {marker}",)

    torch.save({"state_dict": Evil()}, tmp_path / "evil.ckpt")
    for weights_only in (None, False, True):  # whatever Lightning asks for
        with pytest.raises(CheckpointError, match="expected a checkpoint of tensors and plain values"):
            WholeFiles().load_checkpoint(tmp_path / "evil.ckpt", weights_only=weights_only)
    assert not marker.exists()


@pytest.mark.parametrize("moved", [False, True])
def test_pc77_the_best_so_far_goes_along(tmp_path, moved):
    first, second = (SaveBest(tmp_path / name, "val/nDCG@10", tmp_path / "elsewhere") for name in ("first", "second"))
    WholeFiles().save_checkpoint(STATE, tmp_path / "first/best.ckpt")
    first.best_model_path, first.best_model_score = str(tmp_path / "first/best.ckpt"), torch.tensor(0.5)
    state = first.state_dict()
    place = tmp_path / "first/best.ckpt"
    if moved:
        place = (tmp_path / "first").rename(tmp_path / "elsewhere") / "best.ckpt"
    second.load_state_dict(state)
    content = place.read_bytes()
    assert (tmp_path / "second/best.ckpt").read_bytes() == content
    assert second.best_model_path == str(tmp_path / "second/best.ckpt")
    assert not second.check_monitor_top_k(
        type("T", (), {"strategy": type("S", (), {"reduce_boolean_decision": lambda self, x: x})()})(),
        torch.tensor(0.4),
    )
    # a better one replaces the second run's file alone
    WholeFiles().save_checkpoint(STATE | {"global_step": 9}, tmp_path / "second/best.ckpt")
    assert place.read_bytes() == content


def test_a_damaged_best_is_sought_anew(tmp_path, caplog):
    first, second = (SaveBest(tmp_path / name, "val/nDCG@10") for name in ("first", "second"))
    (tmp_path / "first").mkdir()
    (tmp_path / "first/best.ckpt").write_bytes(b"half a file")
    first.best_model_path, first.best_model_score = str(tmp_path / "first/best.ckpt"), torch.tensor(0.5)
    second.load_state_dict(first.state_dict())
    assert second.best_model_path == "" and second.best_model_score is None
    assert "from now on, the best of the new ones is kept" in caplog.text


class Stagnant(pl.LightningModule):
    """A training without improvement that gets SIGTERM in a step, or in the validation after the step."""

    def __init__(self, sigterm_at: int | None = None, in_validation: bool = False) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.stop_asked = self.stop_agreed = False
        self.sigterm_at, self.in_validation = sigterm_at, in_validation
        self.validated: list[int] = []

    def _sigterm(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    def training_step(self, batch):
        if self.global_step + 1 == self.sigterm_at and not self.in_validation:
            self._sigterm()
        return self.layer(batch).sum()

    def validation_step(self, batch, index):
        if self.global_step == self.sigterm_at and self.in_validation and index == 0:
            self._sigterm()
        self.validated.append(index)
        self.log("quality", 0.0)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Noted(WholeFiles):
    """Checkpoint files as a training writes them, and the step of each."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []

    def save_checkpoint(self, checkpoint, path, storage_options=None) -> None:
        super().save_checkpoint(checkpoint, path, storage_options)
        self.steps.append(checkpoint["global_step"])


def fit(folder, module, patience=1, **options):
    """Train three steps an epoch; returns the steps after which `last.ckpt` was written."""
    files = Noted()
    stopping = EarlyStopping("quality", mode="max", patience=patience, check_on_train_epoch_end=False)
    trainer = pl.Trainer(
        accelerator="cpu",
        callbacks=[stopping, SaveLast(folder / "last.ckpt", 1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=True,
        num_sanity_val_steps=0,
        default_root_dir=folder,
        plugins=[files],
        **options,
    )
    loader = DataLoader(torch.ones(3, 1))
    try:
        trainer.fit(module, loader, loader)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if files.steps:
            assert torch.load(folder / "last.ckpt", weights_only=True)["global_step"] == files.steps[-1]
    return files.steps


@pytest.mark.parametrize(("patience", "epochs"), [(0, 2), (1, 2), (2, 3)])
def test_pc2_01_early_stopping_of_patience_0_trains_until_a_validation_is_no_better(tmp_path, patience, epochs):
    assert fit(tmp_path, Stagnant(), patience, max_epochs=9) == list(range(1, 3 * epochs + 1))


def test_early_stopping_that_has_to_wait_still_saves_each_step(tmp_path):
    # the second validation would end it; two epochs more have to be done
    saved = fit(tmp_path, Stagnant(), max_epochs=9, min_epochs=4)
    assert saved == list(range(1, 13))


def test_early_stopping_that_has_to_wait_still_hears_sigterm(tmp_path):
    module = Stagnant(sigterm_at=8)
    with pytest.raises(Preempted, match="stopped by SIGTERM after step 8, which is saved"):
        fit(tmp_path, module, max_epochs=9, min_epochs=4)
    assert module.global_step == 8


def test_sigterm_in_a_validation_waits_for_its_end(tmp_path):
    module = Stagnant(sigterm_at=3, in_validation=True)
    with pytest.raises(Preempted, match="stopped by SIGTERM after step 3, which is saved"):
        fit(tmp_path, module, max_epochs=9)
    assert module.validated == [0, 1, 2]


class Counted(Stagnant):
    """Notes after which steps it was validated."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []

    def on_validation_start(self):
        self.steps.append(self.global_step)


def validated(folder, start=None, **options):
    """The steps that a training of three steps an epoch is validated after, and its last step."""
    module = Counted()
    trainer = pl.Trainer(
        accelerator="cpu",
        callbacks=[SaveLast(folder / "last.ckpt", 100)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=folder,
        plugins=[WholeFiles()],
        **options,
    )
    loader = DataLoader(torch.ones(3, 1))
    trainer.fit(module, loader, loader, ckpt_path=start, weights_only=True)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return module.steps, trainer.global_step


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"max_epochs": 1, "check_val_every_n_epoch": 5}, [3]),
        ({"max_epochs": 4, "check_val_every_n_epoch": 3}, [9, 12]),
        ({"max_epochs": 4, "check_val_every_n_epoch": 2}, [6, 12]),
        ({"max_epochs": 2, "val_check_interval": 2}, [2, 5, 6]),
        ({"max_epochs": 2, "val_check_interval": 4, "check_val_every_n_epoch": None}, [4, 6]),
        ({"max_epochs": -1, "max_steps": 4, "check_val_every_n_epoch": 5}, [4]),
        ({"max_epochs": 9, "max_steps": 7, "check_val_every_n_epoch": 2}, [6, 7]),
        ({"max_epochs": 2, "limit_train_batches": 2, "check_val_every_n_epoch": 9}, [4]),
        ({"max_epochs": 2}, [3, 6]),
        ({"max_epochs": 9, "max_steps": 1}, [1]),
    ],
)
def test_pc2_26_the_last_state_is_always_validated_and_only_once(tmp_path, options, steps):
    assert validated(tmp_path, **options) == (steps, steps[-1])
    again = validated(tmp_path / "again", tmp_path / "last.ckpt", **options)  # killed after its last checkpoint
    assert again == ([], steps[-1])


class Logged(Stagnant):
    """Logs the number of each step; notes at each checkpoint its step and how many batches were validated before it."""

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self.saved: list[tuple[int, int]] = []

    def training_step(self, batch):
        self.log("train/step", float(self.global_step + 1))
        return super().training_step(batch)

    def on_save_checkpoint(self, checkpoint):
        self.saved.append((self.global_step, len(self.validated)))


def rows(folder, module, start=None, **options):
    """Train three steps an epoch; returns step and value of the logged rows, also of a training that was stopped."""
    logger = CSVLogger(folder, name="", version="")
    trainer = pl.Trainer(
        accelerator="cpu", callbacks=[SaveLast(folder / "last.ckpt", 1)], logger=logger, log_every_n_steps=1,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0, plugins=[WholeFiles()],
        **options,
    )  # fmt: skip
    loader = DataLoader(torch.ones(3, 1))
    try:
        with contextlib.suppress(Preempted):
            trainer.fit(module, loader, loader, ckpt_path=start, weights_only=True)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with (folder / "metrics.csv").open() as file:
        return [(int(row["step"]), float(row["train/step"])) for row in csv.DictReader(file) if row["train/step"]]


def test_a_checkpoint_at_a_validation_is_written_after_it(tmp_path):
    module = Logged()
    rows(tmp_path, module, max_epochs=2)
    assert module.saved == [(1, 0), (2, 0), (3, 3), (4, 3), (5, 3), (6, 6)]


def test_a_step_that_was_saved_before_it_was_logged_is_logged_once_after_a_resume(tmp_path):
    before = rows(tmp_path / "first", Logged(2), max_epochs=2)
    after = rows(tmp_path / "second", Logged(), tmp_path / "first/last.ckpt", max_epochs=2)
    assert sorted({*before, *after}) == [(step, step + 1.0) for step in range(6)]
    assert len(before) + len(after) == 6


@pytest.mark.parametrize(
    ("environment", "rank", "code", "text"),
    [
        (LightningEnvironment(), 0, 75, "stopped by SIGTERM after step 4, which is saved"),
        (LightningEnvironment(), 1, 0, ""),  # the launcher would kill the first process for another code
        (TorchElasticEnvironment(), 1, 75, ""),
    ],
)
def test_the_exit_code_of_each_device_s_process_at_sigterm(tmp_path, environment, rank, code, text):
    strategy = SimpleNamespace(cluster_environment=environment)
    trainer = SimpleNamespace(strategy=strategy, local_rank=rank, global_rank=rank, global_step=4)
    saver = SaveLast(tmp_path / "run/checkpoints/last.ckpt", 1)
    with pytest.raises(Preempted) as stopped, saver.ends_at_sigterm(trainer):
        os.kill(os.getpid(), signal.SIGTERM)
    assert stopped.value.exit_code == code
    assert str(stopped.value).split(";")[0] == text
