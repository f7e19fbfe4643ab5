"""The bodies of requests: checked by pydantic, and described for the OpenAPI page."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StrictBool,
    Tag,
    ValidationError,
    create_model,
)
from pydantic_core import ErrorDetails

from ranker.data.collection import Doc
from ranker.errors import shorten
from ranker.serving.limits import Limits

SHOWN_FAULTS = 3


class BadRequest(Exception):
    """A request that can't be answered.

    Args:
        status: The HTTP status.
        message: What was expected, and what was received.
        retry_seconds: Seconds after which to try again; None: trying again does not help.
    """

    def __init__(self, status: int, message: str, retry_seconds: int | None = None) -> None:
        super().__init__(message)
        self.status, self.retry_seconds = status, retry_seconds


class ScoreOptions(BaseModel):
    """Keys of every request."""

    raw_scores: StrictBool | None = Field(
        None,
        description="true: the model's scores; false: their sigmoid, or probabilities if the server has a map to them; "
        "null: as the server is set.",
    )


def _whole(value: Any) -> Any:
    """Return 2 for 2.0, which is an integer in JSON Schema."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


class RerankOptions(ScoreOptions):
    """Keys of a request to re-rank, beside the texts."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [{"required": ["documents"]}, {"required": ["texts"]}]})

    top_n: Annotated[int, Field(strict=True, ge=1), BeforeValidator(_whole)] | None = Field(
        None, description="Results to return; null: all."
    )
    return_documents: StrictBool | None = Field(None, description="Whether results have their document.")
    return_text: StrictBool | None = Field(None, description="Whether results have their text.")
    truncate: Literal[True] | None = Field(None, description="Long texts are always cut as in the model's training.")
    truncation_direction: Literal["right", "Right"] | None = Field(None, description="Long texts lose their end.")


class Schemas:
    """The models of request bodies under some limits.

    Args:
        limits: Bounds on documents and texts.
    """

    def __init__(self, limits: Limits) -> None:
        string: Any = Annotated[str, Field(strict=True, max_length=limits.text_chars)]
        document = create_model(
            "Document",
            __doc__="A document as an object; other keys are ignored.",
            text=(string, Field(description="The text.")),
            title=(string, Field("", description="Put before the text.")),
        )
        text: Any = Annotated[
            Annotated[string, Tag("string")] | Annotated[document, Tag("object")],
            Discriminator(lambda value: "object" if isinstance(value, (dict, BaseModel)) else "string"),
        ]
        texts: Any = Annotated[list[text], Field(min_length=1, max_length=limits.docs)]
        pair: Any = Annotated[list[text], Field(min_length=2, max_length=2)]
        pairs: Any = Annotated[list[pair], Field(min_length=1, max_length=limits.docs)]
        self.rerank: Any = create_model(
            "RerankRequest",
            __doc__="A query and the documents to order: `documents` (Cohere, Jina) or `texts` "
            "(text-embeddings-inference). Other keys, such as `model`, are ignored.",
            __base__=RerankOptions,
            query=(text, Field(description="The query.")),
            documents=(texts, Field(default_factory=list, description="The documents.")),
            texts=(texts, Field(default_factory=list, description="The documents; the answer is then a list.")),
        )
        self.score: Any = create_model(
            "ScoreRequest",
            __doc__="Pairs of a query and a document.",
            __base__=ScoreOptions,
            pairs=(pairs, Field(description="Lists of a query and a document.")),
        )

    def parse_rerank(self, body: bytes) -> Any:
        """Return the checked body of a request to re-rank.

        Raises:
            BadRequest: It is wrong.
        """
        request = _parse(self.rerank, body)
        if len({"documents", "texts"} & request.model_fields_set) != 1:
            both = {"documents", "texts"} <= request.model_fields_set
            raise BadRequest(422, f"expected either documents or texts, got {'both' if both else 'neither'}")
        return request

    def parse_score(self, body: bytes) -> Any:
        """Return the checked body of a request to score pairs.

        Raises:
            BadRequest: It is wrong.
        """
        return _parse(self.score, body)


def text_of(value: Any) -> str:
    """Return the text of a string or of an object with title and text, as the model reads it."""
    return value if isinstance(value, str) else Doc("", value.text, value.title).full_text


def _parse(model: Any, body: bytes) -> Any:
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=False)
        if details[0]["type"] == "json_invalid":
            raise BadRequest(400, f"expected JSON in UTF-8, got: {details[0]['msg']}") from None
        faults = [_fault(detail) for detail in details[:SHOWN_FAULTS]]
        if len(details) > SHOWN_FAULTS:
            faults.append(f"and {len(details) - SHOWN_FAULTS} more faults")
        raise BadRequest(422, shorten("; ".join(faults))) from None


def _fault(detail: ErrorDetails) -> str:
    """Return a message: where a body is wrong, what was expected, and what was received."""
    where = ".".join(str(part) for part in detail["loc"] if part not in ("string", "object")) or "body"
    message = f"{where}: {detail['msg'][0].lower()}{detail['msg'][1:]}"
    if detail["type"] == "missing":
        return message
    got = detail["input"]
    words = {list: "an array", dict: "an object", type(None): "null", bool: str(got).lower()}
    shown = f"{got!r:.60}" if isinstance(got, (str, int, float)) else "another value"
    return f"{message}, got {words.get(type(got), shown)}"
