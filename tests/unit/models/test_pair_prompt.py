"""Rows with a prompt have the tokens of the whole prompt tokenized at once, even if tokens merge across parts."""

from itertools import product

import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from ranker.data.collate import Collator
from ranker.data.scorer_inputs import ScorerInputs, TextLimits
from ranker.data.token_store import build_token_store
from ranker.encoders.tiny import tiny_tokenizer
from ranker.errors import ConfigError
from ranker.models._pair_prompt import filled, in_chat, pair_layout, token_of
from tests.zoo.texts import CORPUS
from tests.zoo.vocabularies import VOCABULARIES, tokenizer_json

# the pre-tokenizer of Llama 3 and Qwen: punctuation takes the line ends after it, a word the blank before it
PIECES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
PIECES += r"|\s+(?!\S)|\s+"
QUERIES = ("apple river", "what?", "a:", "7", " it's ", "水")
DOCS = ("the river.", "end.\n\n", "(x)", " b", "...", "'s", "a  ", "", "well-known: query\n")
PROMPTS = (
    "Query: {query}\n\nDocument: {doc}\n\nRelevant:",
    "{query}{doc}",
    "{query}\n{doc}\n",
    "({query}):'{doc}'",
    "Doc:\n{doc}\nquery:\t{query} ?",
    "the {query} of {doc} river",
)
LIMITS = TextLimits(500, 500)
UNSAFE = PROMPTS[1:5]  # nothing between the texts at which all tokenizers split


def llama3() -> PreTrainedTokenizerFast:
    """A byte-level BPE with the pre-tokenizer of Llama 3, trained on texts whose ends merge."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    corpus = [*CORPUS, *(f"{text}.\n\n{text}?\n({text}):\n\n...\n" for text in CORPUS)]
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=["<|begin|>", "<|end|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    backend.train_from_iterator(corpus, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", pair="<|begin|> $A $B", special_tokens=[("<|begin|>", 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|begin|>", eos_token="<|end|>")


def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    if name == "pieces":
        return llama3()
    names = {f"{role}_token": token for role, token in VOCABULARIES[name].roles.items()}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(tokenizer_json(name)), **names)


def collator_of(tokenizer, prompt, pairs, folder, limits=LIMITS, ends=True) -> Collator:
    """The collator over token stores of the pairs' texts."""
    layout = pair_layout(tokenizer, prompt, ends)
    stores = []
    for number, (texts, limit) in enumerate(zip(zip(*pairs, strict=True), (limits.query, limits.doc), strict=True)):
        own = layout.affixes_of(number)
        rows = [(str(i), own.prefix + text + own.suffix) for i, text in enumerate(texts)]
        longest = limit + own.prefix_tokens + (own.suffix_tokens + 1 if own.suffix else 0)
        stores.append(build_token_store(rows, folder / f"{number}", tokenizer, longest, fingerprint="x"))
    return Collator.of(ScorerInputs(tokenizer, "pairs", 1000, pair=layout), *stores, limits)


def rows_of(collator) -> list[list[int]]:
    """The tokens of the pair of each query and doc of the same row."""
    numbers = np.arange(len(collator.queries))
    pairs = collator.collate(numbers, numbers[:, None], numbers[:, None] * 0.0, numbers, 1.0).pairs
    return [row.tolist() for row in pairs.tokens.split(pairs.cu_seqlens.diff().tolist())]


@pytest.mark.parametrize(
    "name", ["pieces", "bert", "roberta", "qwen", "llama3", "gpt2", "llama", "gemma", "xlm-roberta", "t5"]
)
@pytest.mark.parametrize("prompt", PROMPTS)
def test_rows_are_those_of_the_whole_prompt(name, prompt, tmp_path, caplog):
    tokenizer, pairs = tokenizer_of(name), list(product(QUERIES, DOCS))
    rows = rows_of(collator_of(tokenizer, prompt, pairs, tmp_path))
    different = [
        (pair, tokenizer.convert_ids_to_tokens(row))
        for pair, row in zip(pairs, rows, strict=True)
        if row != tokenizer(prompt.replace("{query}", pair[0]).replace("{doc}", pair[1]))["input_ids"]
    ]
    if "may merge" in caplog.text:
        assert prompt in UNSAFE
    else:
        assert not different, (len(different), different[:3])


def test_a_text_that_is_cut_is_followed_by_the_literal(tmp_path):
    """The limit counts the text's tokens alone; the query is never cut for a long doc."""
    tokenizer, prompt = llama3(), "Query: {query}\n\nDocument: {doc}\n\nRelevant:"
    ids = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    query, doc = "which river of stom?", "the river. " * 40
    for limit, room in ((6, 500), (500, 40)):
        folder = tmp_path / f"{limit}"
        folder.mkdir()
        collator = collator_of(tokenizer, prompt, [(query, doc)], folder, TextLimits(500, limit, room))
        (row,) = rows_of(collator)
        start = tokenizer(f"Query: {query}\n\nDocument:")["input_ids"]
        end = ids("\n\nRelevant:")
        kept = min(limit, room - len(start) - len(end))
        assert row == [*start, *ids(" " + doc)[:kept], *end]
    # the last token of a whole doc merges with the line's end, and counts as the literal's
    whole = "the river."
    for limit, merged in ((len(ids(" " + whole)) - 1, True), (len(ids(" " + whole)) - 2, False)):
        folder = tmp_path / f"merged{merged}"
        folder.mkdir()
        (row,) = rows_of(collator_of(tokenizer, prompt, [(query, whole)], folder, TextLimits(500, limit)))
        expected = tokenizer(f"Query: {query}\n\nDocument: {whole}\n\nRelevant:")["input_ids"]
        assert (row == expected) is merged
    assert ids(".\n\n") == ids(whole + "\n\n")[-1:] != ids("\n\n")


def test_faults_in_one_line():
    with pytest.raises(ConfigError, match=r"^model\.prompt: expected a template with \{doc\} once, got it 0 times"):
        filled("Query: {query}", "")
    with pytest.raises(ConfigError, match=r"^model\.prompt: expected a template with \{query\} once, got it 2 times"):
        filled("{query} {query} {doc}", "")
    with pytest.raises(ConfigError, match=r"^model\.instruction: expected an empty text, since model\.prompt has no"):
        filled("{query} {doc}", "Judge.")
    with pytest.raises(ConfigError, match=r"^model\.chat: expected false, since the encoder's tokenizer has no chat"):
        in_chat(tiny_tokenizer(), "{query} {doc}")
    with pytest.raises(
        ConfigError, match=r"^model\.yes_word: expected a word that is one token after the prompt, got 'yes'"
    ):
        token_of(tiny_tokenizer(), "yes", "answer: ", "model.yes_word")


def test_a_budget_smaller_than_the_template(tmp_path):
    prompt = "which query is the apple? {query} passage: {doc} well?"
    with pytest.raises(
        ConfigError, match=r"^max_pair_tokens: expected at least \d+ tokens for a pair with its prompt, got 9"
    ):
        collator_of(tiny_tokenizer(), prompt, [("a", "b")], tmp_path, TextLimits(5, 5, 9))


def test_a_chat_template(tmp_path):
    """The message is in the template as it stands; the tokenizer's own first token is not there twice."""
    tokenizer = llama3()
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}<|end|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}assistant\n{% endif %}"
    )
    prompt = in_chat(tokenizer, "Query: {query}\nDocument: {doc}")
    assert prompt == "<|end|>user\nQuery: {query}\nDocument: {doc}<|end|>\nassistant\n"
    pairs = [("what?", "the river."), ("a", "end.\n")]
    for (query, doc), row in zip(pairs, rows_of(collator_of(tokenizer, prompt, pairs, tmp_path)), strict=True):
        message = [{"role": "user", "content": f"Query: {query}\nDocument: {doc}"}]
        expected = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
        assert row == expected


def test_special_tokens_in_a_text_are_text(tmp_path):
    tokenizer = llama3()
    (row,) = rows_of(collator_of(tokenizer, "{query} ; {doc}", [("a", "b <|end|> c")], tmp_path))
    assert tokenizer.eos_token_id not in row
    assert torch.tensor(row).eq(0).sum() == 1
