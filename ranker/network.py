"""Check within seconds whether a server answers; libraries retry for minutes."""

from __future__ import annotations

import ssl
import threading
from http.client import HTTPException
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

SECONDS = 8.0


def unreachable(url: str, seconds: float = SECONDS) -> str | None:
    """Return why a server does not answer at all; None if it answers, whatever the answer is.

    Args:
        url: An address on the server. The request is for its root, through the proxies of the environment.
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
        ):  # the server answered; the library, with its own certificates, decides what to do
            reasons.clear()
        except URLError as error:
            reasons[:] = [] if isinstance(error.reason, ssl.SSLError) else [str(error.reason)]
        except OSError as error:
            reasons[:] = [str(error)]

    thread = threading.Thread(target=request_root, daemon=True)  # daemon: a name look-up has no time limit
    thread.start()
    thread.join(seconds + 1)
    return reasons[0] if reasons else None
