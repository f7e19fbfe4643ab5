"""A language model that reads the query and all docs of a list in one row.

Source: "Last but not late interaction", Wang et al., 2025 (arXiv:2509.25085).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from ranker.data.list_rows import JoinedRows, ListTexts, Pieces
from ranker.data.template import Template
from ranker.encoders.encoder import Encoder
from ranker.encoders.execution import DEFAULT, Execution
from ranker.encoders.loading import load_encoder
from ranker.errors import CheckpointError, ConfigError
from ranker.export._list_model import ELSEWHERE, read_options, write_options
from ranker.export._module_weights import write_tokenizer
from ranker.hashing import mix
from ranker.interactions.grid import to_grid
from ranker.interactions.list_windows import ListWindows, Part, score_lists
from ranker.interactions.maxsim import full_precision
from ranker.models._prompts import prefix_of, with_prompt
from ranker.types import RankBatch

log = logging.getLogger(__name__)

TEXT = Template(specials=((), ()), segments=(0,))  # texts without special tokens
PROMPTS = ("Query: {query}", "Document: {doc}")
ORDER = 11  # hashed together with the step's seed, so that the order of docs is independent of other draws
WEIGHTS = "projection.safetensors"


class ListwiseLM(nn.Module):
    r"""Score all docs of a list in one row, from the states at the end of each doc and at the end of the query.

    The row is `<s> Query: q </s> Document: d_1 </s> ... Document: d_n </s> Query: q </s>`. In a causal model a doc
    attends to the first query and to the docs before it, and the second query attends to everything. Let :math:`h_i` be
    the last layer's state at the `</s>` after doc i, :math:`h_q` that at the `</s>` after the second query, and g the
    projection. The score is

    .. math:: s(q, d_i) = g(h_q) \cdot g(h_i) \quad\text{or}\quad \cos(g(h_q), g(h_i)) / \tau

    The paper uses cosines, and adds special tokens after the texts; here each text ends with the tokenizer's end token.
    Inner products are the default here because they learn faster: an untrained model's end tokens have similar states.

    Args:
        encoder: A language model, or another encoder with enough positions for the rows.
        similarity: `dot`, or `cosine`, which divides cosines by the temperature.
        projection: Size of the projected vectors; two linear layers with a ReLU between them compute them. None: no
            projection.
        temperature: The divisor of cosines.
        shuffle: Whether training puts docs in a random order, which depends on the seed, the step and the query.
        window: At inference: largest number of docs in a row, see `ListWindows`; None: all docs ("full ranking",
            arXiv:2412.14574). If a row would have more tokens than the encoder has positions, its docs are divided
            equally among as few rows as possible.
        stride: At inference: number of docs between the starts of two windows.
        merge: At inference: `mean` or `sliding`, see `ListWindows`.

    Raises:
        ConfigError: An option has an unknown value, or the tokenizer has no end token.
    """

    reads = "lists"
    reads_lists = True
    scoring_keys = ("lists", "similarity", "temperature")
    decoder_only = True
    text_limits: tuple[int, int] | None = None

    def __init__(
        self,
        encoder: Encoder,
        similarity: str = "dot",
        projection: int | None = 128,
        temperature: float = 0.05,
        shuffle: bool = True,
        window: int | None = None,
        stride: int | None = None,
        merge: str = "mean",
    ) -> None:
        super().__init__()
        if similarity not in ("cosine", "dot"):
            raise ConfigError(f"model.similarity: expected cosine or dot, got {similarity!r}")
        if not temperature > 0:
            raise ConfigError(f"model.temperature: expected a number above 0, got {temperature}")
        if projection is not None and projection < 1:
            raise ConfigError(f"model.projection: expected at least 1, or null; got {projection}")
        self.encoder, self.similarity, self.temperature, self.shuffle = encoder, similarity, temperature, shuffle
        self.lists = ListWindows(window, stride, merge)
        self.projection: nn.Module = nn.Identity()
        if projection is not None:
            inner, outer = nn.Linear(encoder.dim, projection), nn.Linear(projection, projection)
            self.projection = nn.Sequential(inner, nn.ReLU(), outer)
        tokenizer = encoder.tokenizer
        end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
        if end is None:
            raise ConfigError("encoder: expected a tokenizer with an end token for model=listwise_lm, got none")
        self._literals = [Template.of(tokenizer, 1).specials[0], (int(end),)]
        self._layouts = tuple(
            with_prompt(tokenizer, TEXT, prefix_of(prompt, field, ""))
            for prompt, field in zip(PROMPTS, ("query", "doc"), strict=True)
        )
        self._warned = False

    @property
    def list_rows(self) -> JoinedRows:
        """Describe the lengths of the rows of a list."""
        query, doc = (layout.num_special for layout in self._layouts)
        return JoinedRows(2, len(self._literals[0]) + 2 * (query + 1), doc + 1)

    def layouts(self) -> tuple[Template, Template]:
        """Return the layouts of a query and of a doc, with their prompts and without special tokens."""
        query, doc = self._layouts
        return query, doc

    def forward(self, batch: RankBatch) -> Tensor:
        """Return scores [batch, docs]; 0 in cells without a doc."""
        texts = ListTexts.of(batch, self._literals)
        if self.training or self.lists.are_whole(int(texts.counts.max())):
            scores = self._scores(texts, self._parts(batch, texts), _row_ids(batch))
            return to_grid(scores, batch.doc_mask)

        def score(parts: Sequence[Part]) -> list[np.ndarray]:
            values = self._scores(texts, parts, None, apart=True).detach().double().cpu().numpy()
            return np.split(values, np.cumsum([len(places) for _, places in parts])[:-1])

        found = torch.from_numpy(np.concatenate(score_lists(texts.counts.tolist(), self.lists, score)))
        double = self.encoder.model.dtype == torch.float64
        return to_grid(found.to(texts.tokens.device, torch.float64 if double else torch.float32), batch.doc_mask)

    def _parts(self, batch: RankBatch, texts: ListTexts) -> list[Part]:
        """Return each list with the order of its docs; in training with `shuffle`, the order is random."""
        orders = [np.arange(count) for count in texts.counts]
        if self.training and self.shuffle:
            seed = self.encoder.dropout_seed
            seed = int(torch.randint(2**62, ())) if seed is None else seed
            ids = batch.group_ids.cpu().numpy()
            orders = [np.argsort(mix(seed, ORDER, number, order)) for number, order in zip(ids, orders, strict=True)]
        return list(enumerate(orders))

    def _scores(
        self, texts: ListTexts, parts: Sequence[Part], row_ids: np.ndarray | None, apart: bool = False
    ) -> Tensor:
        """Return the scores of docs.

        Args:
            texts: The texts of the batch.
            parts: For each list or window: the list's index, and the indices of its docs in the order of the row.
            row_ids: Id of each list's row within the step; dropout depends on it, int64 [lists]. None: no ids.
            apart: Whether to return the scores in the order of `parts`; else in the order of the batch's docs.

        Returns:
            The scores, [docs].
        """
        rows = [(number, cut) for number, places in parts for cut in self._rows(texts, number, places)]
        pieces, docs, queries = self._pieces(texts, rows)
        ids = None
        if row_ids is not None:
            owners = np.array([number for number, _ in rows])
            ids = row_ids[owners] + np.arange(len(rows)) - np.searchsorted(owners, owners)
        device = texts.tokens.device
        states = self.encoder(pieces.joined(texts.tokens, ids))
        ends = torch.from_numpy(pieces.ends()).to(device)
        vectors = full_precision(states.index_select(0, ends.index_select(0, torch.from_numpy(docs).to(device))))
        of_queries = full_precision(states.index_select(0, ends.index_select(0, torch.from_numpy(queries).to(device))))
        sizes = torch.tensor([len(cut) for _, cut in rows], device=device)
        with torch.autocast(device.type, enabled=False):
            vectors, of_queries = self._projected(vectors), self._projected(of_queries)
            if self.similarity == "cosine":
                vectors, of_queries = (functional.normalize(part, dim=1) for part in (vectors, of_queries))
                of_queries = of_queries / self.temperature
            scores = (vectors * of_queries.repeat_interleave(sizes, 0, output_size=len(docs))).sum(1)
        if apart:
            return scores
        first = texts.first_docs()
        order = np.concatenate([first[number] + cut for number, cut in rows])
        return torch.zeros_like(scores).index_copy(0, torch.from_numpy(order).to(device), scores)

    def _projected(self, states: Tensor) -> Tensor:
        """Project states in the precision of the projection's weights; return the vectors in full precision."""
        weight = next(self.projection.parameters(), states)
        return full_precision(self.projection(states.to(weight.dtype)))

    def _rows(self, texts: ListTexts, number: int, places: np.ndarray) -> list[np.ndarray]:
        """Divide the docs of a row equally among the smallest number of rows that the encoder can read."""
        fixed = len(self._literals[0]) + 2 * (int(texts.query_lengths[number]) + 1)
        docs = texts.doc_lengths[texts.first_docs()[number] + places] + 1
        for rows in range(1, len(places) + 1):
            cuts = np.array_split(np.arange(len(places)), rows)
            if fixed + max(int(docs[cut].sum()) for cut in cuts) <= self.encoder.max_tokens:
                break
        else:
            raise CheckpointError(
                f"max_doc_tokens: expected rows of at most {self.encoder.max_tokens} tokens, got "
                f"{fixed + int(docs.max())}, the length of one doc and twice the query; lower max_doc_tokens"
            )
        if rows > 1 and not self._warned:
            self._warned = True
            log.warning(
                "model: a list of %d docs has more tokens than the %d positions of the encoder, so it is read in %d "
                "rows, and docs of different rows are not compared; for fewer rows lower max_doc_tokens",
                len(places), self.encoder.max_tokens, rows,
            )  # fmt: skip
        return [places[cut] for cut in cuts]

    def _pieces(self, texts: ListTexts, rows: Sequence[Part]) -> tuple[Pieces, np.ndarray, np.ndarray]:
        """Return rows, and the indices of the pieces that end docs, [docs], and second queries, [rows]."""
        (begin, end), (begin_length, _) = texts.literal_starts, texts.literal_lengths
        first = texts.first_docs()
        starts, lengths, docs, queries, counts = [], [], [], [], []
        at = 0
        for number, places in rows:
            query = (int(texts.query_starts[number]), int(texts.query_lengths[number]))
            numbers = first[number] + places
            found = [(int(begin), int(begin_length)), query, (int(end), 1)]
            for start, length in zip(texts.doc_starts[numbers], texts.doc_lengths[numbers], strict=True):
                found += [(int(start), int(length)), (int(end), 1)]
            found += [query, (int(end), 1)]
            docs.append(at + 4 + 2 * np.arange(len(places)))
            queries.append(at + len(found) - 1)
            counts.append(len(found))
            starts += [start for start, _ in found]
            lengths += [length for _, length in found]
            at += len(found)
        pieces = Pieces(np.array(starts), np.array(lengths), np.zeros(at, dtype=np.int64), np.array(counts))
        return pieces, np.concatenate(docs), np.array(queries)

    def elsewhere(self) -> str:
        """Return a warning for users who load the stored model in other programs."""
        return ELSEWHERE

    def save(self, folder: Path, max_tokens: int) -> None:
        """Write the encoder in transformers' format, and add the options and the projection to the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        self.encoder.model.save_pretrained(folder)
        write_tokenizer(folder, self.encoder, max_tokens)
        state = {name: value.detach().cpu().contiguous() for name, value in self.projection.state_dict().items()}
        if state:
            save_file(state, folder / WEIGHTS)
        options: dict[str, Any] = {"similarity": self.similarity, "temperature": self.temperature}
        options |= {"shuffle": self.shuffle, "projection": len(state["0.bias"]) if state else None}
        lists = asdict(self.lists)
        write_options(folder, {**options, "window": lists.pop("size"), **lists})

    @classmethod
    def load(cls, folder: Path, execution: Execution = DEFAULT) -> Self:
        """Load a folder that `save` wrote.

        Raises:
            CheckpointError: The folder was not written by `save`.
        """
        options = read_options(Path(folder))
        if "similarity" not in options:
            raise CheckpointError(f"{folder}: expected a folder that model=listwise_lm wrote, got one without options")
        scorer = cls(load_encoder(str(folder), **vars(execution)), **options)
        if options["projection"] is not None:
            scorer.projection.load_state_dict(load_file(Path(folder) / WEIGHTS))
        return scorer


def _row_ids(batch: RankBatch) -> np.ndarray | None:
    """Return the id of each list's row within the step; None if the batch has no ids."""
    assert batch.queries is not None
    return None if batch.queries.row_ids is None else batch.queries.row_ids.cpu().numpy()
