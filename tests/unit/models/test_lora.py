"""LoRA: the same scores as peft's own models, adapters alone in files, and no other base."""

import copy
import json
from dataclasses import replace

import peft
import pytest
import torch
from hydra import compose, initialize_config_dir
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from ranker.assembly.scorer import build_scorer
from ranker.checkpoint import load_scorer, save_merged, save_model
from ranker.cli import entry
from ranker.config.roots import CONF
from ranker.encoders.loading import load_encoder
from ranker.encoders.lora import LoRA
from ranker.encoders.lora_base import base_fingerprint, base_names
from ranker.errors import CheckpointError, ConfigError
from ranker.export.language_model import write_classifier
from ranker.models.lm_reranker import LMReranker
from ranker.models.monobert import MonoBERT
from tests.unit.models.test_lm_reranker import batch_of, filled_rows, folder_of, scores


def cfg_of(*overrides):
    entry.register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("train", ["lora=default", "name=x", *overrides])


def lm_cfg(base, *more):
    return cfg_of("model=lm_reranker", "encoder=tiny_lm", f"encoder.name={base}", "encoder.pretrained=true", *more)


def trained(scorer, steps=3, rate=0.05):
    """The scorer after some steps on the prompts of the tests."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW([weight for weight in scorer.parameters() if weight.requires_grad], lr=rate)
    rows = filled_rows(scorer) if hasattr(scorer, "words") else None
    for _ in range(steps):
        optimizer.zero_grad()
        batch = batch_of(rows or PLAIN)
        (scorer(batch)[0, 0] - scorer(batch)[1, 0]).backward()
        optimizer.step()
    return scorer


PLAIN = [torch.tensor([2, 9, 12, 3, 20, 21, 3]), torch.tensor([2, 7, 3, 8, 9, 10, 11, 3])]


@pytest.mark.parametrize("base_type", ["float32", "bfloat16"])
def test_a_language_model_s_folder_is_peft_s_and_its_merged_one_transformers(base_type, tmp_path):
    cfg = lm_cfg(folder_of(tmp_path / "base"), f"encoder.lora.base={base_type}")
    scorer = build_scorer(cfg)
    before = scores(scorer)
    assert all(weight.requires_grad == ("lora_" in name) for name, weight in scorer.named_parameters())
    trained(scorer)
    expected = scores(scorer)
    assert (expected - before).abs().max() > 0.1
    save_model(tmp_path / "model", scorer, cfg)
    save_merged(tmp_path / "merged", scorer, cfg)
    assert sum(file.stat().st_size for file in (tmp_path / "model").glob("*.safetensors")) < 80_000
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=getattr(torch, base_type))
    yes, no = scorer.word_ids
    models = {
        "adapter": peft.PeftModel.from_pretrained(base, tmp_path / "model"),
        "merged": AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32),
    }
    for name, model in models.items():
        with torch.no_grad():
            logits = torch.stack(
                [model(input_ids=row.unsqueeze(0)).logits[0, -1] for row in filled_rows(scorer)]
            ).float()
        bound = 1e-4 if base_type == "float32" else 0.1
        torch.testing.assert_close(logits[:, yes] - logits[:, no], expected, rtol=0, atol=bound, msg=name)
    assert torch.equal(scores(load_scorer(tmp_path / "model")), expected)
    torch.testing.assert_close(scores(load_scorer(tmp_path / "merged")), expected, rtol=0, atol=bound)


def test_the_difference_of_the_words_rows_is_a_classifier(tmp_path):
    scorer = LMReranker(load_encoder(str(folder_of(tmp_path / "base")))).eval()
    write_classifier(tmp_path / "model", scorer.encoder, scorer.head.difference())
    whole = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model").eval()
    with torch.no_grad():
        theirs = torch.stack([whole(input_ids=row.unsqueeze(0)).logits[0, 0] for row in filled_rows(scorer)])
    torch.testing.assert_close(scores(scorer), theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("targets", ["attention", "mlp", "all-linear", ["query", "value"]])
def test_an_encoder_with_adapters(targets, tmp_path):
    """BERT runs through transformers' own forward, packed; its head is trained beside the adapters."""
    cfg = cfg_of("model=monobert", "encoder=tiny", f"encoder.lora.targets={targets}".replace("'", ""))
    torch.manual_seed(0)
    scorer = build_scorer(cfg)
    assert scorer.encoder.path == "packed"
    adapted = {
        name.split(".lora_")[0].rpartition("layer.0.")[2] for name, _ in scorer.named_parameters() if ".lora_A" in name
    }
    adapted = {name for name in adapted if "layer.1" not in name}
    attention = {"attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"}
    mlp = {"intermediate.dense", "output.dense"}
    named = {"attention.self.query", "attention.self.value"}
    wanted = {"attention": attention, "mlp": mlp, "all-linear": attention | mlp}
    assert adapted == (wanted[targets] if isinstance(targets, str) else named)
    assert "head.weight" in [name for name, weight in scorer.named_parameters() if weight.requires_grad]


def test_an_encoder_with_adapters_is_saved_with_its_head(tmp_path):
    base = tmp_path / "base"
    MonoBERT(load_encoder("tiny")).encoder.model.save_pretrained(base)
    load_encoder("tiny").tokenizer.save_pretrained(base)
    cfg = cfg_of("model=monobert", "encoder=tiny", f"encoder.name={base}", "encoder.pretrained=true")
    scorer = trained(build_scorer(cfg)).eval()
    with torch.no_grad():
        expected = scorer(batch_of(PLAIN))
    save_model(tmp_path / "model", scorer, cfg)
    save_merged(tmp_path / "merged", scorer, cfg)
    with torch.no_grad():
        assert torch.equal(load_scorer(tmp_path / "model").eval()(batch_of(PLAIN)), expected)
        merged = load_scorer(tmp_path / "merged").eval()
        torch.testing.assert_close(merged(batch_of(PLAIN)), expected, rtol=0, atol=1e-5)
    assert merged.encoder.path == "bert"


def test_dropout_of_adapters_does_not_depend_on_the_layout(tmp_path):
    encoder = load_encoder(str(folder_of(tmp_path)), lora=LoRA(dropout=0.5)).double()
    for name, weight in encoder.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.5)
    scorer = LMReranker(encoder, prompt="{query} : {doc} ?").double().train()
    encoder.dropout_seed = 7
    rows = [*PLAIN, torch.tensor([2, 30, 31])]
    whole = batch_of(rows).pairs
    together = encoder(replace(whole, row_ids=torch.tensor([4, 5, 6])))
    alone = torch.cat([
        encoder(replace(batch_of([row]).pairs, row_ids=torch.tensor([4 + i]))) for i, row in enumerate(rows)
    ])  # fmt: skip
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-12)
    encoder.dropout_seed = 8
    assert (encoder(replace(whole, row_ids=torch.tensor([4, 5, 6]))) - together).abs().max() > 1e-3
    scorer.eval()
    torch.testing.assert_close(encoder(whole), encoder.eval()(whole), rtol=0, atol=1e-12)


def peft_folder(tmp_path, base, model_class, task, **options):
    """A folder of peft's own, with weights that matter, and the model that wrote it."""
    torch.manual_seed(3)
    whole = model_class.from_pretrained(base, **options)
    model = peft.get_peft_model(whole, peft.LoraConfig(r=4, target_modules="all-linear", task_type=task))
    for weight in model.parameters():
        if weight.requires_grad:
            torch.nn.init.normal_(weight, std=0.3)
    model.save_pretrained(tmp_path / task)
    return tmp_path / task, model.eval()


def test_a_folder_of_peft_is_an_encoder_and_a_checkpoint(tmp_path):
    base = folder_of(tmp_path / "base")
    folder, model = peft_folder(tmp_path, base, AutoModelForCausalLM, "CAUSAL_LM")
    for scorer in (LMReranker(load_encoder(str(folder))), load_scorer(folder)):
        yes, no = scorer.word_ids
        with torch.no_grad():
            logits = torch.stack([model(input_ids=row.unsqueeze(0)).logits[0, -1] for row in filled_rows(scorer)])
        torch.testing.assert_close(scores(scorer), logits[:, yes] - logits[:, no], rtol=0, atol=1e-4)
    folder, model = peft_folder(tmp_path, base, AutoModelForSequenceClassification, "SEQ_CLS", num_labels=1)
    scorer = load_scorer(folder)
    with torch.no_grad():
        theirs = torch.stack([model(input_ids=row.unsqueeze(0)).logits[0, 0] for row in filled_rows(scorer)])
    torch.testing.assert_close(scores(scorer), theirs, rtol=0, atol=1e-4)


def test_an_adapter_for_another_base_is_refused(tmp_path):
    base = folder_of(tmp_path / "base")
    cfg = lm_cfg(base)
    save_model(tmp_path / "model", build_scorer(cfg), cfg)
    other = AutoModelForCausalLM.from_pretrained(base)
    other.model.layers[0].mlp.up_proj.weight.data += 1
    other.save_pretrained(base)
    with pytest.raises(
        CheckpointError, match=r"expected the base that the adapter was trained on, '.*', got other weights"
    ):
        load_scorer(tmp_path / "model")
    folder, _ = peft_folder(tmp_path, base, AutoModelForCausalLM, "CAUSAL_LM")
    config = copy.deepcopy(other.config)
    config.intermediate_size = 96
    folder_of(base, config)
    with pytest.raises(CheckpointError, match=r"expected an adapter for this base, got one for '.*': layers.0.mlp"):
        load_encoder(str(folder))
    stored = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(stored | {"peft_type": "IA3"}))
    with pytest.raises(CheckpointError, match=r"expected a LoRA adapter with .*, got 'IA3' of the model"):
        load_encoder(str(folder))


def test_the_fingerprint_of_a_base_does_not_depend_on_its_precision(tmp_path):
    folder = str(folder_of(tmp_path))
    prints = [base_fingerprint(load_encoder(folder, lora=LoRA(base=base, rank=rank))) for base, rank in
              (("float32", 4), ("bfloat16", 8))]  # fmt: skip
    assert prints[0] == prints[1] != ""
    assert base_fingerprint(load_encoder(folder)) == "" and base_names(load_encoder(folder)) == set()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, r"^encoder\.lora\.rank: expected at least 1, got 0$"),
        ({"alpha": 0.0}, r"^encoder\.lora\.alpha: expected a number above 0, got 0\.0$"),
        ({"dropout": 1.0}, r"^encoder\.lora\.dropout: expected at least 0 and below 1, got 1\.0$"),
        ({"base": "int4"}, r"^encoder\.lora\.base: expected one of float32, bfloat16, int8, nf4; got 'int4'$"),
        (
            {"targets": "all"},
            r"^encoder\.lora\.targets: expected attention, mlp, all-linear or a list of names, got 'all'$",
        ),
        ({"targets": ["q"]}, r"^encoder\.lora\.targets: expected names of linear layers \(dense, key, .*\), got q$"),
    ],
)
def test_faults_in_one_line(options, message):
    with pytest.raises(ConfigError, match=message):
        load_encoder("tiny", lora=LoRA(**options))
