"""monoT5 and RankT5: scores in transformers from the saved folder, other forms of the output matrix, faults."""

import json

import pytest
import torch
from transformers import AutoTokenizer, T5Config, T5EncoderModel, T5ForConditionalGeneration

from ranker.assembly.reranker import Reranker
from ranker.checkpoint import load_scorer
from ranker.encoders.loading import load_encoder
from ranker.encoders.tiny import tiny_t5_config, tiny_t5_tokenizer
from ranker.errors import CheckpointError, ConfigError
from ranker.models.mono_t5 import DEFAULT_PROMPT, MonoT5
from ranker.training.soundness import check_scores
from tests.unit.models.test_lm_reranker import PAIRS, batch_of, filled_rows, scores


def folder_of(path, scaled=True, model_class=T5ForConditionalGeneration):
    """A folder of a random T5 as of 2019 (tied output matrix, scaled states), or as of version 1.1 and Flan-T5."""
    config = T5Config(**(tiny_t5_config().to_dict() | {"tie_word_embeddings": scaled}))
    torch.manual_seed(0)
    model = model_class(config)
    if not scaled:
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    for weight in model.parameters():
        weight.data += torch.randn_like(weight) * 0.2
    state = {name: value.contiguous() for name, value in model.state_dict().items()}
    model.save_pretrained(path, state_dict=state)
    if not scaled:  # as the folders of the hub say it
        stored = json.loads((path / "config.json").read_text())
        del stored["scale_decoder_outputs"]
        (path / "config.json").write_text(json.dumps(stored | {"tie_word_embeddings": False}))
    tiny_t5_tokenizer().save_pretrained(path)
    return path


def theirs(folder, words):
    """The scores of the filled prompts by transformers, each alone."""
    whole = T5ForConditionalGeneration.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = [tokenizer(word, add_special_tokens=False)["input_ids"][0] for word in words]
    found = []
    for query, doc in PAIRS:
        text = DEFAULT_PROMPT.replace("{query}", query).replace("{doc}", doc)
        with torch.no_grad():
            logits = whole(**tokenizer(text, return_tensors="pt"), decoder_input_ids=torch.tensor([[0]])).logits[0, 0]
        found.append(logits[ids[0]] - logits[ids[1]] if len(ids) > 1 else logits[ids[0]])
    return torch.stack(found)


@pytest.mark.parametrize(
    ("scaled", "words"), [(True, ("true", "false")), (False, ("true", "false")), (False, ("true",))]
)
def test_the_saved_folder_has_the_same_scores_in_transformers(scaled, words, tmp_path):
    """The second form is RankT5's: the logit of one word."""
    base = folder_of(tmp_path / "base", scaled)
    scorer = MonoT5(load_encoder(str(base), dropout=0.0), false_word="false" if len(words) > 1 else None)
    assert scorer.head.tied is scaled and (scorer.head.scale == 1.0) is not scaled
    torch.testing.assert_close(scores(scorer), theirs(base, words), rtol=0, atol=1e-5)
    optimizer = torch.optim.SGD([weight for weight in scorer.parameters() if weight.requires_grad], lr=0.05)
    scorer.train()
    for _ in range(3):
        optimizer.zero_grad()
        out = scorer(batch_of(filled_rows(scorer)))
        (out[0, 0] - out[1, 0]).backward()
        optimizer.step()
    expected = scores(scorer)
    scorer.save(tmp_path / "model", 200)
    torch.testing.assert_close(theirs(tmp_path / "model", words), expected, rtol=1e-5, atol=1e-5)
    assert (expected - theirs(base, words)).abs().max() > 0.1
    loaded = load_scorer(tmp_path / "model")
    assert isinstance(loaded, MonoT5) and loaded.words == scorer.words and torch.equal(scores(loaded), expected)
    if not scaled:  # rows of other words are as they were
        before, after = (
            T5ForConditionalGeneration.from_pretrained(path).lm_head.weight for path in (base, tmp_path / "model")
        )
        others = [i for i in range(len(before)) if i not in scorer.head.words]
        assert torch.equal(before[others], after[others])


def test_a_folder_of_transformers_is_a_checkpoint(tmp_path):
    """monoT5's folders of the hub have words and prompt in no file; they are the defaults."""
    base = folder_of(tmp_path / "base")
    torch.testing.assert_close(scores(load_scorer(base)), theirs(base, ("true", "false")), rtol=0, atol=1e-5)
    ranked = Reranker.load(base).score(PAIRS)
    torch.testing.assert_close(torch.tensor(ranked).float(), theirs(base, ("true", "false")), rtol=0, atol=1e-5)


def test_scores_depend_on_the_texts_alone():
    torch.manual_seed(0)
    check_scores(MonoT5(load_encoder("tiny_t5")))


def test_keys_of_the_encoder_s_tokens_are_never_computed():
    """Cross-attention's key and value layers see no token: their weights are multiplied into query and average."""
    scorer = MonoT5(load_encoder("tiny_t5"))
    seen = []
    for block in scorer.head.decoder.block:
        for part in (block.layer[1].EncDecAttention.k, block.layer[1].EncDecAttention.v):
            part.register_forward_hook(lambda *_: seen.append(1))
        block.layer[1].EncDecAttention.q.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].shape))
    scores(scorer)
    assert seen == [(3, 1, 32)] * 2


def test_dropout_does_not_depend_on_the_layout():
    scorer = MonoT5(load_encoder("tiny_t5", dropout=0.3))
    scorer.encoder.dropout_seed = 7
    rows = filled_rows(scorer)
    together = scorer(batch_of(rows))[:, 0]
    assert (together - scores(scorer)).abs().max() > 1e-3
    scorer.train()
    for i, row in enumerate(rows):
        batch = batch_of([row])
        batch.pairs.row_ids = torch.tensor([i])
        torch.testing.assert_close(scorer(batch)[0, 0], together[i], rtol=0, atol=1e-5)
    scorer.encoder.dropout_seed = 8
    assert (scorer(batch_of(rows))[:, 0] - together).abs().max() > 1e-3


def test_with_adapters_the_decoder_is_frozen(tmp_path):
    pytest.importorskip("peft")
    from ranker.encoders.lora import LoRA

    base = folder_of(tmp_path / "base")
    scorer = MonoT5(load_encoder(str(base), lora=LoRA(rank=2, dropout=0.0)))
    torch.testing.assert_close(scores(scorer), theirs(base, ("true", "false")), rtol=0, atol=1e-5)
    assert all(weight.requires_grad == ("lora_" in name) for name, weight in scorer.named_parameters())
    scorer(batch_of(filled_rows(scorer))).sum().backward()
    second = next(weight for name, weight in scorer.named_parameters() if "lora_B" in name)
    assert second.grad.any()


def test_adapters_are_stored_alone_and_merged_as_transformers_reads_them(tmp_path):
    pytest.importorskip("peft")
    from ranker.assembly.scorer import build_scorer
    from ranker.checkpoint import load_scorer, save_merged, save_model
    from tests.unit.models.test_lora import cfg_of

    base = folder_of(tmp_path / "base")
    cfg = cfg_of("model=mono_t5", "encoder=tiny_t5", f"encoder.name={base}", "encoder.pretrained=true")
    scorer = build_scorer(cfg)
    for name, weight in scorer.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.2, generator=torch.Generator().manual_seed(0))
    expected = scores(scorer.eval())
    assert (expected - theirs(base, ("true", "false"))).abs().max() > 1e-3
    save_model(tmp_path / "model", scorer, cfg)
    stored = {path.name for path in (tmp_path / "model").glob("*.safetensors")}
    assert stored == {"adapter_model.safetensors"}
    torch.testing.assert_close(scores(load_scorer(tmp_path / "model").eval()), expected, rtol=0, atol=1e-6)
    save_merged(tmp_path / "merged", scorer, cfg)
    torch.testing.assert_close(theirs(tmp_path / "merged", ("true", "false")), expected, rtol=0, atol=1e-5)


def test_faults_in_one_line(tmp_path):
    encoder = load_encoder("tiny_t5")
    with pytest.raises(
        ConfigError, match=r"^model\.true_word: expected a word that is one token after the prompt, got"
    ):
        MonoT5(encoder, true_word="relevant")
    with pytest.raises(ConfigError, match=r"^model\.false_word: expected another word than model\.true_word, got"):
        MonoT5(encoder, false_word="true")
    with pytest.raises(ConfigError, match=r"^model\.prompt: expected a template with \{query\} once, got it 0 times"):
        MonoT5(encoder, prompt="{doc}")
    with pytest.raises(CheckpointError, match=r"^model: expected the encoder of a T5, mT5, umT5 or LongT5 for model="):
        MonoT5(load_encoder("tiny"), true_word="a", false_word="b")
    T5EncoderModel(tiny_t5_config()).save_pretrained(tmp_path)
    tiny_t5_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"expected the weights of a decoder beside those of the encoder, but \d+"
    ):
        MonoT5(load_encoder(str(tmp_path)))
