"""Check within seconds whether a server answers, and stop at the first time-out. Libraries would retry for minutes."""

from __future__ import annotations

import ssl
import threading
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

SECONDS = 8.0
OFFLINE = "without a network set encoder.name=FOLDER, or fill the cache elsewhere and set HF_HUB_OFFLINE=1"

_hub_failures: list[str] = []


def unreachable(url: str, seconds: float = SECONDS) -> str | None:
    """Return why a server does not answer; None if it gives any answer.

    Args:
        url: An address on the server. The request goes to the server's root, through the environment's proxies.
        seconds: Time limit for name look-up, connection and answer together.
    """
    parts = urlsplit(url)
    reasons = [f"no answer within {seconds:.0f} seconds"]

    def request_root() -> None:
        try:
            with urlopen(Request(f"{parts.scheme}://{parts.netloc}/", method="HEAD"), timeout=seconds):
                reasons.clear()
        except (
            HTTPError,
            HTTPException,
            ssl.SSLError,
        ):  # the server answered; the library uses its own certificates and decides what to do
            reasons.clear()
        except URLError as error:
            reasons[:] = [] if isinstance(error.reason, ssl.SSLError) else [str(error.reason)]
        except OSError as error:
            reasons[:] = [str(error)]

    thread = threading.Thread(target=request_root, daemon=True)  # daemon: a name look-up has no time limit
    thread.start()
    thread.join(seconds + 1)
    return reasons[0] if reasons else None


def watch_hub(name: str) -> None:
    """From now on, if a request for a model on the Hugging Face hub times out, let all later requests fail at once.

    huggingface_hub requests each of a model's files several times and waits for each answer. If a request fails, the
    library reads its cache, as it does offline. Requests without a time limit get HF_HUB_ETAG_TIMEOUT, 10 seconds by
    default. A second call of this function allows requests again.

    Args:
        name: The model's id on the hub. A time-out of another request, such as telemetry, ends only that request.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import OfflineModeIsEnabled
    from huggingface_hub.utils import get_session

    _hub_failures.clear()
    session: Any = get_session()
    send = getattr(session.send, "unwatched", session.send)

    def watched(request: Any, **options: Any) -> Any:
        if _hub_failures:
            raise OfflineModeIsEnabled(_hub_failures[0])
        limits = request.extensions.get("timeout") or dict.fromkeys(("connect", "read", "write", "pool"))
        limits = {key: constants.HF_HUB_ETAG_TIMEOUT if limit is None else limit for key, limit in limits.items()}
        request.extensions = {**request.extensions, "timeout": limits}
        try:
            return send(request, **options)
        except Exception as error:
            url = request.url
            # the exception is a class of httpx or httpx2; this depends on the version of huggingface_hub
            if "Timeout" not in type(error).__name__ or name not in url.path:
                raise
            _hub_failures.append(
                f"{url.scheme}://{url.netloc.decode()} does not answer: {type(error).__name__} for {url.path} after "
                f"{limits['read']:.0f} seconds, and it is not in the hub's cache; {OFFLINE}"
            )
            raise OfflineModeIsEnabled(_hub_failures[0]) from error

    watched.unwatched = send  # type: ignore[attr-defined]
    session.send = watched


def hub_failure() -> str | None:
    """Return why requests to the hub fail since `watch_hub`, and how to work offline; None if they do not fail."""
    return _hub_failures[0] if _hub_failures else None
