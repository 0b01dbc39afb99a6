"""The tower's elementwise work: plain PyTorch here, fused kernels in `kernels.py` with the same methods."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from encoder.preprocess import patchify

EPS = 1e-6


class Ops(Protocol):
    def add_layer_norm(
        self, x: torch.Tensor, y: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor
    ) -> torch.Tensor:
        """`x += y` in place if `y` is given; returns LayerNorm(x). x, y: [rows, hidden]."""
        ...

    def rotary_(self, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Rotates q and k of qkv [rows, 3, heads, head_dim] in place, in float32. cos, sin: [rows, head_dim / 2]."""
        ...

    def linear_gelu(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """GELU (tanh form) of x @ weight.T + bias."""
        ...

    def patchify(self, frames: torch.Tensor, out: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> None:
        """Normalised patches of uint8 frames [T, 3, H, W] into out [t * h * w, 1536]; see `encoder.preprocess`."""
        ...


class TorchOps:
    def add_layer_norm(
        self, x: torch.Tensor, y: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor
    ) -> torch.Tensor:
        if y is not None:
            x.add_(y)
        return F.layer_norm(x, weight.shape, weight, bias, EPS)

    def rotary_(self, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        qk = qkv[:, :2].float()
        first, second = qk.chunk(2, dim=-1)
        cos, sin = cos[:, None, None], sin[:, None, None]
        qkv[:, :2].copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))

    def linear_gelu(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.gelu(F.linear(x, weight, bias), approximate="tanh")

    def patchify(self, frames: torch.Tensor, out: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> None:
        out.copy_(patchify(frames, mean, std))
