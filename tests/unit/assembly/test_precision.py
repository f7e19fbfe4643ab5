"""The precision that a run chooses if none is configured, and the precisions that are refused."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from transformers import AutoModel, DebertaConfig

from ranker.assembly import precision
from ranker.assembly.precision import checked_precision, chosen, cpu_has_bf16, times
from ranker.assembly.reranker import Reranker
from ranker.assembly.trainer import fabric_options, trainer_options
from ranker.config.shared_keys import TrainerConfig
from ranker.data.scorer_inputs import TextLimits
from ranker.encoders.encoder import Encoder
from ranker.encoders.tiny import tiny_tokenizer
from ranker.errors import ConfigError
from ranker.models.monobert import MonoBERT

WIDE = SimpleNamespace(dim=384, ragged=True, path="bert", why_float32="")


def trainer(**values):
    return OmegaConf.to_container(OmegaConf.structured(TrainerConfig)) | {"accelerator": "cpu"} | values


@pytest.fixture
def bf16_cpu(monkeypatch):
    """A CPU with bfloat16 instructions, on which bfloat16 takes 10 ms and float32 30 ms."""
    monkeypatch.setattr(precision, "cpu_has_bf16", lambda: True)
    monkeypatch.setattr(precision, "times", lambda width: (0.03, 0.01))


def test_a_cpu_takes_bf16_where_a_measurement_gains(bf16_cpu, monkeypatch):
    took = "a layer's products take 10.0 ms in bfloat16 and 30.0 ms in float32"
    assert chosen(trainer(), WIDE) == ("bf16-mixed", took)
    monkeypatch.setattr(precision, "times", lambda width: (0.011, 0.010))
    assert chosen(trainer(), WIDE)[0] == "32-true"


@pytest.mark.usefixtures("bf16_cpu")
@pytest.mark.parametrize(
    ("values", "encoder", "reason"),
    [
        ({}, {"dim": 128}, "states of 128 numbers gain little"),
        ({}, {"ragged": False, "path": "by_length"}, "on the path by_length attention is torch's"),
        ({}, {"why_float32": "its code overflows"}, "its code overflows"),
        ({"accelerator": "cuda"}, {"why_float32": "its code overflows"}, "its code overflows"),
        ({"num_nodes": 2}, {}, "another program started several processes"),
        ({"accelerator": "mps"}, {}, "the device is mps"),
    ],
)
def test_float32_without_a_measurement(values, encoder, reason):
    value, why = chosen(trainer(**values), SimpleNamespace(**(vars(WIDE) | encoder)))
    assert value == "32-true" and why.startswith(reason)


@pytest.mark.usefixtures("bf16_cpu")
def test_processes_of_another_program_agree(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert chosen(trainer(), WIDE)[0] == "bf16-mixed"
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert chosen(trainer(), WIDE)[0] == "32-true"


@pytest.mark.parametrize("configured", ["bf16-mixed", "bf16-true", "bf16"])
def test_bf16_is_refused_where_the_cpu_has_none(monkeypatch, configured):
    options = trainer(precision=configured, devices=1)
    monkeypatch.setattr(precision, "cpu_has_bf16", lambda: True)
    assert checked_precision(options) == configured
    monkeypatch.setattr(precision, "cpu_has_bf16", lambda: False)
    expected = (
        "trainer.precision: expected 32-true, because this CPU has no bfloat16 arithmetic (AVX512-BF16 or AMX); "
        f"got {configured}; set trainer.precision=32-true"
    )
    for build in (trainer_options, fabric_options):
        with pytest.raises(ConfigError) as error:
            build(OmegaConf.create({"trainer": options}))
        assert str(error.value) == expected
    assert chosen(trainer(), WIDE) == ("32-true", precision.NO_BF16)
    assert checked_precision(trainer(precision="64-true")) == "64-true"


def test_the_measurement_takes_time_and_draws_no_random_number():
    state = torch.get_rng_state()
    single, half = times(64)
    assert 0 < single < 5 and 0 < half < 5
    assert torch.equal(torch.get_rng_state(), state)


def test_the_cpu_is_what_the_kernel_says():
    """torch, which asks the processor itself, reports the instructions that Linux lists."""
    if not Path("/proc/cpuinfo").is_file():
        pytest.skip("needs Linux's list of the processor's instructions")
    with Path("/proc/cpuinfo").open() as lines:
        flags = next((line.split() for line in lines if line.startswith("flags")), None)
    if flags is None:
        pytest.skip("this processor's instructions are not in /proc/cpuinfo under this name (not x86)")
    assert cpu_has_bf16() == bool({"amx_bf16", "avx512_bf16"} & set(flags))


def test_a_half_precision_in_which_the_family_fails_is_refused(tmp_path):
    encoder = SimpleNamespace(why_float32="its code overflows", config=SimpleNamespace(model_type="deberta"))
    cfg = OmegaConf.create({"trainer": trainer(precision="bf16-mixed")})
    with pytest.raises(ConfigError) as caught:
        precision.settle_precision(cfg, tmp_path, encoder)
    assert str(caught.value) == (
        "trainer.precision: expected 32-true for deberta, because its code overflows; got bf16-mixed"
    )
    assert not list(tmp_path.iterdir())


def test_a_reranker_refuses_a_half_precision_in_which_the_family_fails():
    config = DebertaConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, relative_attention=True)
    scorer = MonoBERT(Encoder(AutoModel.from_config(config), tiny_tokenizer()), head="own")
    for refused in ("bf16-mixed", "bf16-true"):
        with pytest.raises(ConfigError, match=f"expected 32-true for deberta, because .*; got {refused}$"):
            Reranker(scorer, TextLimits(8, 8), accelerator="cpu", precision=refused)
    assert Reranker(scorer, TextLimits(8, 8), accelerator="cpu").precision == "32-true"
