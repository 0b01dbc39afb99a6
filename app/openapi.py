"""What /openapi.json says of `POST /v1/encode`, made from the same models and table that check and answer requests."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from app.errors import CODES
from app.schemas import EncodeBody, EncodeOptions

_BINARY = {"type": "string", "format": "binary"}


def _schema(model: type[EncodeBody] | type[EncodeOptions]) -> dict[str, Any]:
    """The model's JSON schema with every reference inlined, as a fragment has no components of its own."""
    schema = model.model_json_schema()
    definitions = schema.pop("$defs", {})

    def inline(node: Any) -> Any:
        if isinstance(node, dict):
            if "$ref" in node:
                return inline(definitions[node["$ref"].rsplit("/", 1)[1]])
            return {key: inline(value) for key, value in node.items() if key != "discriminator"}
        return [inline(value) for value in node] if isinstance(node, list) else node

    return inline(schema)


def _encode() -> dict[str, Any]:
    options = _schema(EncodeOptions)["properties"]
    body = _schema(EncodeBody)
    body["properties"] |= options
    form = {"file": {"type": "array", "items": _BINARY}, **options}
    return {
        "parameters": [
            {"name": name, "in": "query", "required": False, "schema": schema} for name, schema in options.items()
        ],
        "requestBody": {
            "required": True,
            "content": {
                "*/*": {"schema": _BINARY},
                "multipart/form-data": {"schema": {"type": "object", "properties": form, "required": ["file"]}},
                "application/json": {"schema": body},
            },
        },
    }


def _errors() -> dict[int | str, dict[str, Any]]:
    by_status: dict[int, list[str]] = defaultdict(list)
    for code, (status, meaning) in CODES.items():
        by_status[status].append(f"`{code}`: {meaning}")
    responses: dict[int | str, dict[str, Any]] = {
        status: {"description": "; ".join(lines)} for status, lines in sorted(by_status.items())
    }
    responses[200] = {
        "description": "the embeddings, in the format asked for",
        "content": {"application/vnd.safetensors": {"schema": _BINARY}, "application/json": {}},
    }
    return responses


ENCODE: dict[str, Any] = _encode()
ERRORS: dict[int | str, dict[str, Any]] = _errors()
