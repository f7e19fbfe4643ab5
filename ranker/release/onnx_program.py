"""Score with an ONNX export in onnxruntime; `Reranker.load` loads the folder of the export."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoTokenizer

from ranker.data.template import Template
from ranker.encoders.execution import DEFAULT, Execution
from ranker.encoders.model_folder import read_object
from ranker.encoders.ragged import RaggedLayout
from ranker.encoders.row_groups import RowGroup, row_groups, select_rows
from ranker.errors import CheckpointError, ConfigError
from ranker.export._modules import write_json
from ranker.export._prompt import read_prompt
from ranker.interactions.grid import to_grid
from ranker.interactions.maxsim import TextVectors, maxsim_pairs
from ranker.models._pair_prompt import pair_layout
from ranker.models._prompts import with_prompt
from ranker.models.colbert import ColBERT, Expansion, token_layouts
from ranker.models.dpr import DPR
from ranker.models.interface import Scorer
from ranker.models.lm_reranker import LMReranker
from ranker.types import RankBatch, TokenBatch

FILE = "onnx.json"


def is_program(folder: Path) -> bool:
    """Return whether a folder is an ONNX export."""
    return (folder / FILE).is_file()


def write_settings(folder: Path, scorer: Scorer, graphs: list[str]) -> None:
    """Write the settings that `OnnxProgram` needs besides graphs and tokenizer.

    Args:
        folder: The export's folder.
        scorer: The exported model.
        graphs: Names of the graphs.
    """
    encoder = scorer.encoder
    content: dict[str, Any] = {"reads": scorer.reads, "graphs": graphs, "max_tokens": encoder.max_tokens}
    content["dim"] = encoder.dim
    if isinstance(scorer, (DPR, ColBERT)):
        content |= {"query_prompt": scorer.query_prompt, "doc_prompt": scorer.doc_prompt}
        content["temperature"] = float(torch.as_tensor(scorer.divisor()))
    if isinstance(scorer, ColBERT):
        expansion = Expansion(scorer.query_length, scorer.fill_token, scorer.attend_to_expansion, scorer.cut_queries)
        content["expansion"] = asdict(expansion)
    if scorer.reads == "pairs":
        content["prompt_ends"] = not isinstance(scorer, LMReranker)
    write_json(folder / FILE, content)


@dataclass
class OnnxTexts:
    """Stands in for an `Encoder`: it has the attributes that the code needs to build token rows.

    Args:
        tokenizer: The tokenizer of the folder.
        max_tokens: Longest row in tokens.
        dim: Size of a state.
        ragged: Whether rows run without padding.
        path: See `ranker.encoders.encoder.Encoder`.
        execution: The graphs ignore it. Other code reads from it whether rows share prefixes; by default they do not.
        why_float32: See `ranker.encoders.encoder.Encoder`.
    """

    tokenizer: Any
    max_tokens: int
    dim: int
    ragged: bool = False
    path: str = "onnx"
    execution: Execution = DEFAULT
    why_float32: str = ""


class OnnxProgram(nn.Module):
    """A scorer over the graphs of an export.

    Args:
        folder: The export's folder.

    Attributes:
        reads: `pairs` or `texts`.
        encoder: Tokenizer and sizes.

    Raises:
        ConfigError: onnxruntime is not installed.
        CheckpointError: A file is missing or broken.
    """

    text_limits: tuple[int, int] | None = None

    def __init__(self, folder: Path) -> None:
        super().__init__()
        try:
            import onnxruntime
        except ImportError as error:
            raise ConfigError(
                f"{folder}: expected onnxruntime, which loads an ONNX export, but it is not installed; run pip install "
                "onnxruntime"
            ) from error
        settings = read_object(folder / FILE)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        wanted = ("CUDAExecutionProvider", "CPUExecutionProvider")
        providers = [name for name in wanted if name in onnxruntime.get_available_providers()]
        try:
            self._sessions = [
                onnxruntime.InferenceSession(folder / Path(name).name, options, providers=providers)
                for name in settings["graphs"]
            ]
            self.reads = str(settings["reads"])
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
            self.encoder = OnnxTexts(tokenizer, int(settings["max_tokens"]), int(settings["dim"]))
        except Exception as error:  # onnxruntime raises errors of its own classes
            reason = " ".join(str(error).split())[:200]
            raise CheckpointError(f"{folder}: expected a whole ONNX export, got {reason}; export it again") from error
        self._settings, self._prompt = settings, read_prompt(folder)
        self._expansion = Expansion(**settings["expansion"]) if "expansion" in settings else None

    def pair_layout(self) -> Template:
        """Return the layout of a query and a doc in one row."""
        tokenizer = self.encoder.tokenizer
        if self._prompt is None:
            return Template.of(tokenizer, 2)
        return pair_layout(tokenizer, self._prompt, ends=bool(self._settings["prompt_ends"]))

    def layouts(self) -> tuple[Template, Template]:
        """Return the layouts of a query and of a doc."""
        tokenizer = self.encoder.tokenizer
        single = Template.of(tokenizer, 1)
        prompts = (self._settings["query_prompt"], self._settings["doc_prompt"])
        if self._expansion is not None:
            return token_layouts(tokenizer, *prompts, self._expansion)
        query, doc = (with_prompt(tokenizer, single, str(prompt)) for prompt in prompts)
        return query, doc

    def forward(self, batch: RankBatch) -> Tensor:
        """Return scores [batch, docs]; 0 in cells without a doc."""
        if batch.pairs is not None:
            return to_grid(self._run(self._sessions[0], batch.pairs)[:, 0], batch.doc_mask)
        assert batch.queries is not None and batch.docs is not None
        owners = batch.doc_mask.nonzero()[:, 0]
        if self._expansion is not None:
            vectors = self._token_vectors(batch.queries), self._token_vectors(batch.docs, masked=True)
            return to_grid(maxsim_pairs(*vectors, owners), batch.doc_mask)
        queries, docs = self._run(self._sessions[0], batch.queries), self._run(self._sessions[-1], batch.docs)
        return to_grid((queries[owners] * docs).sum(1) / self._settings["temperature"], batch.doc_mask)

    def _run(self, session: Any, rows: TokenBatch) -> Tensor:
        """Return a graph's output for all rows, float32 [rows, outputs].

        The graph is executed once for each group of rows of similar lengths.
        """
        outputs = torch.zeros(0)
        for group, _, (got,) in self._groups(session, rows):
            outputs = outputs if len(outputs) else torch.zeros(rows.num_rows, got.shape[1])
            outputs[group.rows.cpu()] = torch.from_numpy(got)
        return outputs.to(rows.tokens.device)

    def _token_vectors(self, rows: TokenBatch, masked: bool = False) -> TextVectors:
        """Return a vector for each token of all rows; with `masked`, only for tokens that the graph's mask marks."""
        values: dict[int, Tensor] = {}
        for group, layout, (vectors, doc_mask) in self._groups(self._sessions[0], rows):
            chosen = layout.mask.cpu() & torch.from_numpy(doc_mask == 1) if masked else layout.mask.cpu()
            of_row = zip(group.rows.tolist(), torch.from_numpy(vectors), chosen, strict=True)
            values |= {row: part[mask] for row, part, mask in of_row}
        ordered = [values[row] for row in range(rows.num_rows)]
        counts = torch.tensor([len(part) for part in ordered])
        device = rows.tokens.device
        return TextVectors(torch.cat(ordered).to(device), counts.to(device))

    def _groups(self, session: Any, rows: TokenBatch) -> Iterator[tuple[RowGroup, RaggedLayout, Sequence[np.ndarray]]]:
        """Run a graph on groups of rows of similar lengths; yield each group with its layout and its outputs."""
        names = [entry.name for entry in session.get_inputs()]
        padding = self.encoder.tokenizer.pad_token_id
        for group in row_groups(rows.cu_seqlens):
            part, _ = select_rows(rows, group)
            layout = RaggedLayout.of(part)
            mask = layout.mask
            if part.attended is not None:
                mask = mask & (torch.arange(mask.shape[1], device=mask.device) < part.attended[:, None])
            values = {
                "input_ids": torch.where(layout.mask, layout.pad(part.tokens), padding),
                "attention_mask": mask.long(),
                "token_type_ids": layout.pad(part.segments),
            }
            yield group, layout, session.run(None, {name: values[name].cpu().numpy() for name in names})
