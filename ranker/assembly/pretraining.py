"""Build the parts of a pretraining from its configuration: the token store of the docs, the loader, and the model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig

from ranker.assembly.data import load_source, print_notice
from ranker.config.targets import constructor_keys
from ranker.data.token_store import TokenStore, token_store
from ranker.errors import ConfigError
from ranker.files.folders import write_folder
from ranker.models.dpr import DPR
from ranker.pretraining.steps import PretrainData
from ranker.pretraining.texts import Texts
from ranker.processes import available_cores

WHOLE = 1 << 20  # number of tokens at which even an uncut doc is cut


def doc_store(cfg: DictConfig, tokenizer: Any) -> TokenStore:
    """Return a token store with the uncut docs of all collections of `data`; a doc of several sets is stored once.

    Raises:
        ConfigError: The source has no docs.
    """
    splits = load_source(cfg.data, cfg.cache_dir)
    print_notice(splits)
    collections = [part for part in (splits.train, splits.val, *splits.tests.values()) if part is not None]
    corpora = list({part.docs.fingerprint: part.docs for part in collections}.values())
    if not corpora:
        raise ConfigError("data: expected docs, got a source without any; set data to one that has docs")

    def texts() -> Iterator[tuple[str, str]]:
        for number, docs in enumerate(corpora):
            yield from ((f"{number}/{doc.doc_id}" if number else doc.doc_id, doc.full_text) for doc in docs)

    fingerprint = " ".join(docs.fingerprint for docs in corpora)
    return token_store(Path(cfg.cache_dir), "docs", texts, fingerprint, tokenizer, WHOLE)


def build_pretrain_data(cfg: DictConfig, objective: Any, encoder: Any) -> PretrainData:
    """Return the loader of the objective's steps.

    Args:
        cfg: The configuration.
        objective: The objective.
        encoder: The encoder.
    """
    store = doc_store(cfg, encoder.tokenizer)
    texts = Texts(store, encoder.tokenizer, cfg.max_doc_tokens, cfg.max_query_tokens, cfg.seed)
    draws = objective.draws(texts.fitting(encoder.max_tokens, objective.pairs))
    gpu = torch.cuda.is_available()
    return PretrainData(
        draws,
        cfg.batch.texts,
        cfg.batch.max_tokens,
        cfg.seed,
        cfg.trainer.accumulate_grad_batches,
        cfg.batch.workers if cfg.batch.workers is not None else min(4, available_cores()) if gpu else 0,
        32768 if gpu else 8192,
    )


def build_objective(cfg: DictConfig) -> Any:
    """Return the objective."""
    return instantiate(constructor_keys("objective", cfg.objective))


def build_model(cfg: DictConfig, objective: Any) -> Any:
    """Return the model that the objective trains, with its encoder."""
    return objective.model(instantiate(constructor_keys("encoder", cfg.encoder))).train()


def save_pretrained(folder: Path, model: Any, cfg: DictConfig) -> None:
    """Write a model's folder, which `encoder.name` can load; it appears under its name only when it is complete.

    Args:
        folder: The folder.
        model: The trained model.
        cfg: The configuration.
    """
    positions = model.encoder.max_tokens
    with write_folder(folder) as partial:
        if isinstance(model, DPR):
            query, doc = model.layouts()
            model.save(
                partial,
                max_tokens=min(positions, cfg.max_doc_tokens + doc.num_added),
                max_query_tokens=min(positions, cfg.max_query_tokens + query.num_added),
            )
        else:
            model.save(partial, max_tokens=positions)
