"""Compressed models compute the same as the whole model with the removed parts set to have no effect."""

import shutil
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from transformers import ModernBertConfig, ModernBertModel

from ranker import Reranker
from ranker.assembly.importance import kept_heads, kept_layers, layer_contributions, unit_importances
from ranker.checkpoint import load_scorer
from ranker.encoders.execution import Execution
from ranker.encoders.loading import load_encoder
from ranker.errors import CheckpointError
from ranker.export._cut import cut, head_outputs, unit_outputs
from ranker.models.dpr import DPR
from ranker.models.monobert import MonoBERT
from ranker.types import RankBatch, TokenBatch

PAIRS = [("the river", "a river runs to the sea"), ("the river", "apples are picked"), ("cold nights", "the sea")]


@pytest.fixture(scope="module", params=["bert", "modernbert"])
def folder(request, tmp_path_factory):
    """A trained folder of four layers: a plain feed-forward block, or one whose gate is in the same matrix."""
    where = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    encoder = load_encoder("tiny")
    if request.param == "modernbert":
        vocabulary = len(encoder.tokenizer)
        sizes = {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 4}
        config = ModernBertConfig(vocab_size=vocabulary, pad_token_id=0, global_attn_every_n_layers=2, **sizes)
        ModernBertModel(config).save_pretrained(where / "encoder")
        encoder.tokenizer.save_pretrained(where / "encoder")
    else:
        encoder.model.config.num_hidden_layers, encoder.model.config.num_attention_heads = 4, 4
        type(encoder.model)(encoder.model.config).save_pretrained(where / "encoder")
        encoder.tokenizer.save_pretrained(where / "encoder")
    model = MonoBERT(load_encoder(str(where / "encoder")))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save(where / "model", max_tokens=64)
    return where / "model"


def whole(folder):
    scorer = load_scorer(folder, execution=Execution(ragged=False))
    return scorer.eval(), scorer.encoder.model


def scores(folder):
    return torch.from_numpy(Reranker.load(folder, accelerator="cpu").score(PAIRS))


def scored_with(scorer):
    limits = SimpleNamespace(query=64, doc=448, pair=None)
    return torch.from_numpy(Reranker(scorer, limits, accelerator="cpu").score(PAIRS))


@pytest.mark.parametrize("layers", [[0, 1], [0, 3], [0, 1, 2, 3]])
def test_removed_layers_are_left_out(folder, tmp_path, layers):
    cut(folder, tmp_path / "cut", layers, None)
    scorer, model = whole(folder)
    stack = model.encoder if hasattr(model, "encoder") else model
    name = "layer" if hasattr(stack, "layer") else "layers"
    setattr(stack, name, torch.nn.ModuleList(getattr(stack, name)[i] for i in layers))
    model.config.num_hidden_layers = len(layers)
    torch.testing.assert_close(scores(tmp_path / "cut"), scored_with(scorer), rtol=0, atol=1e-5)


def test_removed_units_are_as_units_of_0(folder, tmp_path):
    scorer, model = whole(folder)
    size = model.config.intermediate_size
    units = [
        torch.randperm(size, generator=torch.Generator().manual_seed(i))[: size // 2].sort().values for i in range(4)
    ]
    cut(folder, tmp_path / "cut", range(4), units)
    for i, linear in unit_outputs(model, 4, size).items():
        removed = torch.ones(size, dtype=torch.bool)
        removed[units[i]] = False
        linear.weight.data[:, removed] = 0.0
    small = load_scorer(tmp_path / "cut")
    assert small.encoder.config.intermediate_size == size // 2
    torch.testing.assert_close(scores(tmp_path / "cut"), scored_with(scorer), rtol=0, atol=1e-5)


def batches(encoder):
    made = []
    for query, doc in PAIRS:
        ids = torch.tensor(encoder.tokenizer(query, doc)["input_ids"])
        segments = torch.tensor(encoder.tokenizer(query, doc).get("token_type_ids", [0] * len(ids)))
        pairs = TokenBatch(ids, segments, torch.tensor([0, len(ids)], dtype=torch.int32), len(ids))
        made.append(
            RankBatch(
                torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool), torch.zeros(1, dtype=torch.long), 1.0, pairs
            )
        )
    return made


def test_importances_and_contributions_are_those_of_a_plain_loop(folder):
    scorer, model = whole(folder)
    size = model.config.intermediate_size
    found = unit_importances(scorer, batches(scorer.encoder), lambda model: unit_outputs(model, 4, size))
    contributions = layer_contributions(scorer, batches(scorer.encoder))
    expected, moved, tokens = torch.zeros(4, size, dtype=torch.float64), torch.zeros(4, dtype=torch.float64), 0
    for batch in batches(scorer.encoder):
        states = {}
        linears = unit_outputs(model, 4, size)
        hooks = [
            linear.register_forward_pre_hook(lambda _, inputs, i=i, states=states: states.__setitem__(i, inputs[0]))
            for i, linear in linears.items()
        ]
        score = scorer(batch).sum()
        gradients = torch.autograd.grad(score, [states[i] for i in range(4)])
        for i in range(4):
            expected[i] += (states[i].double() * gradients[i].double()).reshape(-1, size).sum(0).abs() / len(PAIRS)
        for hook in hooks:
            hook.remove()
        layers = [layer.detach().double() for layer in scorer.encoder.layers(batch.pairs)]
        for i in range(4):
            for before, after in zip(layers[i], layers[i + 1], strict=True):
                moved[i] += 1 - (before @ after) / (before.norm() * after.norm())
        tokens += len(layers[0])
    torch.testing.assert_close(torch.stack(found), expected, rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(contributions, moved / tokens, rtol=1e-6, atol=1e-9)


def test_what_can_not_be_cut_is_refused(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "two/query")
    shutil.copytree(folder, tmp_path / "two/doc")
    with pytest.raises(CheckpointError, match="expected a model with one encoder, got 2"):
        cut(tmp_path / "two", tmp_path / "cut", [0], None)
    with pytest.raises(
        CheckpointError, match="units: expected a model with one feed-forward block in each of its 4 layers"
    ):
        unit_outputs(whole(folder)[1], 4, 7)
    assert not (tmp_path / "cut").exists()


def test_a_bi_encoder_is_cut_too(tmp_path):
    torch.manual_seed(0)
    scorer = DPR(load_encoder("tiny"))
    scorer.save(tmp_path / "dpr", max_tokens=64, max_query_tokens=32)
    cut(tmp_path / "dpr", tmp_path / "cut", [0], None)
    small = load_scorer(tmp_path / "cut")
    assert small.encoder.num_layers == 1
    assert OmegaConf.create(small.encoder.config.to_dict()).num_hidden_layers == 1


def test_kept_layers_by_hand():
    assert kept_layers(6, 1, "alternate") == [0]
    assert kept_layers(5, 5, "alternate") == [0, 1, 2, 3, 4]
    assert kept_layers(4, 3, "contribution", torch.tensor([0.9, 0.1, 0.1, 0.3])) == [0, 1, 3]


def test_removed_heads_are_as_heads_of_0(folder, tmp_path):
    scorer, model = whole(folder)
    if not hasattr(model, "encoder"):
        with pytest.raises(CheckpointError, match=r"heads: expected a family with BERT's modules, .* got modernbert"):
            head_outputs(model, 4)
        return
    total = model.config.num_attention_heads
    size = model.config.hidden_size // total
    kept = [[0, 1], [1], list(range(total)), [0]]
    cut(folder, tmp_path / "cut", [0, 1, 3], None, kept)
    small = load_scorer(tmp_path / "cut")
    assert small.encoder.path == "bert" and small.encoder.config.pruned_heads == {
        str(place): [head for head in range(total) if head not in kept[layer]] for place, layer in enumerate([0, 1, 3])
    }
    stack = model.encoder
    stack.layer = torch.nn.ModuleList(stack.layer[i] for i in (0, 1, 3))
    model.config.num_hidden_layers = 3
    for layer, heads in zip(stack.layer, (kept[0], kept[1], kept[3]), strict=True):
        for head in set(range(total)) - set(heads):
            layer.attention.output.dense.weight.data[:, head * size : (head + 1) * size] = 0.0
    expected = scored_with(scorer)
    torch.testing.assert_close(scores(tmp_path / "cut"), expected, rtol=0, atol=1e-5)
    padded = load_scorer(tmp_path / "cut", execution=Execution(ragged=False)).eval()
    torch.testing.assert_close(scored_with(padded), expected, rtol=0, atol=1e-5)
    small.save(tmp_path / "again", max_tokens=64)  # as after further training
    torch.testing.assert_close(scores(tmp_path / "again"), scores(tmp_path / "cut"), rtol=0, atol=0)
    cut(tmp_path / "again", tmp_path / "twice", [0, 2], None, [[1], [0], [0]])
    once = load_scorer(tmp_path / "twice").encoder.config.pruned_heads
    assert once == {"0": [0, *range(2, total)], "1": list(range(1, total))}


def test_head_importances_are_those_of_a_plain_loop(folder):
    scorer, model = whole(folder)
    if not hasattr(model, "encoder"):
        return
    total, width = model.config.num_attention_heads, model.config.hidden_size
    size = width // total
    found = unit_importances(scorer, batches(scorer.encoder), lambda model: head_outputs(model, 4), size)
    expected = torch.zeros(4, total, dtype=torch.float64)
    for batch in batches(scorer.encoder):
        for layer in range(4):
            for head in range(total):  # the derivative by a factor of the head
                factor = torch.ones(width, requires_grad=True)

                def scaled(_, inputs, factor=factor):
                    return (inputs[0] * factor,)

                hook = head_outputs(model, 4)[layer].register_forward_pre_hook(scaled)
                (gradient,) = torch.autograd.grad(scorer(batch).sum(), factor)
                hook.remove()
                expected[layer, head] += gradient[head * size : (head + 1) * size].sum().abs().double() / len(PAIRS)
    torch.testing.assert_close(torch.stack(found), expected, rtol=1e-3, atol=1e-7)


def test_kept_heads_by_hand():
    importances = [torch.tensor([3.0, 0.0, 4.0]), torch.tensor([0.1, 0.1, 0.1])]  # normed: .6 0 .8, .577 three times
    assert kept_heads(importances, 0.5) == [[0, 2], [0]]
    assert kept_heads(importances, 0.01) == [[2], [0]]
    assert kept_heads(importances, 1.0) == [[0, 1, 2], [0, 1, 2]]
