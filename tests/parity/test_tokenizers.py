"""Scores equal sentence-transformers' with byte-level BPE, SentencePiece and WordPiece: prompts, and pairs of texts."""

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    BertConfig,
    BertModel,
    Gemma3TextConfig,
    Gemma3TextModel,
    GPT2Config,
    GPT2Model,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3Model,
    RobertaConfig,
    RobertaForSequenceClassification,
    RobertaModel,
    T5Config,
    T5EncoderModel,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
    XLMRobertaModel,
)

from ranker.checkpoint import load_scorer
from ranker.data.collection import Collection, Doc, MemoryDocs, Splits
from ranker.data.datamodule import RankData
from ranker.data.options import BatchOptions
from ranker.data.scorer_inputs import ScorerInputs, TextLimits
from ranker.data.template import Template
from ranker.encoders.encoder import Encoder
from ranker.models._prompts import with_prompt
from ranker.models.colbert import ColBERT
from ranker.models.dpr import DPR
from ranker.models.monobert import MonoBERT

pytest.importorskip("sentence_transformers")
from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from sentence_transformers.sentence_transformer.modules import Pooling

QUERIES = ["apple river", "The 7 seas", "é", "水", " two  blanks", "(x) 's", "which river, how long and where " * 4]
DOCS = ["river apple.", "seas", "", "a\nb", "long text of the river " * 20, "7"]
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
CORPUS = [*QUERIES, *DOCS, "query: passage: which river", "the apple and the river"] * 3


def byte_level() -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=350, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    return backend


def metaspace() -> Tokenizer:
    backend = Tokenizer(models.Unigram())
    backend.normalizer, backend.pre_tokenizer = normalizers.NFKC(), pre_tokenizers.Metaspace()
    backend.train_from_iterator(
        CORPUS, trainers.UnigramTrainer(vocab_size=150, special_tokens=SPECIAL, unk_token="<unk>")
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return backend


def wordpiece() -> Tokenizer:
    backend = Tokenizer(models.WordPiece(unk_token="<unk>"))
    backend.normalizer, backend.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    backend.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=200, special_tokens=[*SPECIAL, "[unused0]"])
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return backend


def prefixed_byte_level() -> Tokenizer:
    """Byte-level BPE that puts a blank before a text, as in RoBERTa's tokenizers with `add_prefix_space`."""
    backend = byte_level()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return backend


def bpe_of_whole_texts(normalizer: normalizers.Normalizer) -> Tokenizer:
    """SentencePiece's BPE: a blank is `▁`, and merges may cross words, as in Gemma and Llama 2."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizer
    # tokens of a whole text would hide the seams
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL, max_token_length=8)
    backend.train_from_iterator(CORPUS, trainer)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return backend


def gemma() -> Tokenizer:
    return bpe_of_whole_texts(normalizers.Replace(" ", "▁"))


def llama() -> Tokenizer:
    return bpe_of_whole_texts(normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]))


def metaspace_at_the_start() -> Tokenizer:
    """Metaspace that adds a blank before a text but not after a special token, as Llama's does with `legacy=False`."""
    backend = metaspace()
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    return backend


def t5() -> Tokenizer:
    backend = metaspace()
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    return backend


FAMILIES = {
    "prefixed_byte_level": (prefixed_byte_level, RobertaConfig, RobertaModel),
    "gemma": (gemma, RobertaConfig, RobertaModel),
    "llama": (llama, RobertaConfig, RobertaModel),
    "metaspace_at_the_start": (metaspace_at_the_start, XLMRobertaConfig, XLMRobertaModel),
    "t5": (t5, XLMRobertaConfig, XLMRobertaModel),
    "byte_level": (byte_level, RobertaConfig, RobertaModel),
    "metaspace": (metaspace, XLMRobertaConfig, XLMRobertaModel),
    "wordpiece": (wordpiece, BertConfig, BertModel),
}


def parts(family: str) -> tuple[torch.nn.Module, PreTrainedTokenizerFast]:
    """A random model with a tokenizer of its own."""
    make, config, model = FAMILIES[family]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=make(),
        bos_token="<s>",
        cls_token="<s>",
        pad_token="<pad>",
        sep_token="</s>",
        eos_token="</s>",
        unk_token="<unk>",
        mask_token="<mask>",
        model_max_length=60,
    )
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    return model(
        config(vocab_size=len(tokenizer), pad_token_id=1, initializer_range=0.3, **sizes), add_pooling_layer=False
    ), tokenizer


@pytest.fixture(params=list(FAMILIES))
def folder(request, tmp_path):
    model, tokenizer = parts(request.param)
    model.save_pretrained(tmp_path / "plain")
    tokenizer.save_pretrained(tmp_path / "plain")
    return request.param, tmp_path


def ours(scorer, cache, query: int | None = None, doc: int | None = None) -> torch.Tensor:
    """Scores [queries, docs] by the token stores and collators of a search."""
    collection = Collection(
        "x",
        MemoryDocs(Doc(f"d{i}", text) for i, text in enumerate(DOCS)),
        {f"q{i}": t for i, t in enumerate(QUERIES)},
        {},
    )
    limits = scorer.text_limits or (query, doc)
    data = RankData(
        Splits(None, None, {}),
        ScorerInputs.of(scorer),
        BatchOptions(),
        TextLimits(*limits),
        cache_dir=cache,
    )
    collator = data.collator(collection)
    scorer.eval()
    with torch.no_grad():
        queries = scorer.encode_queries(collator.query_batch(np.arange(len(QUERIES))))
        return scorer.score_block(queries, scorer.encode_docs(collator.doc_batch(np.arange(len(DOCS)))))


def theirs(model) -> torch.Tensor:
    return model.similarity(model.encode_query(QUERIES), model.encode_document(DOCS)).cpu().float()


PROMPTS = [
    ("query: ", "passage: "),
    ("query:", ""),
    ("the ", "the apple"),
    ("", "</s> x: "),
    ("apple\n", "<s>"),
    ("river", "[unused0]"),
    ("Instruct: Given a river, find apples\nQuery:", ""),
]


@pytest.mark.parametrize("prompts", PROMPTS)
def test_pc2_10_prompts_of_a_sentence_transformer(folder, prompts, caplog):
    family, path = folder
    model = SentenceTransformer(
        modules=[Transformer(str(path / "plain")), Pooling(32, "mean"), Normalize()], device="cpu",
        prompts=dict(zip(("query", "document"), prompts, strict=True)),
    )  # fmt: skip
    model.save(str(path / "theirs"))
    mine = ours(load_scorer(path / "theirs"), path / "cache")
    if family == "metaspace_at_the_start" and prompts[1] == "<s>":
        assert "prompt '<s>': the tokenizer cuts texts after it differently than alone" in caplog.text
    else:
        torch.testing.assert_close(mine, theirs(model), rtol=0, atol=1e-5)


def test_pc2_10_prompts_that_are_trained_are_exported_with_the_same_scores(folder):
    family, path = folder
    scorer = DPR(Encoder(*parts(family)), temperature=1.0, query_prompt="query: ", doc_prompt="the [unused0] ")
    query, doc = scorer.layouts()
    scorer.save(path / "ours", 40 + doc.num_added, 12 + query.num_added)
    mine = ours(scorer, path / "cache", 12, 40)
    torch.testing.assert_close(mine, theirs(SentenceTransformer(str(path / "ours"), device="cpu")), rtol=0, atol=1e-5)
    back = load_scorer(path / "ours")
    assert back.text_limits == (12, 40)
    torch.testing.assert_close(ours(back, path / "cache"), mine, rtol=0, atol=0)


@pytest.mark.parametrize("marker", ["[Q]", "[unused0]"])
@pytest.mark.parametrize("added", [False, True])
def test_pc2_10_markers_of_colbert_are_exported_with_the_same_scores(folder, marker, added):
    family, path = folder
    model, tokenizer = parts(family)
    if added:
        tokenizer.add_tokens([AddedToken("[Q]", normalized=False, special=True)], special_tokens=True)
        model.resize_token_embeddings(len(tokenizer))
    scorer = ColBERT(
        Encoder(model, tokenizer),
        projection=8,
        query_prompt=marker,
        doc_prompt="passage:",
        query_length=16,
        mask_punctuation=False,
    )
    query, doc = scorer.layouts()
    assert query.specials[0][-1:] == (scorer.encoder.tokenizer.convert_tokens_to_ids(marker),)  # one token
    scorer.save(path / "ours", 40 + doc.num_added, 20 + query.num_added)
    mine = ours(scorer, path / "cache", 20, 40)
    torch.testing.assert_close(mine, theirs(MultiVectorEncoder(str(path / "ours"), device="cpu")), rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(ours(load_scorer(path / "ours"), path / "cache"), mine, rtol=0, atol=0)


def test_queries_are_filled_with_eos_where_there_is_no_mask_token(folder):
    family, path = folder
    model, tokenizer = parts(family)
    tokenizer.mask_token = None
    tokenizer.padding_side = "left"  # as Llama's and Gemma's
    scorer = ColBERT(Encoder(model, tokenizer), projection=8, query_length=16)
    assert scorer.layouts()[0].fill_token == tokenizer.eos_token_id
    query, doc = scorer.layouts()
    scorer.save(path / "ours", 40 + doc.num_added, 20 + query.num_added)
    mine = ours(scorer, path / "cache", 20, 40)
    torch.testing.assert_close(mine, theirs(MultiVectorEncoder(str(path / "ours"), device="cpu")), rtol=1e-6, atol=1e-5)
    assert load_scorer(path / "ours").layouts()[0] == query


def test_pc2_10_a_marker_that_a_multi_vector_folder_lets_be_cut_is_cut(folder):
    _, path = folder
    model = MultiVectorEncoder(
        modules=[
            Transformer(str(path / "plain")),
            Dense(32, 8, bias=False, activation_function=torch.nn.Identity(), module_input_name="token_embeddings"),
            MultiVectorMask(skiplist_words=[]),
            Normalize(module_input_name="token_embeddings"),
        ],
        prompts={"query": "[unused0]", "document": "apple "},
        device="cpu",
    )
    model.save(str(path / "theirs"))
    scorer = load_scorer(path / "theirs")
    assert isinstance(scorer, ColBERT)
    # in float64, since a random projection gives vectors so short that norming them magnifies float32's rounding
    scorer.double(), model.double()
    torch.testing.assert_close(ours(scorer, path / "cache").double(), theirs(model).double(), rtol=1e-6, atol=1e-5)


def test_pc2_10_wordpiece_keeps_stores_without_prompts_and_others_have_stores_of_their_own():
    for family, prefix in (("wordpiece", ""), ("byte_level", "query: "), ("metaspace", "query: ")):
        tokenizer = parts(family)[1]
        assert with_prompt(tokenizer, Template.of(tokenizer, 1), "query: ").prefix == prefix
    tokenizer = parts("byte_level")[1]
    begun = with_prompt(tokenizer, Template.of(tokenizer, 1), "</s> query: ")
    assert begun.specials[0] == (0, 2) and begun.prefix == " query: "
    assert with_prompt(tokenizer, Template.of(tokenizer, 1), "<s>").specials[0] == (0, 0)
    assert begun.num_added == begun.num_special + len(tokenizer(" query:", add_special_tokens=False)["input_ids"])


def test_pc2_10_a_prompt_that_no_layout_can_follow_is_reported(caplog):
    """After a special token SentencePiece may begin a text without the blank that it has by itself."""
    tokenizer = parts("metaspace")[1]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    with_prompt(tokenizer, Template.of(tokenizer, 1), "<s>")
    assert "prompt '<s>': the tokenizer cuts texts after it differently than alone" in caplog.text


def gpt2() -> Tokenizer:
    """A tokenizer like GPT-2's: byte-level BPE without special tokens around a text."""
    backend = byte_level()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    return backend


def qwen() -> Tokenizer:
    """A tokenizer like Qwen3-Embedding's: byte-level BPE with a special token after a text and none before it."""
    backend = byte_level()
    backend.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)]),
        ]
    )
    return backend


SIZES = {"vocab_size": 350, "pad_token_id": 1, "initializer_range": 0.3}
FORMS = {
    "SGPT": (
        gpt2,
        lambda: GPT2Model(GPT2Config(n_embd=32, n_layer=2, n_head=2, **SIZES)),
        lambda: [Pooling(32, "weightedmean")],
        {},
    ),
    "Qwen3-Embedding": (
        qwen,
        lambda: Qwen3Model(
            Qwen3Config(
                hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
                intermediate_size=64, **SIZES,
            )
        ),
        lambda: [Pooling(32, "lasttoken"), Normalize()],
        {"query": "Instruct: Given a river, find apples\nQuery:"},
    ),
    "EmbeddingGemma": (
        gemma,
        lambda: Gemma3TextModel(
            Gemma3TextConfig(
                hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
                intermediate_size=64, sliding_window=16, use_bidirectional_attention=True, **SIZES,
            )
        ),
        lambda: [
            Pooling(32, "mean"), Dense(32, 48, False, torch.nn.Identity()), Dense(48, 32, False, torch.nn.Identity()),
            Normalize(),
        ],
        {"query": "task: search result | query: ", "document": "title: none | text: "},
    ),
    "sentence-t5": (
        t5,
        lambda: T5EncoderModel(
            T5Config(d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, vocab_size=150, pad_token_id=1)
        ),
        lambda: [Pooling(32, "mean"), Dense(32, 16, bias=False, activation_function=torch.nn.Identity()), Normalize()],
        {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_folders_in_the_form_of_known_bi_encoders(tmp_path, form):
    make, model, modules, prompts = FORMS[form]
    torch.manual_seed(0)
    model().eval().save_pretrained(tmp_path / "plain")
    side = "right" if form == "SGPT" else "left"  # learned positions count from the first token of padding there
    names = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=make(), model_max_length=60, padding_side=side, **names).save_pretrained(
        tmp_path / "plain"
    )
    other = SentenceTransformer(
        modules=[Transformer(str(tmp_path / "plain")), *modules()], device="cpu", prompts=prompts
    )
    other.save(str(tmp_path / "theirs"))
    scorer = load_scorer(tmp_path / "theirs")
    mine = ours(scorer, tmp_path / "cache")
    # an empty text without special tokens has no tokens there
    docs = [i for i, text in enumerate(DOCS) if text or form != "SGPT"]
    torch.testing.assert_close(mine[:, docs], theirs(other)[:, docs], rtol=0, atol=1e-5)
    scorer.save(tmp_path / "ours", 60, 60)
    again = SentenceTransformer(str(tmp_path / "ours"), device="cpu")
    torch.testing.assert_close(theirs(again)[:, docs], mine[:, docs], rtol=0, atol=1e-5)


def test_a_tokenizer_without_token_types_has_none_in_training_and_in_other_programs(tmp_path):
    model, tokenizer = parts("wordpiece")
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    torch.manual_seed(1)
    scorer = MonoBERT(Encoder(model, tokenizer)).eval()
    torch.nn.init.normal_(scorer.head.weight)
    layout = ScorerInputs.of(scorer)
    collection = Collection("x", MemoryDocs([Doc("d", "river apple")]), {"q": "apple river"}, {})
    data = RankData(
        Splits(None, None, {}), layout, BatchOptions(), TextLimits(50, 50, 60), cache_dir=tmp_path / "cache"
    )
    batch = data.collator(collection).collate(np.array([0]), np.array([[0]]), np.zeros((1, 1)), np.array([0]), 1.0)
    assert not batch.pairs.segments.any()
    scorer.save(tmp_path / "model", max_tokens=60)
    other = CrossEncoder(str(tmp_path / "model"), device="cpu", activation_fn=torch.nn.Identity())
    with torch.no_grad():
        assert scorer(batch).item() == pytest.approx(other.predict([("apple river", "river apple")])[0], abs=1e-5)


@pytest.mark.parametrize(("family", "classifier"), [
    ("byte_level", RobertaForSequenceClassification), ("metaspace", XLMRobertaForSequenceClassification)
])  # fmt: skip
def test_pc2_22_pairs_of_roberta_and_xlm_r(tmp_path, family, classifier):
    encoder, tokenizer = parts(family)
    config = encoder.config
    config.num_labels = 1
    torch.manual_seed(1)
    classifier(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    scorer = load_scorer(tmp_path).eval()
    collection = Collection(
        "x",
        MemoryDocs(Doc(f"d{i}", text) for i, text in enumerate(DOCS)),
        {f"q{i}": t for i, t in enumerate(QUERIES)},
        {},
    )
    data = RankData(
        Splits(None, None, {}),
        ScorerInputs.of(scorer),
        BatchOptions(),
        TextLimits(60, 60, 60),
        cache_dir=tmp_path / "cache",
    )
    rows = np.arange(len(QUERIES))
    grid = np.tile(np.arange(len(DOCS)), (len(QUERIES), 1))
    batch = data.collator(collection).collate(rows, grid, np.zeros(grid.shape), rows, 1.0)
    # two separators between the texts, no other start, and one segment
    row = batch.pairs.tokens[: int(batch.pairs.cu_seqlens[1])].tolist()
    assert row == tokenizer(QUERIES[0], DOCS[0])["input_ids"] and row.count(0) == 1 and row.count(2) == 3
    with torch.no_grad():
        mine = scorer(batch)
    theirs = CrossEncoder(str(tmp_path), device="cpu", activation_fn=torch.nn.Identity())
    pairs = [(query, doc) for query in QUERIES for doc in DOCS]
    expected = torch.from_numpy(theirs.predict(pairs)).view(mine.shape)
    short = torch.tensor([len(tokenizer(*pair)["input_ids"]) <= 60 for pair in pairs]).view(mine.shape)
    assert short.sum() > 20
    torch.testing.assert_close(mine[short], expected[short], rtol=0, atol=1e-5)
