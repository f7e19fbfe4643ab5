"""The server's OpenAPI description, and a page that shows it without a network."""

from __future__ import annotations

import html
import json
from typing import Any

from pydantic.json_schema import models_json_schema

from ranker.serving.schemas import Schemas

RERANK_PATHS = ("/rerank", "/v1/rerank", "/v2/rerank")
ERRORS = {
    400: "The body is not JSON.",
    401: "The bearer token is missing or wrong.",
    408: "The body arrived too slowly.",
    413: "The body is too large.",
    415: "The content type is not application/json.",
    422: "The body lacks a key, or a value is wrong, too long or too many.",
    429: "The queue is full; Retry-After says when to try again.",
    500: "The model failed on this request.",
    503: "The model is loading, or the server is stopping.",
    504: "The scores took too long.",
}
SCORE = {"type": "number", "description": "Higher is more relevant."}
INDEX = {"type": "integer", "minimum": 0, "description": "Position of the document in the request."}
USAGE = {"type": "object", "properties": {"total_tokens": {"type": "integer"}}, "required": ["total_tokens"]}


def _object(**properties: Any) -> dict[str, Any]:
    required = [name for name in properties if name not in ("document", "text")]
    return {"type": "object", "properties": properties, "required": required or list(properties)}


ANSWERS: dict[str, Any] = {
    "Ranking": _object(
        results={
            "type": "array",
            "items": _object(index=INDEX, relevance_score=SCORE, document=_object(text={"type": "string"})),
        },
        usage=USAGE,
    ),
    "RankingOfTexts": {"type": "array", "items": _object(index=INDEX, score=SCORE, text={"type": "string"})},
    "Scores": _object(scores={"type": "array", "items": SCORE}, usage=USAGE),
    "Health": _object(status={"type": "string", "enum": ["loading", "ready", "failing", "stopping"]}),
    "Error": _object(error={"type": "string"}, status={"type": "integer"}),
}
RERANK = "Order documents by their relevance for a query, best first"
EXAMPLES = {
    "/rerank": {"query": "how to sanitize a path", "documents": ["Use realpath.", "Buy a keyboard."], "top_n": 1},
    "/score": {"pairs": [["how to sanitize a path", "Use realpath."]]},
}


def description(schemas: Schemas, needs_token: bool) -> dict[str, Any]:
    """Return the OpenAPI 3.1 description of the server.

    Args:
        schemas: The bodies of requests.
        needs_token: Whether the server needs a bearer token.
    """
    _, bodies = models_json_schema(
        [(schemas.rerank, "validation"), (schemas.score, "validation")], ref_template="#/components/schemas/{model}"
    )
    ranking = {"anyOf": [_ref("Ranking"), _ref("RankingOfTexts")]}
    paths: dict[str, Any] = {
        path: {"post": _post(RERANK, _ref("RerankRequest"), ranking, path != "/rerank", needs_token)}
        for path in RERANK_PATHS
    }
    paths["/score"] = {"post": _post("Score pairs", _ref("ScoreRequest"), _ref("Scores"), False, needs_token)}
    health = {status: _answer(text, _ref("Health")) for status, text in (("200", "Ready."), ("503", "Not ready."))}
    paths["/health"] = {"get": {"summary": "Whether the server takes requests", "responses": health}}
    metrics: dict[str, Any] = {"200": {"description": "Prometheus' text format.", "content": {"text/plain": {}}}}
    if needs_token:
        metrics["401"] = _answer(ERRORS[401], _ref("Error"))
    paths["/metrics"] = {"get": {"summary": "Counters for Prometheus", "responses": metrics}}
    if needs_token:
        paths["/metrics"]["get"]["security"] = [{"bearer": []}]
    schemes = {"securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}}} if needs_token else {}
    return {
        "openapi": "3.1.0",
        "info": {"title": "ranker serve", "version": "1"},
        "paths": paths,
        "components": {"schemas": {**bodies["$defs"], **ANSWERS}, **schemes},
    }


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _answer(text: str, schema: Any) -> dict[str, Any]:
    return {"description": text, "content": {"application/json": {"schema": schema}}}


def _post(summary: str, body: Any, answer: Any, is_alias: bool, needs_token: bool) -> dict[str, Any]:
    needed = {"required": True, "content": {"application/json": {"schema": body}}}
    responses = {"200": _answer("The scores.", answer)}
    for status, text in ERRORS.items():
        if status != 401 or needs_token:
            responses[str(status)] = _answer(text, _ref("Error"))
    operation: dict[str, Any] = {"summary": summary, "requestBody": needed, "responses": responses}
    if is_alias:
        operation["description"] = "The same as /rerank."
    if needs_token:
        operation["security"] = [{"bearer": []}]
    return operation


def page(described: dict[str, Any]) -> str:
    """Return the description as an HTML page, which loads nothing from elsewhere."""
    parts = []
    for path, operations in described["paths"].items():
        for method, operation in operations.items():
            parts.append(f"<h2>{method.upper()} {html.escape(path)}</h2><p>{html.escape(operation['summary'])}.</p>")
            if "description" in operation:  # the same as another route
                parts.append(f"<p>{html.escape(operation['description'])}</p>")
                continue
            if path in EXAMPLES:
                command = f"curl http://HOST:PORT{path} -H 'Content-Type: application/json' -d '"
                parts.append(f"<pre>{html.escape(command + json.dumps(EXAMPLES[path]))}'</pre>")
            rows = (
                f"<tr><td>{status}</td><td>{html.escape(response['description'])}</td></tr>"
                for status, response in operation["responses"].items()
            )
            parts.append(f"<table>{''.join(rows)}</table>")
    shown = html.escape(json.dumps(described["components"]["schemas"], indent=2))
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><title>ranker serve</title>"
        "<meta name=viewport content='width=device-width'><style>:root{color-scheme:light dark}"
        "body{font:16px/1.5 sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
        "pre{white-space:pre-wrap;padding:.5rem;border:1px solid #8888}"
        "td{padding:0 1rem 0 0;vertical-align:top}</style>"
        f"<h1>ranker serve</h1><p>OpenAPI: <a href=openapi.json>openapi.json</a></p>{''.join(parts)}"
        f"<h2>Schemas</h2><pre>{shown}</pre>"
    )
