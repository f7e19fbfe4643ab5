"""Tokenizers of the zoo: algorithms, special tokens and layouts of hub checkpoints, trained on the zoo's texts."""

import math
import re
from collections import Counter
from dataclasses import dataclass
from functools import cache

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.zoo.texts import CORPUS

SIZE = 800


@dataclass(frozen=True)
class Vocabulary:
    """A kind of tokenizer.

    Args:
        algorithm: `wordpiece`, `unigram` (SentencePiece), `byte_level` (BPE over bytes) or `metaspace` (BPE of
            SentencePiece).
        specials: Special tokens in the order of their ids.
        single: Layout of one text, an argument of `TemplateProcessing`.
        pair: Layout of two texts.
        roles: Role, such as `pad` or `cls` -> special token.
    """

    algorithm: str
    specials: tuple[str, ...]
    single: str
    pair: str
    roles: dict[str, str]


def _of(algorithm: str, specials: str, single: str, pair: str, **roles: str) -> Vocabulary:
    return Vocabulary(algorithm, tuple(specials.split()), single, pair, roles)


CLS, CLS_PAIR = "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1"
S, S_PAIR = "<s> $A </s>", "<s> $A </s> </s> $B </s>"
BERT = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
ROBERTA = {"pad": "<pad>", "unk": "<unk>", "cls": "<s>", "sep": "</s>", "mask": "<mask>", "bos": "<s>", "eos": "</s>"}
ALBERT = BERT | {"pad": "<pad>", "unk": "<unk>"}
END = "<|endoftext|>"
VOCABULARIES = {
    "bert": _of("wordpiece", "[PAD] [unused0] [unused1] [unused2] [UNK] [CLS] [SEP] [MASK]", CLS, CLS_PAIR, **BERT),
    "mpnet": _of("wordpiece", "<s> <pad> </s> [UNK] <mask>", S, S_PAIR, **(ROBERTA | {"unk": "[UNK]"})),
    "funnel": _of(
        "wordpiece", "<pad> <unk> <cls> <sep> <mask> <s> </s>", "<cls>:2 $A <sep>", "<cls>:2 $A <sep> $B:1 <sep>:1",
        pad="<pad>", unk="<unk>", cls="<cls>", sep="<sep>", mask="<mask>", bos="<s>", eos="</s>",
    ),
    "roberta": _of("byte_level", "<s> <pad> </s> <unk> <mask>", S, S_PAIR, **ROBERTA),
    "deberta": _of("byte_level", "[PAD] [CLS] [SEP] [UNK] [MASK]", CLS, CLS_PAIR, **BERT),
    "modernbert": _of("byte_level", "[UNK] [CLS] [SEP] [PAD] [MASK]", CLS, "[CLS] $A [SEP] $B [SEP]", **BERT),
    "xlm-roberta": _of("unigram", "<s> <pad> </s> <unk> <mask>", S, S_PAIR, **ROBERTA),
    "camembert": _of("unigram", "<s>NOTUSED <pad> </s>NOTUSED <unk> <s> </s> <mask>", S, S_PAIR, **ROBERTA),
    "albert": _of("unigram", "<pad> <unk> [CLS] [SEP] [MASK]", CLS, CLS_PAIR, **ALBERT),
    "rembert": _of("unigram", "<pad> </s> <unk> [CLS] [SEP] [MASK]", CLS, CLS_PAIR, **ALBERT),
    "deberta-v2": _of("unigram", "[PAD] [CLS] [SEP] [UNK] [MASK]", CLS, CLS_PAIR, **BERT),
    "big_bird": _of(
        "unigram", "<pad> </s> <s> <unk> [SEP] [MASK] [CLS]", CLS, CLS_PAIR, **ALBERT, bos="<s>", eos="</s>"
    ),
    "xlnet": _of(
        "unigram", "<unk> <s> </s> <cls> <sep> <pad> <mask>", "$A <sep> <cls>:2", "$A <sep> $B:1 <sep>:1 <cls>:2",
        pad="<pad>", unk="<unk>", cls="<cls>", sep="<sep>", mask="<mask>", bos="<s>", eos="</s>",
    ),
    "reformer": _of("metaspace", "<unk> <s> </s> <pad>", "$A", "$A $B:1", pad="<pad>", unk="<unk>", eos="</s>"),
    "t5": _of("unigram", "<pad> </s> <unk>", "$A </s>", "$A </s> $B </s>", pad="<pad>", unk="<unk>", eos="</s>"),
    "mbart": _of("unigram", "<s> <pad> </s> <unk> en_XX <mask>", "$A </s> en_XX", "$A $B </s> en_XX", **ROBERTA),
    "gpt2": _of("byte_level", END, "$A", "$A $B:1", unk=END, bos=END, eos=END),
    "gpt_neox": _of("byte_level", f"{END} <|padding|>", "$A", "$A $B:1", unk=END, bos=END, eos=END, pad="<|padding|>"),
    "opt": _of(
        "byte_level", "<s> <pad> </s> <unk>", "</s> $A", "</s> $A </s> $B:1",
        pad="<pad>", unk="</s>", bos="</s>", eos="</s>",
    ),
    "llama": _of("metaspace", "<unk> <s> </s>", "<s> $A", "<s> $A <s>:1 $B:1", unk="<unk>", bos="<s>", eos="</s>"),
    "phi3": _of("metaspace", f"<unk> <s> </s> {END}", "$A", "$A $B:1", pad=END, unk="<unk>", bos="<s>", eos=END),
    "gemma": _of(
        "metaspace", "<pad> <eos> <bos> <unk> <mask>", "<bos> $A", "<bos> $A <bos>:1 $B:1",
        pad="<pad>", unk="<unk>", bos="<bos>", eos="<eos>", mask="<mask>",
    ),
    "llama3": _of(
        "byte_level", "<|pad|> <|begin|> <|end|> <|mask|>", "<|begin|> $A", "<|begin|> $A <|begin|>:1 $B:1",
        pad="<|pad|>", bos="<|begin|>", eos="<|end|>", mask="<|mask|>",
    ),
    "qwen": _of("byte_level", f"{END} <|im_start|> <|im_end|>", "$A", "$A $B:1", pad=END, eos="<|im_end|>"),
    "bloom": _of(
        "byte_level", "<unk> <s> </s> <pad>", "$A", "$A $B:1", pad="<pad>", unk="<unk>", bos="<s>", eos="</s>"
    ),
}  # fmt: skip


def _pieces(words: list[str], count: int) -> list[tuple[str, bool, int]]:
    """Return the corpus' characters and its most frequent parts of words: (part, whether it begins a word, count).

    The trainers of WordPiece and Unigram give another vocabulary in each process; this one is always the same.
    """
    counts: Counter[tuple[str, bool]] = Counter()
    for word in words:
        for start in range(len(word)):
            counts.update((word[start:end], start == 0) for end in range(start + 1, len(word) + 1))
    ranked = sorted(counts, key=lambda part: (len(part[0]) > 1, -counts[part] * len(part[0]), part))
    return [(part, begins, counts[part, begins]) for part, begins in ranked[:count]]


def _wordpiece(kind: Vocabulary) -> Tokenizer:
    parts = _pieces(re.findall(r"\w+|[^\w\s]", " ".join(CORPUS).lower()), SIZE - len(kind.specials))
    tokens = [*kind.specials, *(part if begins else f"##{part}" for part, begins, _ in parts)]
    backend = Tokenizer(models.WordPiece({token: i for i, token in enumerate(tokens)}, unk_token=kind.roles["unk"]))
    backend.normalizer, backend.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return backend


def _unigram(kind: Vocabulary) -> Tokenizer:
    parts = _pieces(" ".join(CORPUS).split(), SIZE - len(kind.specials) - 1)
    total = sum(count for *_, count in parts)
    scores = {f"▁{part}" if begins else part: math.log(count / total) for part, begins, count in parts}
    pieces = [*((token, 0.0) for token in kind.specials), ("▁", math.log(1 / total)), *scores.items()]
    backend = Tokenizer(models.Unigram(pieces, unk_id=kind.specials.index(kind.roles["unk"])))
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return backend


def _bpe(kind: Vocabulary) -> Tokenizer:
    options = {"vocab_size": SIZE, "special_tokens": list(kind.specials), "show_progress": False}
    if kind.algorithm == "byte_level":
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        options["initial_alphabet"] = pre_tokenizers.ByteLevel.alphabet()
    else:
        backend = Tokenizer(models.BPE(unk_token=kind.roles["unk"]))
        backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(**options))
    return backend


@cache
def tokenizer_json(name: str) -> str:
    """Return the JSON of a tokenizer by its key in `VOCABULARIES`. Each is made only once in a process."""
    kind = VOCABULARIES[name]
    backend = {"wordpiece": _wordpiece, "unigram": _unigram}.get(kind.algorithm, _bpe)(kind)
    backend.add_special_tokens([token for token in kind.specials if "unused" not in token.lower()])
    used = {part.split(":")[0] for part in f"{kind.single} {kind.pair}".split() if not part.startswith("$")}
    backend.post_processor = processors.TemplateProcessing(
        single=kind.single, pair=kind.pair, special_tokens=[(token, backend.token_to_id(token)) for token in used]
    )
    return backend.to_str()
