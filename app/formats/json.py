"""The `json` response: OpenAI's list shape, embeddings as base64 of their little-endian bytes unless stored."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence

import numpy as np

from app.formats.types import EncodedItem, Rendered

MEDIA_TYPE = "application/json"


def render(model: str, items: Sequence[EncodedItem]) -> Rendered:
    data = [
        {
            "object": "visual_embedding",
            **item.facts(),
            "grid_thw": list(item.grid_thw),
            **({} if item.timestamps is None else {"timestamps": item.timestamps.tolist()}),
            "shape": list(item.shape),
            "dtype": item.dtype,
            **({} if item.embeddings is None else {"embedding": _base64(item.embeddings)}),
        }
        for item in items
    ]
    usage = {"visual_tokens": sum(item.num_tokens for item in items)}
    body = json.dumps({"object": "list", "model": model, "data": data, "usage": usage}).encode()
    return Rendered(MEDIA_TYPE, len(body), [body])


def _base64(array: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(array).data).decode()
