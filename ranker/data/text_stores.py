"""The token stores of the collections of one data module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np

from ranker.data.collection import Collection
from ranker.data.instructions import refuse_instructions
from ranker.data.scorer_inputs import ScorerInputs, TextLimits
from ranker.data.template import Affixes
from ranker.data.token_store import TokenStore, token_store
from ranker.hashing import fingerprint_texts


class TextStores:
    """Opens the token stores of collections, or builds them; each store is opened once.

    Args:
        inputs: The form of the batches that the scorer reads.
        limits: Maximum text lengths in tokens; the limit of a query includes its instruction.
        longest_query: Maximum length of a query without its instruction, in tokens.
        cache_dir: Folder of the stores.
    """

    def __init__(self, inputs: ScorerInputs, limits: TextLimits, longest_query: int, cache_dir: Path) -> None:
        self._inputs, self._limits, self._longest_query, self._cache_dir = inputs, limits, longest_query, cache_dir
        self._stores: dict[str, TokenStore] = {}

    def docs(self, collection: Collection) -> TokenStore:
        """Return the store of a collection's docs."""
        docs = collection.docs
        return self._store(
            "docs",
            lambda: ((doc.doc_id, doc.full_text) for doc in docs),
            docs.fingerprint,
            self._limits.doc,
            self._inputs.affixes(1),
        )

    def queries(self, collection: Collection) -> TokenStore:
        """Return the store of a collection's queries, with their instructions if the scorer takes instructions."""
        queries, rows = collection.queries, collection.rows
        fingerprint = fingerprint_texts(queries.items()) if rows is None else rows.queries.fingerprint
        texts: Callable[[], Iterable[tuple[str, str]]] = queries.items
        instructed, instructions = self._inputs.instructed, collection.instructions
        if instructed is None:
            refuse_instructions({collection.name: collection})
        if instructed is not None:
            tokenizer, longest = self._inputs.tokenizer, self._longest_query
            given: Mapping[str, str] = {} if instructions is None else instructions
            fingerprint += f" with {instructed!r} {longest} {fingerprint_texts(given.items()) if rows is None else ''}"

            def texts() -> Iterable[tuple[str, str]]:
                for query_id, query in queries.items():
                    yield query_id, instructed.text(tokenizer, given.get(query_id, ""), query, longest)

        return self._store("queries", texts, fingerprint, self._limits.query, self._inputs.affixes(0))

    def _store(
        self,
        name: str,
        texts: Callable[[], Iterable[tuple[str, str]]],
        fingerprint: str,
        max_tokens: int,
        affixes: Affixes,
    ) -> TokenStore:
        """Open or build the store of some texts.

        Each text is tokenized together with its affixes. Stores with and without affixes are separate.
        """
        if affixes.prefix:
            fingerprint = f"{fingerprint} after {affixes.prefix!r}"
        if affixes.suffix:
            fingerprint = f"{fingerprint} before {affixes.suffix!r}"
        key = f"{name} {fingerprint}"
        if key not in self._stores:
            self._stores[key] = token_store(
                self._cache_dir,
                name,
                lambda: ((text_id, affixes.around(text)) for text_id, text in texts()),
                fingerprint,
                self._inputs.tokenizer,
                affixes.stored_tokens(max_tokens),
            )
        return self._stores[key]

    def title_lengths(self, collection: Collection) -> np.ndarray | None:
        """Return the number of tokens of each doc's title, in the order of the doc store, if windows repeat titles."""
        windows, docs = self._inputs.windows, collection.docs
        if windows is None or not windows.title:
            return None

        def titles() -> Iterable[tuple[str, str]]:
            return ((doc.doc_id, doc.title) for doc in docs)

        return self._store("titles", titles, docs.fingerprint, windows.title, Affixes()).lengths
