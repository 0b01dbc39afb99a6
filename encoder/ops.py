"""What a tower does besides attention: plain PyTorch here; fused kernels in `kernels.py` and, for Hopper GPUs, linear
layers in `linear_sm90.py` with the same methods."""

from __future__ import annotations

import logging

import torch
import torch.nn.functional as F

from encoder.attention import has_triton, runs_hopper_kernels
from encoder.preprocess import patchify

logger = logging.getLogger(__name__)

EPS = 1e-6


class TorchOps:
    """The operations in plain PyTorch, and the interface of the faster ones.

    Tensors are of one dtype where none is given, and contiguous; rows that a linear layer reads or writes may be
    further apart. `live` is int32 [1] on the device: rows of a result from that one on may be left unwritten.

    Weights, biases and `live` may be read while earlier kernels still run: nothing that takes part in programmatic
    dependent launch may write them.
    """

    linears = "torch"
    """What runs the linear layers."""

    def lay_out(self, weight: torch.Tensor) -> torch.Tensor:
        """A weight [out, in] with the same values as the linear layers like it in memory."""
        return weight

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        live: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x @ weight.T + bias [rows, out], into `out` if given: x [rows, in], weight [out, in], bias [out]."""
        return F.linear(x, weight, bias) if out is None else torch.addmm(bias, x, weight.t(), out=out)

    def linear_gelu(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, live: torch.Tensor, approximate: str = "tanh"
    ) -> torch.Tensor:
        """GELU of x @ weight.T + bias [rows, out]: its tanh form, or the exact one where `approximate` is "none"."""
        return F.gelu(F.linear(x, weight, bias), approximate=approximate)

    def add_layer_norm(
        self, x: torch.Tensor, y: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor
    ) -> torch.Tensor:
        """`x += y` in place if `y` is given; returns LayerNorm(x). x, y: [rows, hidden]."""
        if y is not None:
            x.add_(y)
        return F.layer_norm(x, weight.shape, weight, bias, EPS)

    def linear_parts(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, live: torch.Tensor
    ) -> torch.Tensor:
        """x @ weight.T + bias as `y` of `add_layer_norm`: [rows, out], or float32 [parts, rows, out] that add up to it
        where these operations sum such."""
        return self.linear(x, weight, bias, live)

    def linear_rotary(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        live: torch.Tensor,
    ) -> torch.Tensor:
        """qkv [rows, 3, heads, head_dim] of x @ weight.T + bias, with q and k rotated in float32.

        cos, sin: float32 [rows, head_dim / 2].
        """
        qkv = self.linear(x, weight, bias, live).view(len(x), 3, -1, 2 * cos.shape[1])
        self.rotary_(qkv, cos, sin)
        return qkv

    def rotary_(self, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Rotates q and k of qkv [rows, 3, heads, head_dim] in place; cos, sin: float32 [rows, head_dim / 2]."""
        qk = qkv[:, :2].float()
        first, second = qk.chunk(2, dim=-1)
        cos, sin = cos[:, None, None], sin[:, None, None]
        qkv[:, :2].copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))

    def patchify(self, frames: torch.Tensor, out: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> None:
        """Normalised patches of uint8 frames [T, 3, H, W] into out [t * h * w, 1536]; see `encoder.preprocess`."""
        out.copy_(patchify(frames, mean, std))


def choose_ops(device: torch.device, dtype: torch.dtype, head_dim: int) -> TorchOps:
    """The implementation to serve with on `device`, which must be the current one, with `dtype`."""
    if runs_hopper_kernels(device, dtype, head_dim):
        try:
            from encoder.linear_sm90 import HopperOps

            return HopperOps(dtype, head_dim)
        except Exception as error:
            # Bindings, a driver or a run-time compiler that do not take the kernels are no reason not to serve.
            logger.warning("the Hopper linear layers cannot be used: %r", error)
    if has_triton(device):
        from encoder.kernels import TritonOps

        return TritonOps()
    return TorchOps()
