"""monoBERT: scores, learning, and the Hugging Face folder against transformers and sentence-transformers."""

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    RobertaConfig,
)

from ranker.assembly.scorer import build_scorer
from ranker.data.collate import Collator
from ranker.data.scorer_inputs import ScorerInputs, TextLimits
from ranker.data.token_store import build_token_store
from ranker.encoders.encoder import Encoder
from ranker.encoders.execution import Execution
from ranker.encoders.loading import load_encoder
from ranker.encoders.tiny import tiny_tokenizer
from ranker.errors import CheckpointError, ConfigError
from ranker.losses.lce import LCE
from ranker.models.monobert import MonoBERT

QUERIES = ["red apple", "blue sky over a lake", "g"]
DOCS = ["an apple is red", "the sky", "green grass and more of it, and more", "x y z"]


@pytest.fixture
def batch(tmp_path):
    def make(tokenizer, rows):
        stores = [
            build_token_store(
                ((str(i), text) for i, text in enumerate(texts)), tmp_path / name, tokenizer, 32, fingerprint=name
            )
            for name, texts in (("queries", QUERIES), ("docs", DOCS))
        ]
        collator = Collator.of(ScorerInputs(tokenizer, "pairs", 512), *stores, TextLimits(32, 32))
        rows = np.array(rows)
        return collator.collate(np.arange(len(rows)), rows, np.zeros(rows.shape), np.arange(len(rows)), 1.0)

    return make


def scorer_of(**options) -> MonoBERT:
    torch.manual_seed(0)
    return MonoBERT(load_encoder("tiny"), **options).eval()


def test_a_score_is_the_same_alone_and_in_a_batch_ragged_and_padded(batch):
    scorer = scorer_of()
    rows = [[0, 1, 2, 3], [1, -1, 3, -1], [2, 2, -1, 0]]
    together = batch(scorer.encoder.tokenizer, rows)
    with torch.no_grad():
        scores = scorer(together)
        scorer.encoder = Encoder(scorer.encoder.model, scorer.encoder.tokenizer, Execution(ragged=False))
        torch.testing.assert_close(scorer(together), scores, rtol=0, atol=1e-5)
        assert (scores[~together.doc_mask] == 0).all()


def test_two_labels_are_log_odds(batch):
    scorer = scorer_of(num_labels=2)
    made = batch(scorer.encoder.tokenizer, [[0, 1]])
    with torch.no_grad():
        logits, scores = scorer.logits(made), scorer(made)
    expected = torch.log_softmax(logits, 1)
    torch.testing.assert_close(scores[0], expected[:, 1] - expected[:, 0])


@pytest.mark.parametrize("ragged", [True, False])
def test_thirty_steps_overfit(batch, ragged):
    scorer = scorer_of().train()
    scorer.encoder = Encoder(scorer.encoder.model, scorer.encoder.tokenizer, Execution(ragged=ragged))
    made = batch(scorer.encoder.tokenizer, [[0, 1, 2, 3], [1, 0, 2, 3], [2, 0, 1, 3]])
    made.labels[:, 0] = 1.0
    optimizer = torch.optim.AdamW(scorer.parameters(), lr=3e-3)
    for _ in range(30):
        optimizer.zero_grad()
        loss = LCE()(scorer(made), made.labels, made.doc_mask)
        loss.backward()
        optimizer.step()
    assert scorer(made).argmax(1).tolist() == [0, 0, 0]
    assert loss.item() < 0.1


@pytest.mark.parametrize("options", [{}, {"pooler": True}, {"num_labels": 2}])
def test_model_folder_gives_the_same_scores_everywhere(batch, tmp_path, options):
    from sentence_transformers import CrossEncoder

    scorer = scorer_of(**options)
    with torch.no_grad():
        scorer.head.weight.mul_(20)
        scorer.head.bias.add_(0.7)
    rows = [[0, 1, 2, 3]] * 3
    with torch.no_grad():
        expected = scorer(batch(scorer.encoder.tokenizer, rows))
    scorer.save(tmp_path / "model", max_tokens=64)

    pairs = [(query, doc) for query in QUERIES for doc in DOCS]
    model, tokenizer = (
        AutoModelForSequenceClassification.from_pretrained(tmp_path / "model").eval(),
        AutoTokenizer.from_pretrained(tmp_path / "model"),
    )
    encoded = tokenizer([query for query, _ in pairs], [doc for _, doc in pairs], padding=True, return_tensors="pt")
    with torch.no_grad():
        logits = model(**encoded).logits
    flat = logits[:, 0] if logits.shape[1] == 1 else logits[:, 1] - logits[:, 0]
    torch.testing.assert_close(flat.view(3, 4), expected, rtol=0, atol=1e-5)

    theirs = torch.as_tensor(CrossEncoder(str(tmp_path / "model"), device="cpu").predict(pairs))
    flat = theirs if theirs.ndim == 1 else theirs[:, 1] - theirs[:, 0]
    torch.testing.assert_close(flat.view(3, 4), expected, rtol=0, atol=1e-5)

    loaded = MonoBERT.load(tmp_path / "model").eval()
    assert all(torch.equal(value, loaded.state_dict()[key]) for key, value in scorer.state_dict().items())


def test_roberta_folder_too(tmp_path):
    from transformers import RobertaModel

    torch.manual_seed(0)
    config = RobertaConfig(
        vocab_size=2000,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        type_vocab_size=1,
    )
    scorer = MonoBERT(Encoder(RobertaModel(config, add_pooling_layer=False), tiny_tokenizer())).eval()
    scorer.save(tmp_path / "model", max_tokens=64)
    loaded = MonoBERT.load(tmp_path / "model").eval()
    tokens = torch.tensor([[5, 9, 11, 6]])
    with torch.no_grad():
        expected = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model").eval()(tokens).logits[0, 0]
        got = loaded.head(loaded.encoder.model(tokens).last_hidden_state[:, 0])[0, 0]
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_a_family_without_such_a_classifier_comes_back_whole(tmp_path, pooling):
    from transformers import ElectraConfig, ElectraModel

    torch.manual_seed(0)
    config = ElectraConfig(
        vocab_size=2000,
        embedding_size=8,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
    )
    scorer = MonoBERT(Encoder(ElectraModel(config), tiny_tokenizer()), pooling=pooling, pooler=True)
    scorer.save(tmp_path / "model", max_tokens=64)
    loaded = MonoBERT.load(tmp_path / "model")
    assert loaded.pooling == pooling
    state = loaded.state_dict()
    assert state.keys() == scorer.state_dict().keys()
    assert all(torch.equal(value, state[key]) for key, value in scorer.state_dict().items())


def test_pc73_a_head_of_another_size_or_none_is_refused(tmp_path):
    config = BertConfig(
        vocab_size=60, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, num_labels=3
    )
    BertForSequenceClassification(config).save_pretrained(tmp_path / "three")
    with pytest.raises(CheckpointError, match="expected a head of 1 or 2 labels, got 3"):
        MonoBERT.load(tmp_path / "three")
    load_encoder("tiny").model.save_pretrained(tmp_path / "headless")
    with pytest.raises(CheckpointError, match="its head would be random"):
        MonoBERT.load(tmp_path / "headless")


def test_pc73_two_loads_score_alike_bit_for_bit(tmp_path, batch):
    scorer = scorer_of()
    scorer.save(tmp_path / "model", max_tokens=64)
    rows, scores = batch(scorer.encoder.tokenizer, [[0, 1], [2, 3]]), []
    for seed in (0, 1):
        torch.manual_seed(seed)  # a head that is made anew would differ
        with torch.no_grad():
            scores.append(MonoBERT.load(tmp_path / "model").eval()(rows))
    assert torch.equal(*scores)


def test_pc74_old_position_ids_are_ignored_and_all_other_keys_count(tmp_path):
    from safetensors.torch import load_file, save_file

    scorer = scorer_of()
    scorer.save(tmp_path / "model", max_tokens=64)
    path = tmp_path / "model" / "model.safetensors"
    whole = load_file(path)
    assert "bert.embeddings.position_ids" not in whole  # so that their absence is what every other test loads
    save_file(
        {**whole, "bert.embeddings.position_ids": torch.arange(512).unsqueeze(0)}, path, metadata={"format": "pt"}
    )
    loaded = MonoBERT.load(tmp_path / "model")
    assert all(torch.equal(value, loaded.state_dict()[key]) for key, value in scorer.state_dict().items())
    lacks = {key: value for key, value in whole.items() if key != "bert.encoder.layer.0.output.dense.weight"}
    for state in (lacks, {**whole, "bert.encoder.layer.9.output.dense.weight": torch.zeros(1)}):
        save_file(state, path, metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=r"layer\.[09]\.output\.dense\.weight"):
            MonoBERT.load(tmp_path / "model")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pooling": "avg"}, "model.pooling: expected one of cls, mean, max, last, weightedmean, auto; got 'avg'"),
        ({"num_labels": 3}, "model.num_labels: expected 1 or 2, got 3"),
    ],
)
def test_wrong_options_say_so(options, message):
    with pytest.raises(ConfigError, match=message):
        scorer_of(**options)


def test_the_head_works_in_float32_under_autocast(batch):
    scorer = scorer_of()
    rows = batch(scorer.encoder.tokenizer, [[0, 1], [2, 3]])
    with torch.autocast("cpu", torch.bfloat16):
        states = scorer.encoder(rows.pairs)
        scores = scorer.read(states, rows.pairs)
    firsts = states[rows.pairs.cu_seqlens[:-1]].float()
    assert torch.equal(scores, firsts @ scorer.head.weight.t() + scorer.head.bias)


@pytest.mark.parametrize("pooling", ["cls", "mean"])  # mean: the head lies in a file of its own
def test_a_training_that_starts_from_a_checkpoint_has_its_dropout(tmp_path, pooling):
    scorer = MonoBERT(load_encoder("tiny", dropout=0.3), pooling=pooling, dropout=0.1)
    scorer.save(tmp_path, 64)
    cfg = OmegaConf.create(
        {"checkpoint": str(tmp_path), "resume": False, "model": {"_target_": "ranker.models.monobert.MonoBERT"}}
    )
    again = build_scorer(cfg)
    assert all(part.training for part in again.modules())
    assert again.dropout.p == 0.1
    assert {part.p for part in again.encoder.modules() if isinstance(part, torch.nn.Dropout)} >= {0.3}


def test_other_programs_train_the_folder_with_the_same_dropout(tmp_path):
    MonoBERT(load_encoder("tiny", dropout=0.3), dropout=0.1).save(tmp_path / "one", 64)
    MonoBERT(load_encoder("tiny", dropout=0.3)).save(tmp_path / "none", 64)
    rates = [AutoModelForSequenceClassification.from_pretrained(tmp_path / name).dropout.p for name in ("one", "none")]
    assert rates == [0.1, 0.0]
