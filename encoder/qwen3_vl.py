"""The Qwen3-VL vision tower over static buffers, with the parameter names of `transformers`' Qwen3VLVisionModel."""

from __future__ import annotations

import functools
import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from encoder.attention import choose_attention
from encoder.config import VisionConfig
from encoder.defs import (
    EncoderCudaGraphCaptureInputs,
    EncoderCudaGraphConfig,
    EncoderCudaGraphReplayBuffers,
    EncoderItemSpec,
    MmKwargs,
    Modality,
    Stop,
    Stopped,
)
from encoder.frames import MERGE, PATCH, TEMPORAL
from encoder.graph import StaticBuffers
from encoder.ops import EPS, TorchOps, choose_ops

_VIDEO_CUDAGRAPH_T_CAPTURE = 8
_INPUT_KEYS: dict[str, str] = {"image": "pixel_values", "video": "pixel_values_videos"}
_GRID_KEYS: dict[str, str] = {"image": "image_grid_thw", "video": "video_grid_thw"}
_POSITION_CACHE_ROWS = 262_144

Grid = tuple[int, int, int]


class _Mlp(nn.Module):
    def __init__(self, inner: int, hidden: int, out: int) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(inner, hidden)
        self.linear_fc2 = nn.Linear(hidden, out)


class _Block(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden_size, eps=EPS)
        self.norm2 = nn.LayerNorm(config.hidden_size, eps=EPS)
        self.attn = nn.ModuleDict(
            {
                "qkv": nn.Linear(config.hidden_size, 3 * config.hidden_size),
                "proj": nn.Linear(config.hidden_size, config.hidden_size),
            }
        )
        self.mlp = _Mlp(config.hidden_size, config.intermediate_size, config.hidden_size)


class _Merger(_Mlp):
    """2x2 patches -> one token. `post_shuffle` norms the four patches as one row, else each patch by itself."""

    def __init__(self, config: VisionConfig, post_shuffle: bool) -> None:
        merged = config.hidden_size * MERGE**2
        super().__init__(merged, merged, config.out_hidden_size)
        self.post_shuffle = post_shuffle
        self.norm = nn.LayerNorm(merged if post_shuffle else config.hidden_size, eps=EPS)

    def forward(self, normed: torch.Tensor, out: torch.Tensor, ops: TorchOps, live: torch.Tensor) -> None:
        hidden = ops.linear_gelu(normed, self.linear_fc1.weight, self.linear_fc1.bias, live, approximate="none")
        ops.linear(hidden, self.linear_fc2.weight, self.linear_fc2.bias, live, out=out)


class Qwen3VLVisionEncoder(nn.Module):
    """Implements `SupportsEncoderCudaGraph`.

    `mm_kwargs` has `pixel_values` and `image_grid_thw`, or `pixel_values_videos` and `video_grid_thw`. The pixels are
    normalised patches [sum of t*h*w, 1536], or a list of uint8 frames [T, 3, H, W], one tensor an item. Grids are a
    tensor [items, 3] or a sequence of (t, h, w).

    Args:
        t_capture: temporal patches that a video may have in a graph.
        image_mean, image_std: of pixels in 0..1, one value a channel; for pixels that come as frames.

    Raises:
        ValueError: a `t_capture` below 1.
    """

    def __init__(
        self,
        config: VisionConfig,
        t_capture: int = _VIDEO_CUDAGRAPH_T_CAPTURE,
        image_mean: Sequence[float] = (0.5, 0.5, 0.5),
        image_std: Sequence[float] = (0.5, 0.5, 0.5),
    ) -> None:
        super().__init__()
        if t_capture < 1:
            raise ValueError(f"t_capture must be at least 1, got {t_capture}")
        self.config = config
        self.t_capture = t_capture
        # The processors scale mean and std by 255 in float32 and normalise unscaled pixels.
        self._mean = torch.tensor(image_mean, dtype=torch.float32, device="cpu") * 255
        self._std = torch.tensor(image_std, dtype=torch.float32, device="cpu") * 255
        self.patch_embed = nn.ModuleDict(
            {"proj": nn.Conv3d(3, config.hidden_size, (TEMPORAL, PATCH, PATCH), (TEMPORAL, PATCH, PATCH))}
        )
        # Its own random values would have torch import its whole compiler when they are drawn on the meta device.
        self.pos_embed = nn.Embedding.from_pretrained(torch.zeros(config.num_position_embeddings, config.hidden_size))
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.depth))
        self.merger = _Merger(config, post_shuffle=False)
        self.deepstack_merger_list = nn.ModuleList(
            _Merger(config, post_shuffle=True) for _ in config.deepstack_visual_indexes
        )
        self._positions: OrderedDict[tuple[int, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = OrderedDict()
        self.requires_grad_(False)

    def finalize(self, device: torch.device, dtype: torch.dtype) -> Qwen3VLVisionEncoder:
        """Moves the weights and picks the kernels. Call it once, after loading.

        Raises:
            ValueError: a CUDA device that is not the current one, on which kernels are loaded and launched.
        """
        if device.type == "cuda" and device.index not in (None, torch.cuda.current_device()):
            raise ValueError(f"{device} must be the current CUDA device")
        self.to(device=device, dtype=dtype)
        self._mean, self._std = self._mean.to(device), self._std.to(device)
        self.device, self.dtype = device, dtype
        self.attention = choose_attention(device, dtype, self.config.head_dim)
        self.ops = choose_ops(device, dtype, self.config.head_dim)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.weight.data = self.ops.lay_out(module.weight.data)
        self._positions.clear()
        return self

    # --- the protocol ---

    def get_encoder_cudagraph_config(self) -> EncoderCudaGraphConfig:
        return EncoderCudaGraphConfig(
            modalities=("image", "video"),
            input_key=_INPUT_KEYS["image"],
            modality_input_keys=_INPUT_KEYS,
            buffer_keys=(
                "pos_embeds",
                "rotary_pos_emb_cos",
                "rotary_pos_emb_sin",
                "cu_seqlens",
                "max_seqlen",
                "sequence_lengths",
                "num_patches",
            ),
            out_hidden_size=self.config.width,
        )

    def get_encoder_cudagraph_num_seqs(self, mm_kwargs: MmKwargs) -> int:
        return sum(t for t, _, _ in self._grids(mm_kwargs))

    def get_encoder_cudagraph_item_specs(self, mm_kwargs: MmKwargs) -> list[EncoderItemSpec]:
        return [EncoderItemSpec(t * h * w, t * h * w // MERGE**2, t) for t, h, w in self._grids(mm_kwargs)]

    def get_encoder_cudagraph_max_item_seqs(self, modality: Modality) -> int:
        return self.t_capture if modality == "video" else 1

    def select_encoder_cudagraph_items(self, mm_kwargs: MmKwargs, indices: Sequence[int]) -> MmKwargs:
        grid_key, input_key = self._get_grid_thw_key(mm_kwargs), self._get_pixel_values_key(mm_kwargs)
        grids, pixels = self._grids(mm_kwargs), mm_kwargs[input_key]
        if isinstance(pixels, torch.Tensor):
            ends, total = [], 0
            for t, h, w in grids:
                total += t * h * w
                ends.append(total)
            parts = [pixels[(ends[i - 1] if i else 0) : ends[i]] for i in indices]
            return {input_key: parts[0] if len(parts) == 1 else torch.cat(parts), grid_key: [grids[i] for i in indices]}
        return {input_key: [pixels[i] for i in indices], grid_key: [grids[i] for i in indices]}

    def prepare_encoder_cudagraph_capture_inputs(
        self,
        token_budget: int,
        max_batch_size: int,
        device: torch.device,
        dtype: torch.dtype,
        modality: Modality = "image",
        static: StaticBuffers | None = None,
    ) -> EncoderCudaGraphCaptureInputs:
        """Raises ValueError for a modality that the tower does not know."""
        if modality not in _INPUT_KEYS:
            raise ValueError(f"modality must be one of {', '.join(_INPUT_KEYS)}, got {modality!r}")
        static = static or StaticBuffers(device)
        rows, half = token_budget * MERGE**2, self.config.head_dim // 2
        max_num_seqs = max_batch_size * self.get_encoder_cudagraph_max_item_seqs(modality)
        buffers = {
            "pos_embeds": static.take("pos_embeds", (rows, self.config.hidden_size), dtype),
            "rotary_pos_emb_cos": static.take("rotary_pos_emb_cos", (rows, half), torch.float32),
            "rotary_pos_emb_sin": static.take("rotary_pos_emb_sin", (rows, half), torch.float32),
            # Integer buffers differ in size by modality, not by budget: each modality has its own.
            "cu_seqlens": static.take(f"cu_seqlens.{modality}", (max_num_seqs + 1,), torch.int32),
            "max_seqlen": torch.tensor(rows, dtype=torch.int32),
            "sequence_lengths": static.take(f"sequence_lengths.{modality}", (max_num_seqs,), torch.int32),
            "num_patches": static.take("num_patches", (1,), torch.int32),
        }
        pixels = static.take("pixels", (rows, 3 * TEMPORAL * PATCH**2), dtype)
        return EncoderCudaGraphCaptureInputs({_INPUT_KEYS[modality]: pixels}, buffers, max_num_seqs)

    def prepare_encoder_cudagraph_replay_buffers(
        self, mm_kwargs: MmKwargs, token_budget: int, max_batch_size: int
    ) -> EncoderCudaGraphReplayBuffers:
        grids = self._grids(mm_kwargs)
        max_item_seqs = self.get_encoder_cudagraph_max_item_seqs(self._modality(mm_kwargs))
        max_num_seqs = max_batch_size * max_item_seqs
        if any(t > max_item_seqs for t, _, _ in grids) or sum(t for t, _, _ in grids) > max_num_seqs:
            return EncoderCudaGraphReplayBuffers({}, fits=False)
        return EncoderCudaGraphReplayBuffers(dict(self._host_metadata(grids, max_num_seqs, token_budget * MERGE**2)))

    def write_encoder_cudagraph_input(self, mm_kwargs: MmKwargs, input_buffer: torch.Tensor) -> None:
        pixels = mm_kwargs[self._get_pixel_values_key(mm_kwargs)]
        if isinstance(pixels, torch.Tensor):
            input_buffer[: len(pixels)].copy_(pixels, non_blocking=True)
            return
        row = 0
        for frames, (t, h, w) in zip(pixels, self._grids(mm_kwargs), strict=True):
            self.ops.patchify(frames, input_buffer[row : row + t * h * w], self._mean, self._std)
            row += t * h * w

    def encoder_cudagraph_warmup(
        self, input_buffer: torch.Tensor, buffers: dict[str, torch.Tensor], output: torch.Tensor
    ) -> None:
        # The blocks are alike, and so are the deepstack mergers: one of each runs every kernel.
        x = self._forward(input_buffer, buffers, output, depth=1)
        if self.deepstack_merger_list:
            self._merge_level(x, 0, output, buffers["num_patches"] // MERGE**2)

    def encoder_cudagraph_forward(
        self,
        input_buffer: torch.Tensor,
        buffers: dict[str, torch.Tensor],
        output: torch.Tensor,
        stop: Stop | None = None,
    ) -> None:
        self._forward(input_buffer, buffers, output, self.config.depth, stop)

    def _forward(
        self,
        input_buffer: torch.Tensor,
        buffers: dict[str, torch.Tensor],
        output: torch.Tensor,
        depth: int,
        stop: Stop | None = None,
    ) -> torch.Tensor:
        """Writes `output`; returns the hidden states [rows, hidden_size] after the first `depth` blocks."""
        config, ops, attention = self.config, self.ops, self.attention
        rows = len(input_buffer)
        plan = attention.plan(buffers["cu_seqlens"], int(buffers["max_seqlen"]) if attention.capturable else 0, rows)
        cos, sin = buffers["rotary_pos_emb_cos"], buffers["rotary_pos_emb_sin"]
        live = buffers["num_patches"]
        live_tokens = live // MERGE**2
        embed: Any = self.patch_embed["proj"]
        x = ops.linear(input_buffer, embed.weight.view(config.hidden_size, -1), embed.bias, live)
        blocks: list[Any] = list(self.blocks)
        normed = ops.add_layer_norm(x, buffers["pos_embeds"], blocks[0].norm1.weight, blocks[0].norm1.bias)
        for index, block in enumerate(blocks[:depth]):
            if stop is not None and stop():
                raise Stopped
            attn, mlp = block.attn, block.mlp
            qkv = ops.linear_rotary(normed, attn["qkv"].weight, attn["qkv"].bias, cos, sin, live)
            attended = ops.linear_parts(attention(qkv, plan), attn["proj"].weight, attn["proj"].bias, live)
            normed = ops.add_layer_norm(x, attended, block.norm2.weight, block.norm2.bias)
            hidden = ops.linear_gelu(normed, mlp.linear_fc1.weight, mlp.linear_fc1.bias, live)
            hidden = ops.linear_parts(hidden, mlp.linear_fc2.weight, mlp.linear_fc2.bias, live)
            # The norm that reads this block's result next: the following block's, or the merger's.
            norm: Any = blocks[index + 1].norm1 if index + 1 < depth else self.merger.norm
            normed = ops.add_layer_norm(x, hidden, norm.weight, norm.bias)
            if index in config.deepstack_visual_indexes:
                self._merge_level(x, config.deepstack_visual_indexes.index(index), output, live_tokens)
        self.merger(normed.view(rows // MERGE**2, -1), output[:, : config.out_hidden_size], ops, live_tokens)
        return x

    def _merge_level(self, x: torch.Tensor, level: int, output: torch.Tensor, live_tokens: torch.Tensor) -> None:
        merger: Any = self.deepstack_merger_list[level]
        normed = self.ops.add_layer_norm(x.view(len(output), -1), None, merger.norm.weight, merger.norm.bias)
        width = self.config.out_hidden_size
        merger(normed, output[:, (level + 1) * width : (level + 2) * width], self.ops, live_tokens)

    def encoder_eager_forward(self, mm_kwargs: MmKwargs, stop: Stop | None = None) -> torch.Tensor:
        grids = self._grids(mm_kwargs)
        rows = sum(t * h * w for t, h, w in grids)
        pixels = torch.empty(rows, 3 * TEMPORAL * PATCH**2, dtype=self.dtype, device=self.device)
        self.write_encoder_cudagraph_input(mm_kwargs, pixels)
        buffers = self._metadata(grids, sum(t for t, _, _ in grids), max(h * w for _, h, w in grids))
        output = torch.empty(rows // MERGE**2, self.config.width, dtype=self.dtype, device=self.device)
        self.encoder_cudagraph_forward(pixels, buffers, output, stop)
        return output

    # --- metadata ---

    def _modality(self, mm_kwargs: MmKwargs) -> Modality:
        return "video" if _GRID_KEYS["video"] in mm_kwargs else "image"

    def _get_grid_thw_key(self, mm_kwargs: MmKwargs) -> str:
        return _GRID_KEYS[self._modality(mm_kwargs)]

    def _get_pixel_values_key(self, mm_kwargs: MmKwargs) -> str:
        return _INPUT_KEYS[self._modality(mm_kwargs)]

    def _grids(self, mm_kwargs: MmKwargs) -> list[Grid]:
        grids = mm_kwargs[self._get_grid_thw_key(mm_kwargs)]
        rows = grids.tolist() if isinstance(grids, torch.Tensor) else grids
        return [(int(t), int(h), int(w)) for t, h, w in rows]

    def _metadata(self, grids: Sequence[Grid], max_num_seqs: int, max_seqlen: int) -> dict[str, torch.Tensor]:
        """Buffers for these items, on the device."""
        buffers = self._host_metadata(grids, max_num_seqs, max_seqlen)
        for name in ("cu_seqlens", "sequence_lengths", "num_patches"):
            buffers[name] = buffers[name].to(self.device, non_blocking=True)
        return buffers

    def _host_metadata(self, grids: Sequence[Grid], max_num_seqs: int, max_seqlen: int) -> dict[str, torch.Tensor]:
        """Buffers for these items, the integer ones on the host; bounds past the last segment repeat it."""
        tables = [table for t, h, w in grids for table in [self._position_table(h, w)] * t]
        lengths = [h * w for t, h, w in grids for _ in range(t)]
        bounds = [0]
        for length in lengths:
            bounds.append(bounds[-1] + length)
        bounds += bounds[-1:] * (max_num_seqs - len(lengths))
        pos, cos, sin = (parts[0] if len(parts) == 1 else torch.cat(parts) for parts in zip(*tables, strict=True))
        # One allocation for the integer buffers: pinned memory is dear to ask for.
        integers = self._int32([*bounds, *lengths, *[0] * (max_num_seqs - len(lengths)), sum(lengths)])
        return {
            "pos_embeds": pos,
            "rotary_pos_emb_cos": cos,
            "rotary_pos_emb_sin": sin,
            "cu_seqlens": integers[: max_num_seqs + 1],
            "max_seqlen": _scalar(max_seqlen),
            "sequence_lengths": integers[max_num_seqs + 1 : -1],
            "num_patches": integers[-1:],
        }

    def _int32(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, pin_memory=self.device.type == "cuda")

    def _position_table(self, h: int, w: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(position embeddings [h*w, hidden], cos, sin [h*w, head_dim / 2]) of a temporal patch, in merge-block order.

        Kept for the most recently used shapes, up to a bound on the rows of all tables.
        """
        table = self._positions.pop((h, w), None)
        if table is None:
            table = self._compute_positions(h, w)
            kept = sum(kh * kw for kh, kw in self._positions)
            while self._positions and kept + h * w > _POSITION_CACHE_ROWS:
                (kh, kw), _ = self._positions.popitem(last=False)
                kept -= kh * kw
        self._positions[h, w] = table
        return table

    def _compute_positions(self, h: int, w: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        config, device = self.config, self.device
        side = math.isqrt(config.num_position_embeddings)
        y = torch.arange(h, device=device)[:, None].expand(h, w)
        x = torch.arange(w, device=device)[None, :].expand(h, w)
        y, x = (p.reshape(h // MERGE, MERGE, w // MERGE, MERGE).transpose(1, 2).reshape(-1) for p in (y, x))
        # Bilinear with align_corners over a side x side table, as `transformers.vision_utils` weighs it.
        taps = []
        for position, size in ((y, h), (x, w)):
            source = position.float() * (side - 1) / max(size - 1, 1)
            low = source.floor()
            weight = source - low
            low_index = low.long()
            taps.append(((low_index, 1 - weight), ((low_index + 1).clamp(max=side - 1), weight)))
        indices = torch.stack([iy * side + ix for iy, _ in taps[0] for ix, _ in taps[1]], dim=1)
        weights = torch.stack([wy * wx for _, wy in taps[0] for _, wx in taps[1]], dim=1)
        embeds = (self.pos_embed.weight[indices] * weights[:, :, None]).sum(1).to(self.dtype)

        quarter = torch.arange(0, config.head_dim // 2, 2, dtype=torch.float32)
        inv_freq = (1.0 / config.rope_theta ** (quarter / (config.head_dim // 2))).to(device)
        angles = torch.cat((y[:, None] * inv_freq, x[:, None] * inv_freq), dim=1)
        return embeds, angles.cos(), angles.sin()


@functools.lru_cache(maxsize=1024)
def _scalar(value: int) -> torch.Tensor:
    """int32 [] on the host; shared, so not to be written to."""
    return torch.tensor(value, dtype=torch.int32)
