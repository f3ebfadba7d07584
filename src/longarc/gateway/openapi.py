"""The OpenAPI description of the HTTP door, made from the classes that read the bodies."""

from functools import cache
from typing import Any, Final

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from longarc.gateway.chat_completions import ChatCompletionsBody
from longarc.gateway.messages import CountTokensBody, MessagesBody
from longarc.gateway.responses import ResponsesBody

_BODIES: Final[dict[str, tuple[type[BaseModel], str]]] = {
    "/v1/chat/completions": (ChatCompletionsBody, "Answer an OpenAI chat completion."),
    "/v1/responses": (ResponsesBody, "Answer an OpenAI Responses request."),
    "/v1/messages": (MessagesBody, "Answer an Anthropic Messages request."),
    "/v1/messages/count_tokens": (CountTokensBody, "Count the tokens of a Messages prompt."),
}
_STATUSES: Final = {
    "400": "The request is wrong or asks for what the gateway does not do; the message names the field.",
    "401": "There is no key, or it opens nothing.",
    "403": "The session has used its budget.",
    "404": "The session or the model does not exist.",
    "408": "The body did not arrive in time.",
    "413": "The body is too long.",
    "429": "Too much is asked at once; Retry-After says when to come again.",
    "500": "The gateway made a mistake; nothing was recorded.",
    "503": "The engine does not answer; Retry-After says when to come again.",
}
_EVENT: Final = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
"""One server-sent event; its data is JSON, but for the last one of chat completions."""
_REF: Final = "#/components/schemas/{model}"


@cache
def description() -> dict[str, Any]:
    """Return the description; to be read only."""
    _, schemas = models_json_schema(
        [(model, "validation") for model, _ in _BODIES.values()], ref_template=_REF
    )
    paths: dict[str, Any] = {}
    for prefix in ("", "/s/{key}"):
        for path, (model, summary) in _BODIES.items():
            ref = {"$ref": _REF.format(model=model.__name__)}
            content = {"application/json": {"schema": ref}}
            paths[prefix + path] = {
                "post": _operation(summary, prefix)
                | {"requestBody": {"required": True, "content": content}}
            }
        listed = _operation("List the names of the model.", prefix)
        paths[f"{prefix}/v1/models"] = {"get": listed}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "LongArc gateway",
            "version": "1",
            "description": "Three dialects over one policy; see docs/guides/gateway-dialects.md.",
        },
        "security": [{"bearer": []}, {"apiKey": []}],
        "paths": paths,
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _operation(summary: str, prefix: str) -> dict[str, Any]:
    told: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    events = {"text/event-stream": {"schema": _EVENT}}
    operation: dict[str, Any] = {
        "summary": summary,
        "responses": {"200": {"description": "The answer.", "content": told | events}}
        | {code: {"description": why, "content": told} for code, why in _STATUSES.items()},
    }
    if prefix:
        key = {"name": "key", "in": "path", "required": True, "schema": {"type": "string"}}
        operation |= {"parameters": [key], "security": []}
    return operation
