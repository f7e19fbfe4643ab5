"""What is removed of a run that ends with a mistake, and what its model overwrites."""

import pytest
from omegaconf import OmegaConf

from ranker import run_folder
from ranker.checkpoint import load_scorer, save_model
from ranker.encoders.loading import load_encoder
from ranker.errors import CheckpointError, ConfigError
from ranker.models.monobert import MonoBERT
from ranker.retrieval.vector_folder import Description, claim


def begin(folder, *more: str):
    """A run folder with what each run writes, and more."""
    run_folder.note(folder)
    folder.mkdir(exist_ok=True)
    for name in (*run_folder.WRITTEN, *more):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


def test_a_run_without_results_leaves_nothing(tmp_path):
    folder = begin(tmp_path / "run")
    run_folder.discard(folder)
    assert not folder.exists()


def test_a_folder_that_was_there_stays(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    run_folder.discard(begin(folder))
    assert folder.is_dir() and not list(folder.iterdir())


@pytest.mark.parametrize(
    "kept",
    [
        "nonfinite/step-1/dump.json",
        "wandb/offline-run/run.wandb",
        "tensorboard/events",
        "negatives.trec",
        "search.json",
        "x",
    ],
)
def test_a_run_that_left_anything_else_stays_whole(tmp_path, kept):
    folder = begin(tmp_path / "run", kept)
    run_folder.discard(folder)
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} == {
        *run_folder.WRITTEN,
        kept,
    }


def test_an_unused_folder_is_new_or_empty(tmp_path):
    run_folder.check_unused("key", tmp_path / "new")
    run_folder.check_unused("key", tmp_path)
    for name in "abcde":
        (tmp_path / name).touch()
    with pytest.raises(
        ConfigError,
        match=r"^key: expected a new or an empty folder, got .*, which contains a, b, c and 2 more; name another$",
    ):
        run_folder.check_unused("key", tmp_path)
    run_folder.check_unused("key", tmp_path, "abcde")
    with pytest.raises(ConfigError, match="got the file"):
        run_folder.check_unused("key", tmp_path / "a")


def configuration() -> dict:
    encoder = {
        "_target_": "ranker.encoders.loading.load_encoder",
        "name": "tiny",
        "fused": False,
        "graphs": False,
        "compile": False,
        "attention": "library",
    }
    model = {"_target_": "ranker.models.monobert.MonoBERT"}
    return {
        "model": model,
        "encoder": encoder,
        "data": None,
        "max_query_tokens": 9,
        "max_doc_tokens": 9,
        "max_pair_tokens": 20,
        "depth": 5,
    }


def test_a_model_is_written_to_an_unused_folder_and_comes_back_as_it_was(tmp_path):
    cfg, scorer = OmegaConf.create(configuration()), MonoBERT(load_encoder("tiny"))
    save_model(tmp_path / "model", scorer, cfg)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    encoder = load_scorer(tmp_path / "model").encoder
    execution = encoder.execution
    assert (execution.fused, execution.graphs, execution.compile, execution.attention) == (
        False,
        False,
        False,
        "library",
    )
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.tex").touch()
    with pytest.raises(CheckpointError, match="expected a new or an empty folder to write the model to"):
        save_model(tmp_path / "mine", scorer, cfg)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.tex"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "model"]


def test_vectors_are_written_to_an_unused_folder(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ConfigError, match=r"encode\.folder: expected a new or an empty folder"):
        claim(tmp_path, Description("s", "d", 1, "dot", 4, False, "float32", "32-true", 9, 10))
    assert not (tmp_path / "encoded.json").exists()
