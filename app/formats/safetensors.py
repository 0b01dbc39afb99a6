"""The `safetensors` response: the header first, then the tensors' own bytes, in chunks, never copied as a whole."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from app.formats.types import EncodedItem, Rendered

MEDIA_TYPE = "application/vnd.safetensors"
CHUNK_BYTES = 1 << 20
Tensor = tuple[str, str, np.ndarray]  # name, dtype (bfloat16 as its bits), values
_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64"}


def render(model: str, items: Sequence[EncodedItem]) -> Rendered:
    """Tensors `<i>.grid_thw` int64 [3], `<i>.timestamps` float32 [t] (videos), `<i>.embeddings` [rows, columns] unless
    stored.

    In the file, eight-byte tensors come first and the embeddings last, so that each begins aligned to its dtype.
    """
    tensors: list[Tensor] = []
    for i, item in enumerate(items):
        tensors.append((f"{i}.grid_thw", "int64", np.array(item.grid_thw, "<i8")))
    for i, item in enumerate(items):
        if item.timestamps is not None:
            tensors.append((f"{i}.timestamps", "float32", item.timestamps))
    embeddings = [
        (f"{i}.embeddings", item.dtype, item.embeddings) for i, item in enumerate(items) if item.embeddings is not None
    ]
    tensors += sorted(embeddings, key=lambda tensor: -tensor[2].itemsize)
    return pack(tensors, {"model": model, "items": json.dumps([item.facts() for item in items])})


def pack(tensors: Sequence[Tensor], metadata: dict[str, str]) -> Rendered:
    """A safetensors file of `tensors`, in their order."""
    header: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for name, dtype, array in tensors:
        end = offset + array.nbytes
        header[name] = {"dtype": _NAMES[dtype], "shape": list(array.shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    head = len(encoded).to_bytes(8, "little") + encoded
    return Rendered(MEDIA_TYPE, len(head) + offset, _pieces(head, [array for _, _, array in tensors]))


def _pieces(head: bytes, arrays: Sequence[np.ndarray]) -> Iterator[bytes | memoryview]:
    yield head
    for array in arrays:
        view = np.ascontiguousarray(array).data.cast("B")
        for start in range(0, len(view), CHUNK_BYTES):
            yield view[start : start + CHUNK_BYTES]
