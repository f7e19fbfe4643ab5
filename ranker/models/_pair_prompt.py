"""Prompts for a query and a doc in one sequence: a template with `{instruction}`, `{query}` and `{doc}`.

A row has the tokens of the whole prompt, as if the prompt were tokenized at once. But texts are tokenized only once,
into token stores, while prompts change. So each literal (the fixed text between the fields) is split at a position that
no token can span. The piece next to a text is stored together with the text, and the rest of the literal becomes
special tokens of the layout. After a truncated text, a literal has the tokens of the literal alone.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from typing import Any

from ranker.data.template import Affixes, Template
from ranker.errors import ConfigError
from ranker.models._prompts import SEAMS

log = logging.getLogger(__name__)

FIELDS = ("query", "doc")
# texts whose end may merge with the start of the next text
ENDS = (
    "",
    "apple river",
    "a",
    "end.",
    "7",
    "é",
    "水",
    "(x)",
    "yes?!",
    "a:",
    "-",
    "...",
    "a ",
    "a  ",
    "a\n",
    "a.\n\n",
    "\t",
    "'",
)


def filled(prompt: str, instruction: str, key: str = "model.prompt") -> str:
    """Fill the instruction into a prompt; `{query}` and `{doc}` stay in the result.

    Args:
        prompt: The template.
        instruction: The text for `{instruction}`.
        key: Key of the configuration, for the message.

    Raises:
        ConfigError: `{query}` or `{doc}` is missing or occurs twice, or there is an instruction but no `{instruction}`.
    """
    for field in FIELDS:
        if (count := prompt.count(f"{{{field}}}")) != 1:
            raise ConfigError(f"{key}: expected a template with {{{field}}} once, got it {count} times in {prompt!r}")
    if instruction and "{instruction}" not in prompt:
        raise ConfigError(
            f"model.instruction: expected an empty text, since {key} has no {{instruction}}; got {instruction!r}"
        )
    if any(f"{{{field}}}" in instruction for field in FIELDS):
        raise ConfigError(f"model.instruction: expected a text without {{query}} and {{doc}}, got {instruction!r}")
    return prompt.replace("{instruction}", instruction)


def in_chat(tokenizer: Any, prompt: str) -> str:
    """Put a prompt into the tokenizer's chat template as the user's message; the result ends where the answer begins.

    Raises:
        ConfigError: The tokenizer has no chat template, or the template changes the message.
    """
    if not tokenizer.chat_template:
        raise ConfigError("model.chat: expected false, since the encoder's tokenizer has no chat template; got true")
    message = [{"role": "user", "content": prompt}]
    text: str = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    begin = tokenizer.bos_token
    if begin and text.startswith(begin) and tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id:
        text = text[len(begin) :]  # the tokenizer adds the bos token itself
    if any(text.count(f"{{{field}}}") != 1 for field in FIELDS):
        raise ConfigError(f"model.chat: expected a chat template that keeps the message, got {text[:200]!r}")
    return text


def pair_layout(tokenizer: Any, prompt: str, ends: bool) -> Template:
    """Return the layout of rows that have the tokens of the whole prompt.

    Args:
        tokenizer: A fast tokenizer.
        prompt: The template, with its instruction.
        ends: Whether the row ends with the special tokens that the tokenizer puts after a text, such as `[SEP]`.
    """
    first, query, middle, doc, last = re.split(r"\{(query|doc)\}", prompt)
    single, cuts = Template.of(tokenizer, 1), _Cuts(tokenizer)
    _, before, prefix = cuts.parts(first, left=False)
    head, between, tail = cuts.parts(middle)
    suffix, after, _ = cuts.parts(last, right=False)
    head_ids, suffix_ids = cuts.after_text(head), cuts.after_text(suffix)
    start, end = single.specials[0], single.specials[-1] if ends else ()
    literals = (cuts.ids(before), [*head_ids, *cuts.ids(between)], [*suffix_ids, *cuts.ids(after)])
    segments: tuple[tuple[int, ...], ...] = ()
    if single.special_segments:
        first_segments, last_segments = single.special_segments[0], single.special_segments[-1] if ends else ()
        of_literals = [(single.segments[0],) * len(literal) for literal in literals]
        segments = ((*first_segments, *of_literals[0]), of_literals[1], (*of_literals[2], *last_segments))
    affixes = (
        Affixes(prefix, cuts.shared(prefix), head, len(head_ids)),
        Affixes(tail, cuts.shared(tail), suffix, len(suffix_ids)),
    )
    return Template(
        specials=((*start, *literals[0]), tuple(literals[1]), (*literals[2], *end)),
        segments=single.segments * 2,
        special_segments=segments,
        affixes=affixes if query == "query" else affixes[::-1],
        doc_first=doc == "query",
    )


class _Cuts:
    """Finds positions in the literals of a prompt that no token can span."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend: Any = tokenizer.backend_tokenizer
        contents = [token.content for token in tokenizer.added_tokens_decoder.values()]
        self._added = re.compile("|".join(map(re.escape, sorted(contents, key=len, reverse=True))) or "(?!)")

    def ids(self, text: str) -> list[int]:
        """Return the token ids of a text without special tokens around it."""
        tokens: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return tokens

    def after_text(self, literal: str) -> list[int]:
        """Return the token ids of a literal after a text."""
        text, together = self.ids("a"), self.ids("a" + literal)
        return together[len(text) :] if together[: len(text)] == text else self.ids(literal)

    def shared(self, prefix: str) -> int:
        """Return how many tokens at a prefix's start do not depend on which text of `SEAMS` follows the prefix."""
        columns = zip(*(self.ids(prefix + text) for text in SEAMS), strict=False)
        number = 0
        for column in columns:
            if len(set(column)) > 1:
                break
            number += 1
        return number

    def parts(self, literal: str, left: bool = True, right: bool = True) -> tuple[str, str, str]:
        """Split a literal into three pieces: stored with the text before, not stored, stored with the text after.

        Args:
            literal: The literal.
            left: Whether a text is before the literal.
            right: Whether a text is after the literal.
        """
        cuts = [0] if not left else []
        cuts += [cut for cut in self._candidates(literal) if self._is_cut(literal, cut, left, right)]
        cuts += [len(literal)] if not right else []
        if not cuts:  # both texts touch the literal, and no cut is known to be safe
            cut = len(literal.rstrip())
            log.warning(
                "model.prompt: the tokenizer may merge %r with the texts around it; rows may differ from those of the "
                "whole prompt, tokenized at once",
                literal,
            )
            return literal[:cut], "", literal[cut:]
        head, tail = (min(cuts), max(cuts)) if left else (0, max(cuts))
        tail = tail if right else len(literal)
        return literal[:head], literal[head:tail], literal[tail:]

    def _candidates(self, literal: str) -> list[int]:
        """Return the positions between two tokens of a literal, and its ends."""
        return sorted({0, len(literal), *(match.start() for match in re.finditer(r"\b|(?<=\W)|(?=\W)", literal))})

    def _is_cut(self, literal: str, cut: int, left: bool, right: bool) -> bool:
        """Return whether no token can span a position of the literal, with any texts around the literal."""
        before, after = literal[:cut], literal[cut:]
        pairs = [(text + before, after + "a" * right) for text in (ENDS if left else ("",))]
        pairs += [("a" * left + before, after + text) for text in (SEAMS if right else ("",))]
        if any(self.ids(one + other) != self.ids(one) + self.ids(other) for one, other in pairs):
            return False
        ends = [match.span() for match in self._added.finditer(literal)]
        if any(cut in span for span in ends):
            return True
        return all(self._splits(one, other) for one, other in pairs)

    def _splits(self, one: str, other: str) -> bool:
        """Return whether pre-tokenization splits between two texts, so that no vocabulary can merge their tokens."""
        if self._backend.pre_tokenizer is None:
            return False

        def pieces(text: str) -> list[str]:
            normal = self._backend.normalizer.normalize_str(text) if self._backend.normalizer is not None else text
            return [piece for piece, _ in self._backend.pre_tokenizer.pre_tokenize_str(normal)]

        return pieces(one + other) == pieces(one) + pieces(other)


def token_of(tokenizer: Any, word: str, before: str, key: str) -> int:
    """Return the token of a word after a text.

    Args:
        tokenizer: A fast tokenizer.
        word: The word.
        before: The text.
        key: Key of the configuration, for the message.

    Raises:
        ConfigError: After the text, the word is not a single token.
    """
    ids: Callable[[str], Sequence[int]] = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    alone, together = ids(before), ids(before + word)
    tokens = together[len(alone) :]
    if len(tokens) != 1 or together[: len(alone)] != alone or tokens[0] == tokenizer.unk_token_id:
        pieces = tokenizer.convert_ids_to_tokens(ids(word))
        raise ConfigError(
            f"{key}: expected a word that is one token after the prompt, got {word!r}, which is {pieces}; take another "
            "word, optionally with a blank before it"
        )
    return int(tokens[0])
