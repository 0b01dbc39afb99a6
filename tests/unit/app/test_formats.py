"""Casts against torch, bit for bit; files against the safetensors library."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.torch import load

from app.formats import FORMATS
from app.formats.dtypes import NUMPY, cast
from app.formats.safetensors import CHUNK_BYTES
from app.formats.types import EncodedItem
from app.schemas import EncodeOptions

DTYPES = ("float32", "float16", "bfloat16")


def as_torch(array: np.ndarray, dtype: str) -> torch.Tensor:
    tensor = torch.from_numpy(np.array(array))
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor


def assert_same_bits(ours: np.ndarray, theirs: torch.Tensor) -> None:
    """Equal bit for bit; of a NaN only that it is one."""
    mine = as_torch(ours, str(theirs.dtype).removeprefix("torch."))
    assert mine.dtype == theirs.dtype
    nan = torch.isnan(theirs)
    assert torch.equal(torch.isnan(mine), nan)
    bits = torch.int32 if theirs.dtype == torch.float32 else torch.int16
    assert torch.equal(mine[~nan].view(bits), theirs[~nan].view(bits))


@pytest.mark.parametrize("target", DTYPES)
@pytest.mark.parametrize("source", ["float16", "bfloat16"])
def test_every_16_bit_value(source: str, target: str) -> None:
    values = np.arange(1 << 16, dtype=np.uint16).view(NUMPY[source])
    assert_same_bits(cast(values, source, target), as_torch(values, source).to(getattr(torch, target)))


@pytest.mark.parametrize("target", DTYPES)
@given(hnp.arrays(np.uint32, st.integers(1, 64)))
def test_any_float32(target: str, bits: np.ndarray) -> None:
    values = bits.view(np.float32)
    assert_same_bits(cast(values, "float32", target), as_torch(values, "float32").to(getattr(torch, target)))


@pytest.mark.parametrize("target", DTYPES)
def test_float32_at_every_rounding_boundary_of_bfloat16(target: str) -> None:
    high = np.arange(1 << 16, dtype=np.uint32)[:, None] << 16
    values = (high | np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)).view(np.float32)
    assert_same_bits(cast(values, "float32", target), as_torch(values, "float32").to(getattr(torch, target)))


def test_no_copy_where_the_dtype_is_right() -> None:
    array = np.zeros((2, 3), np.uint16)
    assert cast(array, "bfloat16", "bfloat16") is array


def encoded(index: int, dtype: str, video: bool = False, rows: int = 4, columns: int = 6) -> EncodedItem:
    rng = np.random.default_rng(index)
    values = cast(rng.standard_normal((rows, columns), np.float32), "float32", dtype)
    return EncodedItem(
        index=index,
        modality="video" if video else "image",
        grid_thw=(2, 4, 8) if video else (1, 4, 4),
        timestamps=np.array([0.25, 1.25], np.float32) if video else None,
        embeddings=values,
        shape=values.shape,
        dtype=dtype,
        pool="video" if video else "image",
        execution="graph",
        reason=None,
        budget=64,
        num_tokens=rows,
        num_frames=4 if video else 1,
        width=128 if video else 64,
        height=64,
    )


FACTS = {
    "index": 1,
    "modality": "video",
    "pool": "video",
    "execution": "graph",
    "reason": None,
    "budget": 64,
    "num_tokens": 4,
    "num_frames": 4,
    "width": 128,
    "height": 64,
}


@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "float32")])
def test_safetensors(dtypes: tuple[str, str]) -> None:
    items = [encoded(0, dtypes[0], rows=3, columns=5), encoded(1, dtypes[1], video=True)]
    rendered = FORMATS["safetensors"]("the model", items)
    body = b"".join(rendered.pieces)
    assert len(body) == rendered.length
    tensors = load(body)
    assert set(tensors) == {"0.embeddings", "0.grid_thw", "1.embeddings", "1.grid_thw", "1.timestamps"}
    for i, item in enumerate(items):
        assert torch.equal(tensors[f"{i}.embeddings"], as_torch(item.embeddings, item.dtype))
        assert tensors[f"{i}.grid_thw"].dtype == torch.int64
        assert tuple(tensors[f"{i}.grid_thw"].tolist()) == item.grid_thw
    assert tensors["1.timestamps"].tolist() == [0.25, 1.25]
    size = int.from_bytes(body[:8], "little")
    header = json.loads(body[8 : 8 + size])
    metadata = header.pop("__metadata__")
    assert metadata["model"] == "the model"
    assert json.loads(metadata["items"])[1] == FACTS
    for entry in header.values():
        assert (8 + size + entry["data_offsets"][0]) % {"I64": 8, "F32": 4, "F16": 2, "BF16": 2}[entry["dtype"]] == 0


def test_safetensors_pieces_are_views_of_the_embeddings() -> None:
    item = encoded(0, "float32", rows=700, columns=1000)
    pieces = list(FORMATS["safetensors"]("m", [item]).pieces)
    assert all(len(piece) <= CHUNK_BYTES for piece in pieces)
    large = [piece for piece in pieces if isinstance(piece, memoryview) and len(piece) > 24]
    assert sum(map(len, large)) == item.embeddings.nbytes
    assert all(np.shares_memory(np.frombuffer(piece, np.uint8), item.embeddings) for piece in large)


@pytest.mark.parametrize("dtype", DTYPES)
def test_json(dtype: str) -> None:
    items = [encoded(0, dtype), encoded(1, dtype, video=True)]
    rendered = FORMATS["json"]("the model", items)
    body = b"".join(rendered.pieces)
    assert len(body) == rendered.length
    answer = json.loads(body)
    assert (answer["object"], answer["model"], answer["usage"]) == ("list", "the model", {"visual_tokens": 8})
    assert "timestamps" not in answer["data"][0]
    entry = answer["data"][1]
    raw = base64.b64decode(entry.pop("embedding"))
    assert np.array_equal(np.frombuffer(raw, NUMPY[dtype]).reshape(4, 6), items[1].embeddings)
    assert entry == {
        "object": "visual_embedding",
        **FACTS,
        "grid_thw": [2, 4, 8],
        "timestamps": [0.25, 1.25],
        "shape": [4, 6],
        "dtype": dtype,
    }


@pytest.mark.parametrize("format_", list(FORMATS))
def test_stored_items_are_told_of_without_their_embeddings(format_: str) -> None:
    inline = encoded(1, "bfloat16", video=True)
    stored = replace(inline, embeddings=None, hash="ab" * 32, stored="hit")
    told = {**FACTS, "hash": "ab" * 32, "stored": "hit", "dtype": "bfloat16", "shape": [4, 6]}
    rendered = FORMATS[format_]("the model", [stored])
    body = b"".join(rendered.pieces)
    assert len(body) == rendered.length
    if format_ == "json":
        answer = json.loads(body)
        extra = {"object": "visual_embedding", "grid_thw": [2, 4, 8], "timestamps": [0.25, 1.25]}
        assert answer["data"] == [{**told, **extra}]
        assert answer["usage"] == {"visual_tokens": 4}
    else:
        assert {name: tensor.tolist() for name, tensor in load(body).items()} == {
            "0.grid_thw": [2, 4, 8],
            "0.timestamps": [0.25, 1.25],
        }
        header = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])
        assert json.loads(header["__metadata__"]["items"]) == [told]


def test_the_option_names_the_formats() -> None:
    annotation = EncodeOptions.model_fields["format"].annotation
    assert set(get_args(annotation)) == set(FORMATS)
