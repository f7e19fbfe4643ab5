"""`ranker serve`: answer requests to re-rank over HTTP."""

from __future__ import annotations

import importlib.util
import ipaddress
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from ranker import run_folder
from ranker.assembly.probabilities import read_calibration
from ranker.assembly.run import one_run
from ranker.errors import ConfigError
from ranker.serving.limits import Limits

if TYPE_CHECKING:
    from ranker.serving.interface import Model

log = logging.getLogger(__name__)

PACKAGES = ("starlette", "uvicorn", "prometheus_client", "pydantic")


@one_run()
def serve(cfg: DictConfig) -> None:
    """Serve a trained model until SIGTERM or SIGINT.

    Raises:
        RankerError: A setting, the address or the checkpoint is wrong.
    """
    run_folder.discard(Path(HydraConfig.get().runtime.output_dir))  # a server leaves no files
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"serve: expected the packages {', '.join(PACKAGES)}, got no {', '.join(missing)}; "
            "install them with: pip install -e '.[serve]'"
        )
    from ranker.serving.app import AppOptions
    from ranker.serving.server import listen
    from ranker.serving.server import serve as serve_until_signal

    calibration = read_calibration(cfg.checkpoint, cfg.probabilities, cfg.calibration)
    options = AppOptions(Limits(**cfg.limits), cfg.scores == "sigmoid", _token(cfg), cfg.log_requests, calibration)
    with listen(str(cfg.host), cfg.port) as listening:
        host, port = listening.getsockname()[:2]
        if options.token is None and not ipaddress.ip_address(host.partition("%")[0]).is_loopback:
            log.warning("anyone who reaches %s can use this server: set token_env= or token_file=", host)
        log.info("serving at http://%s:%d; GET /docs lists the routes", f"[{host}]" if ":" in host else host, port)
        serve_until_signal(lambda: _load(cfg), listening, options)


def _token(cfg: DictConfig) -> bytes | None:
    """Return the token that requests need; None if they need no token."""
    if cfg.token_env is not None and cfg.token_file is not None:
        raise ConfigError("token_env, token_file: expected one of them, got both")
    if cfg.token_env is not None:
        source, text = f"token_env: the variable {cfg.token_env}", os.environ.get(str(cfg.token_env), "")
    elif cfg.token_file is not None:
        source, path = f"token_file: the file {cfg.token_file}", Path(cfg.token_file).expanduser()
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            raise ConfigError(
                f"token_file: expected a file with the token, got {type(error).__name__}: {path}"
            ) from error
    else:
        return None
    token = text.strip()
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        got = "other characters" if token else "an empty one"
        raise ConfigError(f"{source}: expected a token of printable ASCII characters without spaces, got {got}")
    return token.encode()


def _load(cfg: DictConfig) -> Model:
    """Load the model. The model's own thread calls this function, so that the server can answer in the meantime."""
    from ranker.assembly.reranker import Reranker
    from ranker.serving.interface import require_finite
    from ranker.serving.model import RerankerModel

    return require_finite(RerankerModel(Reranker.of_config(cfg), cfg.batch.max_tokens, cfg.tokenizers))
