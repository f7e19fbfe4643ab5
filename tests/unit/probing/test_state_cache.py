"""States on disk equal those of a direct forward pass; caching resumes; files that contradict their metadata fail."""

import json
import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.testing import assert_close
from transformers import BertModel

from ranker.encoders.encoder import Encoder
from ranker.encoders.loading import load_encoder
from ranker.encoders.tiny import tiny_config, tiny_tokenizer
from ranker.errors import ConfigError, DataError
from ranker.probing import state_cache
from ranker.probing.sequences import Sequences
from ranker.probing.state_cache import StateCache
from ranker.probing.state_readers import TensorStates, quantised
from ranker.probing.subject import Subject, encoder_fingerprint

CPU = torch.device("cpu")
TOKENIZER = tiny_tokenizer()
PAIRS = [(f"query number {i}", "some words of a doc " * (i % 5 + 1)) for i in range(20)] + [("", "alone")]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """One thread, so that chunks are computed one after another; a test may set more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def subject(seed: int = 0, dropout: float = 0.1, name: str = "tiny") -> Subject:
    torch.manual_seed(seed)
    config = tiny_config()
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = dropout
    return Subject(name, Encoder(BertModel(config, add_pooling_layer=False), TOKENIZER))


def sequences(reads: str = "pairs") -> Sequences:
    return Sequences.of(PAIRS, TOKENIZER, reads, 512, 64, 256)


def dying(monkeypatch: pytest.MonkeyPatch, *at: int) -> list[int]:
    """Interrupt the encoder at these calls, counted from 1; returns a list that collects the rows of each call."""
    calls: list[int] = []
    real = Encoder.layers

    def layers(self, batch):
        calls.append(batch.num_rows)
        if len(calls) in at:
            raise KeyboardInterrupt
        return real(self, batch)

    monkeypatch.setattr(Encoder, "layers", layers)
    return calls


@pytest.mark.parametrize("reads", ["pairs", "texts"])
@pytest.mark.parametrize("mode", [True, False])
def test_cached_states_are_those_of_a_direct_forward(tmp_path: Path, reads: str, mode: bool) -> None:
    """Against transformers' own padded forward in evaluation mode, also where the owner switches to training mode."""
    who, made = subject(), sequences(reads)
    who.frozen.train(mode)
    states = StateCache(tmp_path, dtype="float32", max_tokens=100).states(who, made, [0, 1, 2], CPU).data
    model = who.encoder.model.eval()
    for query, doc in PAIRS[:3] + PAIRS[-1:]:
        number = PAIRS.index((query, doc))
        if reads == "pairs":
            inputs = TOKENIZER(*((query, doc) if query else (doc,)), return_tensors="pt")
        else:
            inputs = TOKENIZER(doc, return_tensors="pt")
        with torch.no_grad():
            direct = model(**inputs, output_hidden_states=True).hidden_states
        row = made.pair_rows[number, 1]
        own = slice(made.starts[row], made.starts[row + 1])
        for layer in range(3):
            assert_close(states[layer, own], direct[layer][0], rtol=0, atol=2e-6)


def test_half_precision_is_the_rounded_states(tmp_path: Path) -> None:
    who, made = subject(), sequences()
    exact = StateCache(tmp_path, dtype="float32").states(who, made, [0, 1, 2], CPU).data
    half = StateCache(tmp_path, dtype="float16").states(who, made, [0, 1, 2], CPU).data
    assert_close(half, exact.half(), rtol=1e-3, atol=1e-6)
    some = StateCache(tmp_path, dtype="float32").states(who, made, [2], CPU).data
    assert_close(some[0], exact[2], rtol=0, atol=0)


def test_int8_is_the_nearest_of_255_steps_of_a_tokens_largest_number(tmp_path: Path) -> None:
    whole, scales = quantised(torch.tensor([[1.27, -0.64, 0.004], [0.0, 0.0, 0.0], [-254.0, 3.1, 1.0]]))
    assert whole.tolist() == [
        [127, -64, 0],
        [0, 0, 0],
        [-127, 2, 0],
    ]  # 3.1 is 1.55 steps of 2, and half a step goes to the even one
    assert scales[[0, 2]].tolist() == pytest.approx([0.01, 2.0])
    who, made = subject(), sequences()
    exact = StateCache(tmp_path, dtype="float32").states(who, made, [0, 1, 2], CPU)
    small = StateCache(tmp_path, dtype="int8").states(who, made, [0, 1, 2], CPU)
    assert small.nbytes == exact.nbytes / 4 + 4 * 3 * made.num_tokens
    tokens = torch.tensor([[3, 0], [7, made.num_tokens - 1]])
    for layers in ([0, 1, 2], [1], [2, 0]):
        read, right = small.gather(layers, tokens), exact.gather(layers, tokens)
        assert ((read - right).abs() <= right.abs().amax(-1, keepdim=True) / 254 * 1.0001).all()
    again = pickle.loads(pickle.dumps(small))
    assert torch.equal(again.gather([1], tokens), small.gather([1], tokens)), "another process maps the scales, too"
    (folder,) = (path.parent for path in tmp_path.glob("*/scales.bin"))
    (folder / "scales.bin").write_bytes(b"")
    with pytest.raises(DataError, match=r"scales\.bin: expected"):
        StateCache(tmp_path, dtype="int8").states(who, made, [0, 1, 2], CPU)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_only_some_tokens_are_kept_and_a_killed_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    who, made = subject(), sequences()
    kept = np.arange(made.num_tokens) % 5 < 2
    kept[: made.starts[3]] = False  # whole rows are left out
    whole = StateCache(tmp_path / "all", dtype=dtype, max_tokens=100).states(who, made, [0, 2], CPU)
    calls = dying(monkeypatch, 5)
    cache = StateCache(tmp_path / "spans", dtype=dtype, max_tokens=100, tokens="spans", sync_seconds=0)
    with pytest.raises(KeyboardInterrupt):
        cache.states(who, made, [0, 2], CPU, kept)
    some = cache.states(who, made, [0, 2], CPU, kept)
    assert len(calls) == 5 + len(made.chunks(100)) - 4, "only the rest was computed"
    assert some.data.shape == (2, kept.sum(), 32)
    assert torch.equal(
        some.gather([0, 1], torch.arange(int(kept.sum()))), whole.gather([0, 1], torch.from_numpy(kept.nonzero()[0]))
    )  # fmt: skip
    assert cache.identity(who, made, [0, 2], kept) != cache.identity(who, made, [0, 2], ~kept)


def test_progress_of_a_file_that_is_gone_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    who, made = subject(), sequences()
    whole = StateCache(tmp_path / "whole", dtype="int8", max_tokens=100).states(who, made, [0, 2], CPU)
    dying(monkeypatch, 5, 7)
    with pytest.raises(KeyboardInterrupt):  # with progress noted
        StateCache(tmp_path / "killed", dtype="int8", max_tokens=100, sync_seconds=0).states(who, made, [0, 2], CPU)
    next((tmp_path / "killed").glob("*/scales.bin")).unlink()
    cache = StateCache(tmp_path / "killed", dtype="int8", max_tokens=100, sync_seconds=1000)
    with pytest.raises(KeyboardInterrupt):  # before any is
        cache.states(who, made, [0, 2], CPU)
    again = cache.states(who, made, [0, 2], CPU)
    assert torch.equal(again.data, whole.data)
    assert torch.equal(again.scales, whole.scales)


def test_a_file_larger_than_memory_can_be_mapped(tmp_path: Path) -> None:
    pages = 2 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // (2 * 4096)
    with (tmp_path / "states.bin").open("wb") as file:
        file.truncate(pages * 4096 * 2)  # without a block on the disk
    mapped = TensorStates.mapped(tmp_path / "states.bin", "float16", (1, pages, 4096))
    assert mapped.gather([0], torch.tensor([pages - 1])).abs().sum() == 0


def test_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    who, made = subject(), sequences()
    StateCache(tmp_path).states(who, made, [0, 1, 2], CPU)
    monkeypatch.setattr(Encoder, "layers", lambda *_: pytest.fail("the encoder ran again"))
    StateCache(tmp_path).states(subject(name="other name, same weights"), made, [0, 1, 2], CPU)
    with pytest.raises(pytest.fail.Exception):
        StateCache(tmp_path).states(subject(seed=1), made, [0, 1, 2], CPU)


def test_a_killed_run_goes_on_and_ends_with_the_same_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    who, made = subject(), sequences()
    whole = StateCache(tmp_path / "whole", max_tokens=100).states(who, made, [0, 1, 2], CPU).data
    calls = dying(monkeypatch, 4)
    cache = StateCache(tmp_path / "killed", max_tokens=100, sync_seconds=0)
    with pytest.raises(KeyboardInterrupt):
        cache.states(who, made, [0, 1, 2], CPU)
    (folder,) = (path for path in (tmp_path / "killed").iterdir() if path.is_dir())
    assert not (folder / "meta.json").exists(), "nothing that looks finished"
    assert json.loads((folder / "progress.json").read_text())["done"] == 3
    resumed = cache.states(who, made, [0, 1, 2], CPU).data
    assert len(calls) == 4 + len(made.chunks(100)) - 3, "only the rest was computed"
    assert torch.equal(resumed, whole)


def test_chunks_side_by_side_give_the_same_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    who, made = subject(), sequences()
    alone = StateCache(tmp_path / "alone", dtype="float32", max_tokens=100).states(who, made, [0, 1, 2], CPU).data
    torch.set_num_threads(3)
    beside = StateCache(tmp_path / "beside", dtype="float32", max_tokens=100).states(who, made, [0, 1, 2], CPU).data
    assert torch.equal(beside, alone), "each chunk has one thread in both"
    assert torch.get_num_threads() == 3
    real, fifth = Encoder.layers, [made.batch(*made.chunks(100)[4]).tokens]

    def dies(self, batch):
        if fifth and batch.tokens.equal(fifth[0]):
            fifth.clear()
            raise KeyboardInterrupt
        return real(self, batch)

    monkeypatch.setattr(Encoder, "layers", dies)
    cache = StateCache(tmp_path / "killed", dtype="float32", max_tokens=100, sync_seconds=0)
    with pytest.raises(KeyboardInterrupt):
        cache.states(who, made, [0, 1, 2], CPU)
    noted = [json.loads(path.read_text())["done"] for path in (tmp_path / "killed").glob("*/progress.json")]
    assert not noted or noted[0] <= 4, "chunks in flight beyond the one that died do not count"
    assert torch.equal(cache.states(who, made, [0, 1, 2], CPU).data, alone)
    with torch.no_grad():
        who.encoder.model.encoder.layer[1].output.LayerNorm.weight.fill_(torch.nan)
    with pytest.raises(DataError, match="layer 2"):
        StateCache(tmp_path / "wrong", max_tokens=100).states(Subject("nan", who.encoder), made, [0, 1, 2], CPU)
    assert torch.get_num_threads() == 3


def test_refused_when_a_hash_differs(tmp_path: Path) -> None:
    who, made, cache = subject(), sequences(), StateCache(tmp_path)
    cache.states(who, made, [0, 1, 2], CPU)
    (meta,) = tmp_path.glob("*/meta.json")
    content = json.loads(meta.read_text())
    for key, value in (
        ("subject", "0" * 32),
        ("sequences", "0" * 32),
        ("layers", [0]),
        ("mode", "train"),
        ("complete", False),
    ):
        meta.write_text(json.dumps({**content, key: value}))
        with pytest.raises(DataError, match=f"expected {key}"):
            cache.states(who, made, [0, 1, 2], CPU)
    meta.write_text(json.dumps(content))
    states = meta.with_name("states.bin")
    states.write_bytes(states.read_bytes()[:-2])
    with pytest.raises(DataError, match=r"states\.bin: expected"):
        cache.states(who, made, [0, 1, 2], CPU)


def test_size_is_told_and_limited_before_writing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    who, made = subject(), sequences()
    size = 3 * made.num_tokens * 32 * 2
    with pytest.raises(ConfigError, match=r"cache\.dtype: expected one of float16, float32, int8; got 'float8'"):
        StateCache(tmp_path, dtype="float8")
    with caplog.at_level("INFO"), pytest.raises(ConfigError, match=r"cache\.max_bytes"):
        StateCache(tmp_path, max_bytes=size - 1).states(who, made, [0, 1, 2], CPU)
    assert f"{made.num_rows} sequences ({made.num_tokens} tokens)" in caplog.text
    assert not list(tmp_path.glob("*/states.bin"))
    StateCache(tmp_path, max_bytes=size).states(who, made, [0, 1, 2], CPU)
    assert next(tmp_path.glob("*/states.bin")).stat().st_size == size


def test_states_that_half_precision_cannot_hold_are_refused(tmp_path: Path) -> None:
    who = subject()
    with torch.no_grad():
        who.encoder.model.encoder.layer[1].output.LayerNorm.weight.fill_(1e6)
    with pytest.raises(DataError, match=r"layer 2 .*cache\.dtype=float32"):
        StateCache(tmp_path).states(who, sequences(), [0, 1, 2], CPU)
    StateCache(tmp_path, dtype="float32").states(who, sequences(), [0, 1, 2], CPU)


def test_fingerprint_changes_with_weights_and_tokenizer_alone() -> None:
    first, same, other = subject(), subject(), subject(seed=1)
    assert first.fingerprint == same.fingerprint != other.fingerprint
    with torch.no_grad():
        same.encoder.model.embeddings.word_embeddings.weight[7, 3] += 1e-3
    assert encoder_fingerprint(same.encoder) != first.fingerprint


def test_random_weights_have_the_same_shape_and_depend_on_the_seed() -> None:
    who = Subject("tiny", load_encoder("tiny"))
    before = {name: weight.clone() for name, weight in who.encoder.model.state_dict().items()}
    one, again, other = who.randomised(0), who.randomised(0), who.randomised(1)
    assert one.fingerprint == again.fingerprint != other.fingerprint
    for name, weight in who.encoder.model.state_dict().items():
        assert torch.equal(weight, before[name]), "the subject itself stays"
        drawn = one.encoder.model.state_dict()[name]
        assert drawn.shape == weight.shape
        if weight.ndim == 2:
            assert drawn.std() == pytest.approx(0.02, rel=0.05 + 3 / drawn.numel() ** 0.5)
            assert not torch.equal(drawn, weight)
        elif "LayerNorm.weight" in name:
            assert torch.equal(drawn, torch.ones_like(drawn))


def test_progress_of_another_cut_is_not_believed(tmp_path: Path) -> None:
    who, made = subject(), sequences()
    cache = StateCache(tmp_path, max_tokens=100, sync_seconds=0)
    whole = np.array(cache.states(who, made, [0, 1, 2], CPU).data)
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    (folder / "meta.json").unlink()
    (folder / "progress.json").write_text(json.dumps({"chunks": 3, "max_tokens": 50, "done": 2}))
    (folder / "states.bin").write_bytes(bytes((folder / "states.bin").stat().st_size))
    assert np.array_equal(np.array(cache.states(who, made, [0, 1, 2], CPU).data), whole)
    assert state_cache.FORMAT == 1
