"""Whether a server answers, so that a run without a network says so within seconds: libraries try for minutes."""

from __future__ import annotations

import ssl
import threading
from http.client import HTTPException
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

SECONDS = 8.0


def unreachable(url: str, seconds: float = SECONDS) -> str | None:
    """Why a server gives no answer at all, within so many seconds; None if it gives any.

    Args:
        url: An address on the server; only its root is asked for, through the proxies that the environment names.
        seconds: For the look-up of the name, the connection and the answer together.
    """
    parts = urlsplit(url)
    reasons = [f"no answer within {seconds:.0f} seconds"]

    def ask() -> None:
        try:
            with urlopen(Request(f"{parts.scheme}://{parts.netloc}/", method="HEAD"), timeout=seconds):
                reasons.clear()
        except (HTTPError, HTTPException, ssl.SSLError):  # an answer; the library judges it, with its own certificates
            reasons.clear()
        except URLError as error:
            reasons[:] = [] if isinstance(error.reason, ssl.SSLError) else [str(error.reason)]
        except OSError as error:
            reasons[:] = [str(error)]

    thread = threading.Thread(target=ask, daemon=True)  # the look-up of a name takes no time limit
    thread.start()
    thread.join(seconds + 1)
    return reasons[0] if reasons else None
