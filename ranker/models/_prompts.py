"""Layouts of rows with prompts; as in sentence-transformers, prompt and text are tokenized as one string."""

from __future__ import annotations

import logging
from itertools import takewhile
from typing import Any

from transformers import PreTrainedTokenizerFast

from ranker.data.template import Template
from ranker.errors import ConfigError

log = logging.getLogger(__name__)

# Texts that show whether the tokenizer merges the end of a prompt with the start of a text.
SEAMS = ("", "apple river", "a", "The", "7", "é", "水", "(x)", "'s", "-", ":", "//", "##a", " a", "  a", "\na", "\ta")


def prefix_of(prompt: str, field: str, instruction: str) -> str:
    """Return the text before each query or doc.

    Args:
        prompt: The text itself, or a template that ends with `{query}` or `{doc}` and may contain `{instruction}`.
        field: `query` or `doc`.
        instruction: The text for `{instruction}`.

    Raises:
        ConfigError: The template does not contain the field, or has text after it.
    """
    place = f"{{{field}}}"
    if "{instruction}" in prompt and place not in prompt:
        raise ConfigError(f"model.{field}_prompt: expected a template with {place}, got {prompt!r}")
    if place in prompt and (prompt.count(place) > 1 or not prompt.endswith(place)):
        raise ConfigError(
            f"model.{field}_prompt: expected a template that ends with {place}, since sentence-transformers puts "
            f"prompts before texts; got {prompt!r}"
        )
    return prompt.removesuffix(place).replace("{instruction}", instruction)


def check_instruction(instruction: str, *prompts: str) -> None:
    """Check that at least one prompt contains `{instruction}` if there is an instruction.

    Raises:
        ConfigError: There is an instruction, but no prompt has `{instruction}`.
    """
    if instruction and not any("{instruction}" in prompt for prompt in prompts):
        raise ConfigError(
            "model.instruction: expected a query_prompt or doc_prompt with {instruction}, got an instruction and "
            f"{' and '.join(map(repr, prompts))}"
        )


def with_prompt(tokenizer: PreTrainedTokenizerFast, single: Template, prompt: str) -> Template:
    """Return the layout of texts with a prompt.

    Some tokenizers give a text the same tokens after a prompt as alone (WordPiece after a blank). Then the prompt's
    tokens become special tokens of the layout, and token stores have texts only. Other tokenizers merge the end of the
    prompt with the start of the text: byte-level BPE and SentencePiece join a blank to the next word. Then the part of
    the prompt after its last special token becomes the layout's prefix, and token stores have prefix and text.

    Args:
        tokenizer: The encoder's tokenizer.
        single: The layout of a text without a prompt.
        prompt: The prompt; may be empty.
    """
    if not prompt:
        return single

    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]  # type: ignore[return-value]

    joined = [ids(prompt + text) for text in SEAMS]
    if joined == [ids(prompt) + ids(text) for text in SEAMS] and _splits_at_end(tokenizer, prompt):
        return single.with_prompt(ids(prompt))
    specials = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    end = max((prompt.rfind(token) + len(token) for token in specials if token in prompt), default=0)
    special, prefix = prompt[:end], prompt[end:]
    if joined != [ids(special) + ids(prefix + text) for text in SEAMS]:
        log.warning(
            "prompt %r: the tokenizer cuts texts after it differently than alone; scores may differ from those of "
            "sentence-transformers",
            prompt,
        )
    columns = zip(*(ids(prefix + text) for text in SEAMS), strict=False)  # zip ends with the shortest list
    num_shared = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))
    return single.with_prompt(ids(special), prefix, num_shared)


def text_layouts(tokenizer: PreTrainedTokenizerFast, query_prompt: str, doc_prompt: str) -> tuple[Template, Template]:
    """Return the layouts of a query and of a doc, each alone in a row with its prompt."""
    single = Template.of(tokenizer, 1)
    return with_prompt(tokenizer, single, query_prompt), with_prompt(tokenizer, single, doc_prompt)


def prompt_tokens(tokenizer: PreTrainedTokenizerFast, prompt: str) -> int:
    """Return the number of prompt tokens that Pooling leaves out, with the special tokens at the start.

    sentence-transformers tokenizes the prompt alone and does not count a special token at the prompt's end.
    """
    ids: list[int] = tokenizer(prompt)["input_ids"]  # type: ignore[assignment]
    return len(ids) - (ids[-1] in tokenizer.all_special_ids)


def _splits_at_end(tokenizer: PreTrainedTokenizerFast, prompt: str) -> bool:
    """Whether pre-tokenization always splits after the prompt, so that no vocabulary can merge across the seam."""
    backend: Any = tokenizer.backend_tokenizer

    def pieces(text: str) -> list[str]:
        normal = backend.normalizer.normalize_str(text) if backend.normalizer is not None else text
        return [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(normal)]

    return backend.pre_tokenizer is not None and all(
        pieces(prompt + text) == pieces(prompt) + pieces(text) for text in SEAMS
    )
