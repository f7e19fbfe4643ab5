"""Weights in sentence-transformers' and Stanford ColBERT's layouts give those programs' scores, read and written."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import BertModel

from ranker.checkpoint import load_scorer
from ranker.data.collate import Collator
from ranker.data.scorer_inputs import ScorerInputs, TextLimits
from ranker.data.token_store import build_token_store, tokenizer_fingerprint
from ranker.encoders.encoder import Encoder
from ranker.encoders.execution import DEFAULT
from ranker.encoders.tiny import tiny_config, tiny_tokenizer
from ranker.errors import CheckpointError
from ranker.models.colbert import ColBERT
from ranker.models.dpr import DPR

transformers = pytest.importorskip("sentence_transformers")
from sentence_transformers import MultiVectorEncoder, SentenceTransformer  # noqa: E402
from sentence_transformers.base.modules import Dense, Normalize, Router, Transformer  # noqa: E402
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask  # noqa: E402
from sentence_transformers.sentence_transformer.modules import Pooling  # noqa: E402

QUERIES = [
    "which gull eats fish",
    "a",
    "how deep, how wide and how cold is the lake that lies north of the old town, and who says so?",
]
DOCS = ["a gull eats fish.", "!", "the lake: deep; wide -- and cold", "long text " * 60, "x"]
PUNCTUATION = list("!.,:;-?")


def encoder(seed: int = 0) -> Encoder:
    torch.manual_seed(seed)
    return Encoder(BertModel(tiny_config(), add_pooling_layer=False), tiny_tokenizer())


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """A plain transformers folder whose vocabulary has the markers that ColBERT uses."""
    folder = tmp_path_factory.mktemp("bert")
    torch.manual_seed(0)
    tokenizer = tiny_tokenizer()
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    size = len(state["model"]["vocab"])
    state["model"]["vocab"].update({"[unused0]": size, "[unused1]": size + 1})
    config = tiny_config()
    config.vocab_size = size + 2
    BertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(state), encoding="utf-8")
    return folder


def vectors(scorer, queries, docs, folder, max_query_tokens=1000, max_doc_tokens=1000):
    """The scorer's vectors of texts that pass through the token store and the collator, as in a search."""
    layouts = scorer.layouts()
    stores = [
        build_token_store(
            ((str(i), layout.prefix + text) for i, text in enumerate(texts)),
            folder / name,
            scorer.encoder.tokenizer,
            2000,
            fingerprint=name,
        )
        for name, texts, layout in (("queries", queries, layouts[0]), ("docs", docs, layouts[1]))
    ]
    collator = Collator.of(ScorerInputs.of(scorer), *stores, TextLimits(max_query_tokens, max_doc_tokens))
    rows = np.arange(len(queries))
    grid = np.tile(np.arange(len(docs)), (len(queries), 1))
    batch = collator.collate(rows, grid, np.zeros(grid.shape), rows, 1.0)
    scorer.eval()
    with torch.no_grad():
        everything = scorer.score_block(scorer.encode_queries(batch.queries), scorer.encode_docs(batch.docs))
        scores = scorer(batch)
    # every query came with every doc: the block's diagonal parts are the forward's scores
    blocks = everything.view(len(queries), len(queries), len(docs))
    for i in range(len(queries)):
        torch.testing.assert_close(blocks[i, i], scores[i], rtol=1e-5, atol=1e-5)
    return scores


def theirs(model, **options):
    return (
        model.similarity(model.encode_query(QUERIES, **options), model.encode_document(DOCS, **options)).cpu().float()
    )


@pytest.mark.parametrize("pooling", ["mean", "cls", "max", "lasttoken", "weightedmean"])
@pytest.mark.parametrize("head", ["none", "tanh", "two"])
@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_a_sentence_transformer_loads_as_dpr_with_the_same_scores(tmp_path, bert, pooling, head, similarity):
    torch.manual_seed(1)
    modules = [Transformer(str(bert)), Pooling(32, pooling)]
    if head == "tanh":
        modules.append(Dense(32, 16, activation_function=nn.Tanh()))
    if head == "two":  # as in EmbeddingGemma, with an activation more
        modules.append(Dense(32, 64, bias=False, activation_function=nn.GELU()))
        modules.append(Dense(64, 16, bias=False, activation_function=nn.Identity()))
    if similarity == "cosine":
        modules.append(Normalize())
    model = SentenceTransformer(modules=modules, device="cpu", similarity_fn_name=similarity)
    model.save(str(tmp_path / "theirs"))
    scorer = load_scorer(tmp_path / "theirs")
    assert isinstance(scorer, DPR)
    expected = "last" if pooling == "lasttoken" else pooling
    assert (scorer.pooling, scorer.similarity, scorer.tied) == (expected, similarity, True)
    mine = vectors(scorer, QUERIES, DOCS, tmp_path)
    torch.testing.assert_close(mine, theirs(model), rtol=1e-5, atol=1e-5)
    scorer.save(tmp_path / "ours", max_tokens=512)
    ours = SentenceTransformer(str(tmp_path / "ours"), device="cpu")
    torch.testing.assert_close(theirs(ours), mine, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("config", [
    {"pooling_mode_lasttoken": True}, {"pooling_mode_weightedmean_tokens": True, "pooling_mode_mean_tokens": False},
    {"pooling_mode_cls_token": False, "pooling_mode_max_tokens": False}, {"pooling_mode": ["max"]},
])  # fmt: skip
def test_each_form_of_a_pooling_configuration_is_read_as_by_sentence_transformers(tmp_path, bert, config):
    modules = [Transformer(str(bert)), Pooling(32, "cls")]
    SentenceTransformer(modules=modules, device="cpu").save(str(tmp_path / "theirs"))
    pooling = {"word_embedding_dimension": 32, **config}
    (tmp_path / "theirs/1_Pooling/config.json").write_text(json.dumps(pooling))
    model = SentenceTransformer(str(tmp_path / "theirs"), device="cpu")
    scores = vectors(DPR.load(tmp_path / "theirs"), QUERIES, DOCS, tmp_path)
    torch.testing.assert_close(scores, theirs(model), rtol=0, atol=1e-5)


def test_prompts_are_those_that_encode_query_and_encode_document_read(tmp_path, bert):
    model = SentenceTransformer(
        modules=[Transformer(str(bert)), Pooling(32, "mean")],
        prompts={"query": "query: ", "passage": "passage: "},
        device="cpu",
    )
    model.save(str(tmp_path / "theirs"))
    scorer = load_scorer(tmp_path / "theirs")
    assert scorer.query_prompt == "query: "
    torch.testing.assert_close(vectors(scorer, QUERIES, DOCS, tmp_path), theirs(model), rtol=0, atol=1e-5)


def test_a_router_of_two_tokenizers_is_refused(tmp_path, bert):
    for name in ("one", "two"):
        BertModel(tiny_config()).save_pretrained(tmp_path / name)
        tiny_tokenizer().save_pretrained(tmp_path / name)
    state = json.loads((tmp_path / "two/tokenizer.json").read_text())
    state["normalizer"]["lowercase"] = not state["normalizer"]["lowercase"]
    (tmp_path / "two/tokenizer.json").write_text(json.dumps(state))
    one, two = ([Transformer(str(tmp_path / name)), Pooling(32, "cls")] for name in ("one", "two"))
    SentenceTransformer(
        modules=[Router.for_query_document(query_modules=one, document_modules=two)], device="cpu"
    ).save(str(tmp_path / "theirs"))
    with pytest.raises(CheckpointError, match="expected the same tokenizer for queries and docs, got two"):
        load_scorer(tmp_path / "theirs")


def test_a_router_of_two_encoders_with_prompts_and_lengths_loads_as_dpr(tmp_path, bert):
    sides = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        BertModel(tiny_config()).save_pretrained(tmp_path / f"bert{seed}")
        tiny_tokenizer().save_pretrained(tmp_path / f"bert{seed}")
        sides.append(
            [Transformer(str(tmp_path / f"bert{seed}"), query_length=20, document_length=50), Pooling(32, "cls")]
        )
    model = SentenceTransformer(
        modules=[Router.for_query_document(query_modules=sides[0], document_modules=sides[1]), Normalize()],
        prompts={"query": "query: ", "document": "passage: "}, device="cpu",
    )  # fmt: skip
    model.save(str(tmp_path / "theirs"))
    scorer = load_scorer(tmp_path / "theirs")
    assert not scorer.tied and scorer.text_limits == (
        20 - 2 - 4,
        50 - 2 - 5,
    )  # `qu ##er ##y :` and `pa ##ss ##ag ##e :`
    torch.testing.assert_close(
        vectors(scorer, QUERIES, DOCS, tmp_path, *scorer.text_limits), theirs(model), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("cased", [True, False])
def test_do_lower_case_is_followed_and_kept(tmp_path, bert, cased):
    for name in ("config.json", "model.safetensors", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((bert / name).read_bytes())
    state = json.loads((bert / "tokenizer.json").read_text())
    state["normalizer"]["lowercase"] = not cased
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    model = SentenceTransformer(
        modules=[Transformer(str(tmp_path), do_lower_case=True), Pooling(32, "mean")], device="cpu"
    )
    model.save(str(tmp_path / "theirs"))
    # new folders of their library hold the changed tokenizer; older ones state the change in their configuration only
    (tmp_path / "theirs/tokenizer.json").write_text(json.dumps(state))
    (tmp_path / "theirs/sentence_bert_config.json").write_text(
        json.dumps({"max_seq_length": 60, "do_lower_case": True})
    )
    scorer = load_scorer(tmp_path / "theirs")
    texts = ["A Gull eats FISH", "THE Lake"]
    scores = vectors(scorer, texts, texts, tmp_path)
    torch.testing.assert_close(scores, model.similarity(model.encode(texts), model.encode(texts)), rtol=0, atol=1e-5)
    assert ("Lowercase" in scorer.encoder.tokenizer.backend_tokenizer.to_str()) == cased  # else token stores stay valid
    scorer.save(tmp_path / "ours", max_tokens=60)
    back = DPR.load(tmp_path / "ours").encoder.tokenizer
    assert tokenizer_fingerprint(back) == tokenizer_fingerprint(scorer.encoder.tokenizer)


@pytest.mark.parametrize("pooling", ["mean", "weightedmean", "cls", "lasttoken"])
def test_prompts_that_are_not_pooled_are_left_out_and_stay_so(tmp_path, bert, pooling):
    modules = [Transformer(str(bert)), Pooling(32, pooling, include_prompt=False)]  # as in INSTRUCTOR
    prompts = {"query": "query: ", "document": "Represent the text:"}
    model = SentenceTransformer(modules=modules, prompts=prompts, device="cpu")
    model.save(str(tmp_path / "theirs"))
    scorer = load_scorer(tmp_path / "theirs")
    mine = vectors(scorer, QUERIES, DOCS, tmp_path)
    torch.testing.assert_close(mine, theirs(model), rtol=0, atol=1e-5)
    scorer.save(tmp_path / "ours", max_tokens=512)
    ours = SentenceTransformer(str(tmp_path / "ours"), device="cpu")
    torch.testing.assert_close(theirs(ours), mine, rtol=0, atol=1e-5)
    scorer.pools_prompt = True
    (tmp_path / "again").mkdir()
    if pooling != "lasttoken":
        assert (vectors(scorer, QUERIES, DOCS, tmp_path / "again") - mine).abs().max() > 1e-3


@pytest.mark.parametrize(("modules", "message"), [
    (lambda: [Pooling(32, "mean"), Normalize(), Dense(32, 8)], r"optional\), got .*, Normalize, Dense"),
    (lambda: [Pooling(32, "mean"), Dense(32, 32, use_residual=True)], "2_Dense: use_residual: expected a Dense"),
    (lambda: [Pooling(32, "mean"), Dense(32, 8, activation_function=nn.PReLU())], "without weights.*activation.PReLU'"),
    (lambda: [Pooling(32, "mean"), Dense(32, 8, activation_function=nn.GLU())], "without weights.*activation.GLU'"),
])  # fmt: skip
def test_modules_that_dpr_does_not_have_are_refused(tmp_path, bert, modules, message):
    SentenceTransformer(modules=[Transformer(str(bert)), *modules()], device="cpu").save(str(tmp_path / "theirs"))
    with pytest.raises(CheckpointError, match=message):
        DPR.load(tmp_path / "theirs")


@pytest.mark.parametrize("options", [
    {}, {"tied": False}, {"similarity": "dot", "projection": 8},
    {"pooling": "cls", "projection": 8, "activation": "tanh", "tied": False},
    {"query_prompt": "query: ", "learn_temperature": True}, {"projection": 8, "activation": "gelu"},
    {"pooling": "last"}, {"pooling": "weightedmean"},
])  # fmt: skip
def test_what_dpr_saves_loads_in_sentence_transformers_and_back_with_the_same_scores(tmp_path, options):
    scorer = DPR(encoder(), **options)
    if not scorer.tied:
        nn.init.normal_(next(scorer.doc_encoder.parameters()), std=0.3)
    scorer.save(tmp_path / "ours", max_tokens=60, max_query_tokens=30)
    single = 2 + (4 if options.get("query_prompt") else 0)
    mine = vectors(scorer, QUERIES, DOCS, tmp_path, 30 - single, 60 - 2)
    model = SentenceTransformer(str(tmp_path / "ours"), device="cpu")
    torch.testing.assert_close(mine * 0.05, theirs(model), rtol=1e-5, atol=1e-5)
    back = DPR.load(tmp_path / "ours")
    assert back.text_limits == (30 - single, 58)
    (tmp_path / "again").mkdir()
    torch.testing.assert_close(
        vectors(back, QUERIES, DOCS, tmp_path / "again", *back.text_limits), mine, rtol=0, atol=0
    )


@pytest.mark.parametrize("strategy", ["fixed", "min", None])
@pytest.mark.parametrize("attend", [False, True])
@pytest.mark.parametrize("markers", [("[unused0] ", "[unused1] "), ("[Q] ", "[D] "), ("", "")])
def test_a_multi_vector_encoder_loads_as_colbert_with_the_same_scores(tmp_path, bert, strategy, attend, markers):
    torch.manual_seed(1)
    expansion = {"strategy": strategy, "attend": attend, "length": 16} if strategy else None
    model = MultiVectorEncoder(
        modules=[
            Transformer(str(bert), document_length=40, query_expansion=expansion),
            Dense(32, 12, bias=False, activation_function=nn.Identity(), module_input_name="token_embeddings"),
            MultiVectorMask(skiplist_words=PUNCTUATION), Normalize(module_input_name="token_embeddings"),
        ],
        prompts={"query": markers[0], "document": markers[1]}, device="cpu",
    )  # fmt: skip
    if markers[0].startswith("[u"):
        model._register_prefix_tokens(
            {"query": markers[0], "document": markers[1]}
        )  # as their loaders do for such checkpoints
    model.save(str(tmp_path / "theirs"))
    scorer = load_scorer(tmp_path / "theirs")
    assert isinstance(scorer, ColBERT)
    assert (scorer.query_length, scorer.attend_to_expansion) == (16 if strategy else 0, attend and strategy is not None)
    torch.testing.assert_close(
        vectors(scorer, QUERIES, DOCS, tmp_path, *scorer.text_limits), theirs(model), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("options", [
    {}, {"cut_queries": True, "query_length": 12}, {"query_length": 0, "mask_punctuation": False, "projection": None},
    {"attend_to_expansion": True}, {"query_prompt": "[Q]", "doc_prompt": "[D]"}, {"similarity": "dot"},
])  # fmt: skip
def test_what_colbert_saves_loads_in_sentence_transformers_and_back_with_the_same_scores(tmp_path, bert, options):
    from ranker.export._module_weights import read_encoder

    scorer = ColBERT(read_encoder(bert, DEFAULT)[0], **{"projection": 12, **options})
    query, doc = scorer.layouts()
    scorer.save(tmp_path / "ours", max_tokens=40, max_query_tokens=36)
    limits = ((12 if scorer.cut_queries else 36) - query.num_special, 40 - doc.num_special)
    mine = vectors(scorer, QUERIES, DOCS, tmp_path, *limits)
    model = MultiVectorEncoder(str(tmp_path / "ours"), device="cpu")
    torch.testing.assert_close(mine, theirs(model), rtol=1e-6, atol=1e-5)
    back = ColBERT.load(tmp_path / "ours")
    assert back.text_limits == limits
    assert tokenizer_fingerprint(back.encoder.tokenizer) == tokenizer_fingerprint(
        scorer.encoder.tokenizer
    )  # token stores stay valid
    (tmp_path / "again").mkdir()
    torch.testing.assert_close(vectors(back, QUERIES, DOCS, tmp_path / "again", *limits), mine, rtol=0, atol=0)


@pytest.mark.parametrize("attend", [False, True])
def test_stanford_colbert_loads_with_the_scores_of_sentence_transformers(tmp_path, bert, attend):
    torch.manual_seed(2)
    folder = tmp_path / "stanford"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((bert / name).read_bytes())
    config = json.loads((bert / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["HF_ColBERT"]}))
    state = {f"bert.{key}": value for key, value in load_file(bert / "model.safetensors").items()}
    save_file({**state, "linear.weight": torch.randn(12, 32)}, folder / "model.safetensors", metadata={"format": "pt"})
    metadata = {
        "query_token_id": "[unused0]",
        "doc_token_id": "[unused1]",
        "query_maxlen": 14,
        "doc_maxlen": 40,
        "dim": 12,
        "mask_punctuation": True,
        "attend_to_mask_tokens": attend,
        "similarity": "cosine",
    }
    (folder / "artifact.metadata").write_text(json.dumps(metadata))
    model = MultiVectorEncoder(str(folder), device="cpu")
    scorer = load_scorer(folder)
    assert isinstance(scorer, ColBERT) and scorer.query_length == 14 and scorer.cut_queries
    torch.testing.assert_close(
        vectors(scorer, QUERIES, DOCS, tmp_path, *scorer.text_limits), theirs(model), rtol=0, atol=1e-5
    )


def test_what_the_models_have_not_is_refused(tmp_path, bert):
    model = SentenceTransformer(modules=[Transformer(str(bert)), Pooling(32, ["cls", "mean"])], device="cpu")
    model.save(str(tmp_path / "two"))
    with pytest.raises(CheckpointError, match="expected one of cls, mean, max, last, weightedmean as pooling, got"):
        DPR.load(tmp_path / "two")
    with pytest.raises(CheckpointError, match="MultiVectorMask"):
        ColBERT.load(tmp_path / "two")
    with pytest.raises(CheckpointError, match="HF_ColBERT"):
        ColBERT.load(bert)
