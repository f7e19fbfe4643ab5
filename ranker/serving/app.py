"""The server's routes: /rerank, /score, /health, /metrics, /openapi.json and /docs."""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from ranker.serving.engine import Engine
from ranker.serving.interface import ScoringFailed, Unavailable
from ranker.serving.limits import Limits
from ranker.serving.openapi import RERANK_PATHS, description, page
from ranker.serving.schemas import BadRequest, Schemas, text_of

log = logging.getLogger(__name__)

CLIENT_GONE = 499  # status for the metrics; no client reads this answer
# A body of up to this many times the bound is read and discarded, so that the client can read the answer.
DISCARDED = 8


@dataclass(frozen=True)
class AppOptions:
    """Options of the routes.

    Args:
        limits: Bounds on requests.
        sigmoid: Whether scores are the sigmoid of the model's scores, for requests that do not set `raw_scores`.
        token: The bearer token that /rerank, /score and /metrics require; None: no token.
        log_requests: Whether to log route, status and time of each request.
        calibration: Returns probabilities of relevance for scores [pairs]; with it they replace the model's scores and
            their sigmoid.
    """

    limits: Limits
    sigmoid: bool = False
    token: bytes | None = None
    log_requests: bool = False
    calibration: Callable[[np.ndarray], np.ndarray] | None = None


def create_app(engine: Engine, options: AppOptions) -> Starlette:
    """Return the ASGI application over an engine."""
    return _Routes(engine, options).app()


Handler = Callable[[Request], Awaitable[Response]]


class _Routes:
    def __init__(self, engine: Engine, options: AppOptions) -> None:
        self.engine, self.options, self.limits = engine, options, options.limits
        self.schemas = Schemas(options.limits)
        self.description = description(self.schemas, needs_token=options.token is not None)

    def app(self) -> Starlette:
        routes = [Route(path, self._answered("/rerank", self.rerank), methods=["POST"]) for path in RERANK_PATHS]
        routes += [
            Route("/score", self._answered("/score", self.score), methods=["POST"]),
            Route("/metrics", self._answered("/metrics", self.metrics)),
            Route("/health", self._answered("/health", self.health, is_open=True)),
            Route("/openapi.json", self._answered("/openapi.json", self.openapi, is_open=True)),
            Route("/docs", self._answered("/docs", self.docs, is_open=True)),
        ]
        return Starlette(routes=routes, exception_handlers={HTTPException: _http_error})  # type: ignore[dict-item]

    # routes ------------------------------------------------------------------------------------------------------

    async def rerank(self, request: Request) -> Response:
        started = time.perf_counter()
        parsed = self.schemas.parse_rerank(await self._body(request))
        is_list = "texts" in parsed.model_fields_set
        texts = [text_of(value) for value in (parsed.texts if is_list else parsed.documents)]
        query = text_of(parsed.query)
        self.engine.metrics.stage("body", time.perf_counter() - started)
        scores, tokens = await self._scores(request, [(query, text) for text in texts])
        started = time.perf_counter()
        results: list[dict[str, Any]] = []
        order = np.argsort(-scores, kind="stable")[: parsed.top_n].tolist()
        values = self._shown(scores, parsed.raw_scores)
        for index in order:
            results.append({"index": index, "score" if is_list else "relevance_score": values[index]})
            if parsed.return_documents or parsed.return_text:
                results[-1] |= {"text": texts[index]} if is_list else {"document": {"text": texts[index]}}
        response = JSONResponse(results if is_list else {"results": results, "usage": {"total_tokens": tokens}})
        self.engine.metrics.stage("reply", time.perf_counter() - started)
        return response

    async def score(self, request: Request) -> Response:
        started = time.perf_counter()
        parsed = self.schemas.parse_score(await self._body(request))
        pairs = [(text_of(query), text_of(doc)) for query, doc in parsed.pairs]
        self.engine.metrics.stage("body", time.perf_counter() - started)
        scores, tokens = await self._scores(request, pairs)
        started = time.perf_counter()
        answer = {"scores": self._shown(scores, parsed.raw_scores), "usage": {"total_tokens": tokens}}
        response = JSONResponse(answer)
        self.engine.metrics.stage("reply", time.perf_counter() - started)
        return response

    async def health(self, _: Request) -> Response:
        state = self.engine.state
        return JSONResponse({"status": state}, 200 if state == "ready" else 503)

    async def metrics(self, _: Request) -> Response:
        return Response(self.engine.metrics.text(), media_type="text/plain; version=0.0.4")

    async def openapi(self, _: Request) -> Response:
        return JSONResponse(self.description)

    async def docs(self, _: Request) -> Response:
        return HTMLResponse(page(self.description))

    # shared by the routes ----------------------------------------------------------------------------------------

    def _answered(self, route: str, handler: Handler, is_open: bool = False) -> Handler:
        """Return a handler that checks the token, and turns errors into answers."""

        async def answer(request: Request) -> Response:
            started = time.perf_counter()
            try:
                if not is_open:
                    self._check_token(request)
                response = await handler(request)
            except BadRequest as error:
                response = _error(error.status, str(error), error.retry_seconds)
            except Unavailable as error:
                response = _error(429 if error.is_full else 503, str(error), error.retry_seconds)
            except ScoringFailed as error:
                response = _error(500, str(error))
            except ClientDisconnect:
                response = Response(status_code=CLIENT_GONE)
            except Exception as error:  # a bug; its message may quote a request's text
                where = traceback.extract_tb(error.__traceback__)[-1]
                log.error("%s failed: %s in %s:%d", route, type(error).__name__, where.filename, where.lineno)
                response = _error(500, "an error of the server")
            if self.engine.state == "stopping":
                response.headers["Connection"] = "close"
            seconds = time.perf_counter() - started
            self.engine.metrics.request(route, response.status_code, seconds)
            if self.options.log_requests:
                log.info("%s %s %d %.1f ms", request.method, route, response.status_code, 1000 * seconds)
            return response

        return answer

    def _check_token(self, request: Request) -> None:
        if self.options.token is None:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        is_same = hmac.compare_digest(given.strip().encode(), self.options.token)
        if scheme.lower() != "bearer" or not is_same:
            raise BadRequest(401, "expected the header Authorization: Bearer TOKEN with this server's token")

    async def _body(self, request: Request) -> bytes:
        """Return a request's body; if the server can't take it, refuse it before it is read.

        Raises:
            BadRequest: The content type is not JSON, or the body is too large or arrives too slowly.
            Unavailable: The server accepts no requests now.
        """
        media_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        if media_type != "application/json":
            # browsers let a web page send other content types to this server without a preflight request
            raise BadRequest(415, f"expected Content-Type: application/json, got {media_type!r:.60}")
        self.engine.check(1)
        largest, expected = self.limits.body_bytes, request.headers.get("content-length", "0")
        size = int(expected) if expected.isdecimal() else 0
        waits = "expect" in request.headers  # the client sends the body only after the server's answer "100 Continue"
        if size > largest * (1 if waits else DISCARDED):
            raise BadRequest(413, f"expected a body of at most {largest} bytes, got {size}")
        chunks, size = [], 0
        try:
            async with asyncio.timeout(self.limits.request_seconds):
                async for chunk in request.stream():
                    size += len(chunk)
                    if size <= largest:
                        chunks.append(chunk)
                    elif size > largest * DISCARDED:
                        break
        except TimeoutError:
            raise BadRequest(408, f"expected the body within {self.limits.request_seconds:g} seconds") from None
        if size > largest:
            raise BadRequest(413, f"expected a body of at most {largest} bytes, got {size} or more")
        return b"".join(chunks)

    def _shown(self, scores: np.ndarray, raw: bool | None) -> list[float]:
        """Return scores [pairs] as the answer has them: as they are, their sigmoid, or probabilities."""
        options = self.options
        if raw or (raw is None and not options.sigmoid and options.calibration is None):
            shown: list[float] = scores.astype(np.float64).tolist()
        elif options.calibration is not None:
            shown = options.calibration(scores).tolist()
        else:
            shown = [_sigmoid(value) for value in scores.tolist()]
        return shown

    async def _scores(self, request: Request, pairs: Sequence[tuple[str, str]]) -> tuple[np.ndarray, int]:
        """Return the scores of pairs, float32 [pairs], and their number of tokens; stop if the client disconnects."""
        scoring = asyncio.ensure_future(self.engine.score(pairs))
        gone = asyncio.ensure_future(_client_gone(request))
        try:
            await asyncio.wait(
                {scoring, gone}, timeout=self.limits.request_seconds, return_when=asyncio.FIRST_COMPLETED
            )
            if not scoring.done():
                if gone.done():
                    raise ClientDisconnect
                raise BadRequest(
                    504, f"no scores within {self.limits.request_seconds:g} seconds; send fewer documents", 1
                )
            return scoring.result()
        finally:
            scoring.cancel()
            gone.cancel()


def _sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value)) if value >= 0 else math.exp(value) / (1 + math.exp(value))


async def _client_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _error(status: int, message: str, retry_seconds: int | None = None) -> Response:
    headers = {"Retry-After": str(retry_seconds)} if retry_seconds is not None else {}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse({"error": message, "status": status}, status, headers)


async def _http_error(_: Request, error: HTTPException) -> Response:
    """Answer a request for an unknown path or with a wrong method."""
    response = _error(error.status_code, f"{error.detail.lower()}; GET /docs lists what this server answers")
    response.headers.update(error.headers or {})
    return response
