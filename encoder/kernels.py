"""Triton kernels of the tower: varlen attention, add + LayerNorm, rotary and patchify.

Every kernel of the chain takes part in programmatic dependent launch where the device has it (`pdl`): it starts while
its predecessor drains and waits for that one's results before it touches any of them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from encoder.ops import EPS, TorchOps


@triton.jit
def _wait(PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def _attention_tiles(
    CU, TILES, num_seqs, max_tiles, BM: tl.constexpr, S: tl.constexpr, T: tl.constexpr, PDL: tl.constexpr
):
    _wait(PDL)
    seq = tl.arange(0, S)
    start = tl.load(CU + seq, mask=seq < num_seqs, other=0)
    end = tl.load(CU + seq + 1, mask=seq < num_seqs, other=0)
    ends = tl.cumsum((end - start + BM - 1) // BM, 0)
    tile = tl.program_id(0) * T + tl.arange(0, T)
    # The tile's segment is the number of segments whose tiles all come before it.
    index = tl.sum((ends[None, :] <= tile[:, None]).to(tl.int32), 1)
    live = index < num_seqs
    hit = seq[None, :] == index[:, None]
    first = tl.sum(tl.where(hit, (ends - (end - start + BM - 1) // BM)[None, :], 0), 1)
    start = tl.load(CU + index, mask=live, other=0)
    end = tl.load(CU + index + 1, mask=live, other=0)
    inside = tile < max_tiles
    tl.store(TILES + tile * 3, tl.where(live, start + (tile - first) * BM, 0), mask=inside)
    tl.store(TILES + tile * 3 + 1, start, mask=inside)
    tl.store(TILES + tile * 3 + 2, end, mask=inside)


@triton.jit
def _attention(
    QKV, OUT, TILES, stride, out_stride, scale,
    KA, KB, VA, VB,
    H: tl.constexpr, D: tl.constexpr, DA: tl.constexpr, DB: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    _wait(PDL)
    tile = tl.program_id(0)
    head = tl.program_id(1)
    q0 = tl.load(TILES + tile * 3)
    start = tl.load(TILES + tile * 3 + 1)
    end = tl.load(TILES + tile * 3 + 2)
    if q0 >= end:
        return
    rows = q0 + tl.arange(0, BM)
    da = tl.arange(0, DA)
    q_base = QKV + rows.to(tl.int64)[:, None] * stride + head * D
    qa = tl.load(q_base + da[None, :], mask=(rows < end)[:, None], other=0.0)
    acc_a = tl.zeros([BM, DA], tl.float32)
    if DB > 0:
        db = DA + tl.arange(0, DB)
        in_head = db < D
        qb = tl.load(q_base + db[None, :], mask=(rows < end)[:, None] & in_head[None, :], other=0.0)
        acc_b = tl.zeros([BM, DB], tl.float32)
    row_max = tl.full([BM], float("-inf"), tl.float32)
    row_sum = tl.zeros([BM], tl.float32)
    k_base = QKV + (H + head) * D
    v_base = QKV + (2 * H + head) * D
    full = start + (end - start) // BN * BN
    for n in tl.range(start, full, BN, num_stages=STAGES):
        if TMA:
            ka = KA.load([n, H + head, 0]).reshape(BN, DA)
            s = tl.dot(qa, ka.T, input_precision=PRECISION)
            if DB > 0:
                kb = KB.load([n, H + head, DA]).reshape(BN, DB)
                s = tl.dot(qb, kb.T, s, input_precision=PRECISION)
        else:
            at = (n + tl.arange(0, BN)).to(tl.int64)[:, None] * stride
            ka = tl.load(k_base + at + da[None, :])
            s = tl.dot(qa, ka.T, input_precision=PRECISION)
            if DB > 0:
                kb = tl.load(k_base + at + db[None, :], mask=in_head[None, :], other=0.0)
                s = tl.dot(qb, kb.T, s, input_precision=PRECISION)
        new_max = tl.maximum(row_max, tl.max(s, 1) * scale)
        p = tl.math.exp2(s * scale - new_max[:, None])
        alpha = tl.math.exp2(row_max - new_max)
        row_sum = row_sum * alpha + tl.sum(p, 1)
        row_max = new_max
        p = p.to(qa.dtype)
        if TMA:
            va = VA.load([n, 2 * H + head, 0]).reshape(BN, DA)
            acc_a = tl.dot(p, va, acc_a * alpha[:, None], input_precision=PRECISION)
            if DB > 0:
                vb = VB.load([n, 2 * H + head, DA]).reshape(BN, DB)
                acc_b = tl.dot(p, vb, acc_b * alpha[:, None], input_precision=PRECISION)
        else:
            va = tl.load(v_base + at + da[None, :])
            acc_a = tl.dot(p, va, acc_a * alpha[:, None], input_precision=PRECISION)
            if DB > 0:
                vb = tl.load(v_base + at + db[None, :], mask=in_head[None, :], other=0.0)
                acc_b = tl.dot(p, vb, acc_b * alpha[:, None], input_precision=PRECISION)
    # The rest in narrow tiles. Rows past the segment may hold NaN, so keys and values both are masked to zero there.
    for n in tl.range(full, end, BR, num_stages=2):
        inside = n + tl.arange(0, BR) < end
        at = (n + tl.arange(0, BR)).to(tl.int64)[:, None] * stride
        ka = tl.load(k_base + at + da[None, :], mask=inside[:, None], other=0.0)
        s = tl.dot(qa, ka.T, input_precision=PRECISION)
        if DB > 0:
            kb = tl.load(k_base + at + db[None, :], mask=inside[:, None] & in_head[None, :], other=0.0)
            s = tl.dot(qb, kb.T, s, input_precision=PRECISION)
        s = tl.where(inside[None, :], s, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(s, 1) * scale)
        p = tl.math.exp2(s * scale - new_max[:, None])
        alpha = tl.math.exp2(row_max - new_max)
        row_sum = row_sum * alpha + tl.sum(p, 1)
        row_max = new_max
        p = p.to(qa.dtype)
        va = tl.load(v_base + at + da[None, :], mask=inside[:, None], other=0.0)
        acc_a = tl.dot(p, va, acc_a * alpha[:, None], input_precision=PRECISION)
        if DB > 0:
            vb = tl.load(v_base + at + db[None, :], mask=inside[:, None] & in_head[None, :], other=0.0)
            acc_b = tl.dot(p, vb, acc_b * alpha[:, None], input_precision=PRECISION)
    inverse = 1.0 / row_sum[:, None]
    o_base = OUT + rows.to(tl.int64)[:, None] * out_stride + head * D
    tl.store(o_base + da[None, :], (acc_a * inverse).to(qa.dtype), mask=(rows < end)[:, None])
    if DB > 0:
        tl.store(o_base + db[None, :], (acc_b * inverse).to(qa.dtype), mask=(rows < end)[:, None] & in_head[None, :])


@triton.jit(do_not_specialize=["rows"])
def _add_layer_norm(
    X,
    Y,
    W,
    B,
    OUT,
    rows,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    EPSILON: tl.constexpr,
    PDL: tl.constexpr,
):
    col = tl.arange(0, BLOCK)
    inside = col < N
    w = tl.load(W + col, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(B + col, mask=inside, other=0.0).to(tl.float32)
    _wait(PDL)
    at = tl.program_id(0).to(tl.int64) * N + col
    x = tl.load(X + at, mask=inside, other=0.0)
    if PARTS > 0:
        y = tl.load(Y + at, mask=inside, other=0.0).to(tl.float32)
        for part in tl.static_range(1, PARTS):
            y += tl.load(Y + tl.cast(part, tl.int64) * rows * N + at, mask=inside, other=0.0)
        # Rounded as the separate product and addition of the reference round.
        x = (x.to(tl.float32) + y.to(X.dtype.element_ty).to(tl.float32)).to(X.dtype.element_ty)
        tl.store(X + at, x, mask=inside)
    x = x.to(tl.float32)
    centred = tl.where(inside, x - tl.sum(x, 0) / N, 0.0)
    scale = tl.math.rsqrt(tl.sum(centred * centred, 0) / N + EPSILON)
    tl.store(OUT + at, (centred * scale * w + b).to(OUT.dtype.element_ty), mask=inside)


@triton.jit
def _rotary(
    QKV, COS, SIN, pairs, stride, HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    _wait(PDL)
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = pair < pairs
    row, at = pair // (HEADS * HALF), pair % (HEADS * HALF)
    head, d = at // HALF, at % HALF
    cos = tl.load(COS + row * HALF + d, mask=inside, other=0.0)
    sin = tl.load(SIN + row * HALF + d, mask=inside, other=0.0)
    to = QKV + row.to(tl.int64) * stride + head * (2 * HALF) + d
    first = tl.load(to, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(to + HALF, mask=inside, other=0.0).to(tl.float32)
    tl.store(to, (first * cos - second * sin).to(QKV.dtype.element_ty), mask=inside)
    tl.store(to + HALF, (second * cos + first * sin).to(QKV.dtype.element_ty), mask=inside)


@triton.jit
def _patchify(
    FRAMES, OUT, MEAN, STD, num_frames, height, width,
    P: tl.constexpr, T: tl.constexpr, MERGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    blocks_w = width // (P * MERGE)
    per_frame = (height // P) * (width // P)
    temporal, at = row // per_frame, row % per_frame
    block, inner = at // (MERGE * MERGE), at % (MERGE * MERGE)
    y0 = (block // blocks_w * MERGE + inner // MERGE) * P
    x0 = (block % blocks_w * MERGE + inner % MERGE) * P
    col = tl.arange(0, BLOCK)
    inside = col < 3 * T * P * P
    channel, pair = col // (T * P * P), col // (P * P) % T
    y, x = y0 + col // P % P, x0 + col % P
    # An odd last frame stands for its missing partner.
    frame = tl.minimum(temporal * T + pair, num_frames - 1)
    source = ((frame.to(tl.int64) * 3 + channel) * height + y) * width + x
    pixel = tl.load(FRAMES + source, mask=inside, other=0).to(tl.float32)
    mean = tl.load(MEAN + channel, mask=inside, other=0.0)
    std = tl.load(STD + channel, mask=inside, other=1.0)
    value = tl.math.div_rn(pixel - mean, std)
    tl.store(OUT + row.to(tl.int64) * (3 * T * P * P) + col, value.to(OUT.dtype.element_ty), mask=inside)


def supports_pdl() -> bool:
    """Programmatic dependent launch, like the tensor memory accelerator, came with compute capability 9.0."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


def attention_tiles(cu_seqlens: torch.Tensor, rows: int, block_m: int) -> torch.Tensor:
    """The query tiles of `block_m` rows in every segment, int32 [tiles, 3]: first row, segment start, segment end.

    There are as many as any layout of `rows` rows in that many segments can need; the rest are empty (end is not above
    the first row).
    """
    num_seqs = len(cu_seqlens) - 1
    max_tiles = rows // block_m + num_seqs
    tiles = torch.empty(max_tiles, 3, dtype=torch.int32, device=cu_seqlens.device)
    seqs, block, pdl = triton.next_power_of_2(num_seqs), 16, supports_pdl()
    _attention_tiles[(triton.cdiv(max_tiles, block),)](
        cu_seqlens, tiles, num_seqs, max_tiles, block_m, seqs, block, pdl, launch_pdl=pdl
    )
    return tiles


class TritonVarlen:
    """FlashAttention-2's algorithm (Dao 2023) over a table of query tiles that the device makes from `cu_seqlens`, so a
    captured grid serves every layout: a tile past the last segment returns at once. A head dimension that is no power
    of two is covered by a wide and a narrow part (72 = 64 + 8 of 16), each with its own accumulator."""

    name = "triton-varlen"
    capturable = True

    def __init__(
        self,
        block_m: int = 128,
        block_n: int = 64,
        warps: int = 4,
        stages: int = 3,
        tma: bool | None = None,
        block_r: int = 16,
    ) -> None:
        self.block_m, self.block_n, self.block_r = block_m, block_n, block_r
        self.warps, self.stages = warps, stages
        self.pdl = supports_pdl()
        self.tma = self.pdl if tma is None else tma

    def plan(self, cu_seqlens: torch.Tensor, max_seqlen: int, rows: int) -> torch.Tensor:
        """int32 [tiles, 3]: first query row, segment start, segment end."""
        return attention_tiles(cu_seqlens, rows, self.block_m)

    def __call__(self, qkv: torch.Tensor, plan: torch.Tensor) -> torch.Tensor:
        rows, _, heads, dim = qkv.shape
        out = torch.empty(rows, heads * dim, dtype=qkv.dtype, device=qkv.device)
        wide = 1 << (dim.bit_length() - 1)
        narrow = max(triton.next_power_of_2(dim - wide), 16) if dim > wide else 0
        descriptors: list[Any] = [None] * 4
        if self.tma:
            view = qkv.view(rows, 3 * heads, dim)
            a = TensorDescriptor.from_tensor(view, [self.block_n, 1, wide])
            b = TensorDescriptor.from_tensor(view, [self.block_n, 1, max(narrow, 16)])
            descriptors = [a, b, a, b]
        _attention[(len(plan), heads)](
            qkv, out, plan, qkv.stride(0), out.stride(0), dim**-0.5 * math.log2(math.e), *descriptors,
            H=heads, D=dim, DA=wide, DB=narrow, BM=self.block_m, BN=self.block_n, BR=self.block_r,
            TMA=self.tma, STAGES=self.stages, PDL=self.pdl, PRECISION="ieee" if qkv.dtype == torch.float32 else "tf32",
            num_warps=self.warps, num_stages=self.stages, launch_pdl=self.pdl,
        )  # fmt: skip
        return out


class TritonOps(TorchOps):
    """Fused kernels around PyTorch's linear layers, on the current device. `y` of `add_layer_norm` may also be partial
    sums, float32 [parts, rows, hidden], which are added up."""

    linears = "cublas"

    def __init__(self) -> None:
        self.pdl = supports_pdl()

    def linear_gelu(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, live: torch.Tensor, approximate: str = "tanh"
    ) -> torch.Tensor:
        if approximate != "tanh":
            return super().linear_gelu(x, weight, bias, live, approximate)
        return torch.ops.aten._addmm_activation(bias, x, weight.t(), use_gelu=True)

    def add_layer_norm(
        self, x: torch.Tensor, y: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor
    ) -> torch.Tensor:
        out = torch.empty_like(x)
        rows, cols = x.shape
        parts = 0 if y is None else y.shape[0] if y.ndim == 3 else 1
        _add_layer_norm[(rows,)](
            x, x if y is None else y, weight, bias, out, rows, cols, triton.next_power_of_2(cols), parts, EPS,
            self.pdl, num_warps=4 if cols <= 2048 else 8, launch_pdl=self.pdl,
        )  # fmt: skip
        return out

    def rotary_(self, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        rows, _, heads, dim = qkv.shape
        pairs, block = rows * heads * dim, 1024
        _rotary[(triton.cdiv(pairs, block),)](
            qkv, cos, sin, pairs, qkv.stride(0), 2 * heads, dim // 2, block, self.pdl, num_warps=4, launch_pdl=self.pdl
        )

    def patchify(self, frames: torch.Tensor, out: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> None:
        frames_count, _, height, width = frames.shape
        _patchify[(len(out),)](frames, out, mean, std, frames_count, height, width, 16, 2, 2, 2048, num_warps=4)
