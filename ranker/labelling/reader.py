"""Label docs with a reader: the label is log p(answer | query, doc) of a language or sequence-to-sequence model.

REALM (Guu et al., 2020, arXiv:2002.08909), RAG (Lewis et al., 2020, arXiv:2005.11401), Atlas (Izacard et al., 2022,
arXiv:2208.03299) and REPLUG (Shi et al., 2023, arXiv:2301.12652) learn from such labels which docs help to answer.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from ranker.data.collection import Collection
from ranker.data.corpus_files import read_queries
from ranker.encoders.causality import is_causal
from ranker.encoders.model_folder import check_model_folder
from ranker.encoders.transformers_forward import padding_id
from ranker.errors import ConfigError, DataError
from ranker.evaluation.scoring import Devices
from ranker.labelling.shards import ScoreShards

log = logging.getLogger(__name__)

UNREAD = -100  # label of a position without a token to predict


@dataclass(frozen=True)
class Passage:
    """The token ids of a prompt and of its answer.

    Args:
        prompt: Ids of the filled prompt.
        answer: Ids of the answer.
    """

    prompt: list[int]
    answer: list[int]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.answer)


class Reader:
    """Score docs by the log-likelihood of an answer, in nats, summed over the answer's tokens.

    Args:
        model: A `ForCausalLM` or `ForConditionalGeneration` model of transformers.
        tokenizer: The model's fast tokenizer.
        prompt: Template with `{query}` and `{doc}`.
        limits: Longest query and longest doc in tokens; longer texts are cut.
    """

    def __init__(self, model: Any, tokenizer: Any, prompt: str, limits: tuple[int, int]) -> None:
        for field in ("{query}", "{doc}"):
            if prompt.count(field) != 1:
                raise ConfigError(f"reader.prompt: expected a template with {field} once, got {prompt!r}")
        self.model, self.tokenizer, self.prompt, self.limits = model.eval(), tokenizer, prompt, limits
        self.decodes = bool(model.config.is_encoder_decoder)
        self._parameters = inspect.signature(model.forward).parameters

    @classmethod
    def load(cls, name: str, prompt: str, limits: tuple[int, int], trust_remote_code: bool = False) -> Reader:
        """Load a folder or a model of the hub in float32.

        Args:
            name: Folder or hub id.
            prompt: See the class.
            limits: See the class.
            trust_remote_code: Whether code in the folder may run.

        Raises:
            ConfigError: The folder or name has no such model.
        """
        check_model_folder(name)
        try:
            config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
            kind: Any = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
            model, info = kind.from_pretrained(
                name, dtype=torch.float32, trust_remote_code=trust_remote_code, output_loading_info=True
            )
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
        except Exception as error:  # the library raises many classes of exceptions
            reason = " ".join(str(error).split())[:300]
            raise ConfigError(
                f"reader.name: expected a language model or a sequence-to-sequence model, got {name!r} ({reason})"
            ) from error
        reason = f"its weights lack {min(info['missing_keys'])}" if info["missing_keys"] else ""
        if not config.is_encoder_decoder and not is_causal(model):
            reason = f"{config.model_type} models attend in both directions"
        if reason:
            raise ConfigError(
                f"reader.name: expected a language model or a sequence-to-sequence model, got {name!r} ({reason})"
            )
        return cls(model, tokenizer, prompt, limits)

    def passage(self, query: str, doc: str, answer: str) -> Passage:
        """Return the token ids of a filled prompt and of its answer.

        For a language model, prompt and answer are tokenized as one text. The tokens at its start that equal those of
        the prompt alone are the prompt; all later tokens are the answer.
        """
        query, doc = (self._cut(text, limit) for text, limit in zip((query, doc), self.limits, strict=True))
        prompt = self._filled(query, doc)
        ids: list[int] = self.tokenizer(prompt)["input_ids"]
        if self.decodes:
            return Passage(ids, self.tokenizer(text_target=answer)["input_ids"])
        whole: list[int] = self.tokenizer(f"{prompt} {answer}")["input_ids"]
        same = next((i for i, (one, other) in enumerate(zip(ids, whole, strict=False)) if one != other), len(ids))
        return Passage(whole[:same], whole[same:])

    def _filled(self, query: str, doc: str) -> str:
        """Return the filled prompt; `{query}` or `{doc}` inside the query or doc is not replaced."""
        parts = self.prompt.split("{query}")
        return query.join(part.replace("{doc}", doc) for part in parts)

    def _cut(self, text: str, limit: int) -> str:
        """Return the text of the first `limit` tokens of a text."""
        offsets = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        return text if len(offsets) <= limit else text[: offsets[limit - 1][1]]

    @torch.no_grad()
    def scores(self, passages: Sequence[Passage], devices: Devices, max_tokens: int) -> np.ndarray:
        """Return log p(answer | prompt) of passages, float32 [passages].

        Args:
            passages: The passages to score.
            devices: The device and its precision.
            max_tokens: Tokens of a batch, padding included; a longer passage is a batch by itself.
        """
        scores = np.zeros(len(passages), np.float32)
        order = sorted(range(len(passages)), key=lambda i: -len(passages[i]))
        while order:
            count = max(1, max_tokens // len(passages[order[0]]))
            batch, order = order[:count], order[count:]
            with devices.autocast():
                scores[batch] = self._batch([passages[i] for i in batch], devices.device).cpu().numpy()
        return scores

    def _batch(self, passages: list[Passage], device: torch.device) -> Tensor:
        """Return the scores of some passages, float32 [passages]; logits are computed for the answers' tokens only."""
        pad = padding_id(self.model.config)
        if self.decodes:
            prompts, mask = _padded([part.prompt for part in passages], pad, device)
            targets, _ = _padded([part.answer for part in passages], UNREAD, device)
            logits = self.model(input_ids=prompts, attention_mask=mask, labels=targets).logits
        else:  # padding is on the left, so that all answers end together
            whole, mask = _padded([part.prompt + part.answer for part in passages], pad, device, left=True)
            targets, _ = _padded([part.answer for part in passages], UNREAD, device, left=True)
            positions = (mask.cumsum(1) - 1).clamp(min=0)
            kept = targets.shape[1] + 1
            options = {"position_ids": positions, "logits_to_keep": kept}
            options = {name: value for name, value in options.items() if name in self._parameters}
            logits = self.model(input_ids=whole, attention_mask=mask, **options).logits[:, -kept:-1]
        log_p = logits.float().log_softmax(2)
        chosen = log_p.gather(2, targets.clamp(min=0).unsqueeze(2))[:, :, 0]
        return chosen.masked_fill(targets == UNREAD, 0.0).sum(1)


def _padded(rows: list[list[int]], fill: int, device: torch.device, left: bool = False) -> tuple[Tensor, Tensor]:
    """Return padded rows [rows, longest], and a mask [rows, longest] that is 1 at the tokens."""
    longest = max(map(len, rows))
    values, mask = torch.full((len(rows), longest), fill), torch.zeros(len(rows), longest, dtype=torch.long)
    for i, row in enumerate(rows):
        cells = slice(longest - len(row), longest) if left else slice(len(row))
        values[i, cells], mask[i, cells] = torch.tensor(row), 1
    return values.to(device), mask.to(device)


def read_answers(path: Path, query_ids: Sequence[str]) -> dict[str, str]:
    """Read a file of lines `query id, tab, answer`, in the format of queries.tsv.

    Args:
        path: The file.
        query_ids: Queries that need an answer.

    Raises:
        DataError: A query has no answer, or the file has another format.
    """
    answers = read_queries(path)
    missing = [query_id for query_id in query_ids if not answers.get(query_id, "").strip()]
    if missing:
        raise DataError(
            f"{path}: expected an answer for each of {len(query_ids)} queries, got none for {len(missing)}, such as "
            f"{missing[0]!r}"
        )
    return answers


def read_missing(
    reader: Reader,
    shards: ScoreShards,
    collection: Collection,
    answers: Mapping[str, str],
    devices: Devices,
    max_tokens: int,
) -> None:
    """Score the missing shards of this process, and write each shard as soon as it is complete.

    Args:
        reader: The reader.
        shards: The shards.
        collection: Queries and docs.
        answers: Query id -> answer.
        devices: The devices of the run; process `rank` scores shards `rank`, `rank + world_size`, ...
        max_tokens: See `Reader.scores`.

    Raises:
        DataError: A score is not finite.
    """
    queries, docs = collection.queries, collection.docs
    numbers = shards.missing(devices.rank, devices.world_size)
    for done, shard in enumerate(numbers):
        part = shards.part(shard)
        pairs = [(query_id, doc_id) for query_id in part for doc_id in part[query_id]]
        passages = [reader.passage(queries[q], docs[d].full_text, answers[q]) for q, d in pairs]
        scores = reader.scores(passages, devices, max_tokens)
        if not np.isfinite(scores).all():
            query_id, doc_id = pairs[int(np.flatnonzero(~np.isfinite(scores))[0])]
            raise DataError(f"teacher: expected finite scores, got another for query {query_id!r} and doc {doc_id!r}")
        shards.write(shard, scores)
        log.info("shard %d of %d of this process is read", done + 1, len(numbers))
