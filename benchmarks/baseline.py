"""What a user would write first: one Ray Serve deployment around `transformers`' own model and processors.

`serve run` builds it as `benchmarks.baseline:build` with `args: {model: FOLDER, device: cuda or cpu}`.
`POST /v1/encode` takes one photo, clip or animation as the body and answers with safetensors: `0.embeddings`
[tokens, width], `0.grid_thw` [3], and for a video `0.timestamps` [t], as the service does. `GET /health` answers once
the model is there.
"""

import contextlib
import io
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageSequence
from ray import serve
from safetensors.torch import save
from starlette.requests import Request
from starlette.responses import Response

MAX_BATCH_SIZE = 16
WAIT_S = 0.01


def _is_video(body: bytes) -> bool:
    return body[4:8] == b"ftyp" or body[:4] == b"\x1aE\xdf\xa3" or (body[:4] == b"RIFF" and body[12:16] == b"VP8X")


def _frames(body: bytes, fps: float = 2.0) -> tuple[np.ndarray, list[float]]:
    """RGB frames [n, H, W, 3] at `fps`, and their seconds."""
    if body[:4] == b"RIFF":
        image = Image.open(io.BytesIO(body))
        frames = [np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(image)]
        rate = fps
    else:
        import av

        with av.open(io.BytesIO(body), "r") as container:
            rate = float(container.streams.video[0].average_rate or 24)
            frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    count = min(max(int(len(frames) / rate * fps), 4), len(frames))
    chosen = np.linspace(0, len(frames) - 1, count).round().astype(int)
    return np.stack([frames[i] for i in chosen]), [i / rate for i in chosen]


class BaselineReplica:
    def __init__(self, model: str, device: str) -> None:
        # The processors need torchvision, which `make test` puts where only this finds it.
        with contextlib.suppress(ImportError):
            import tests.conftest  # noqa: F401
        from transformers import AutoImageProcessor, AutoVideoProcessor, Qwen3VLForConditionalGeneration

        self._device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
        dtype = torch.bfloat16 if self._device.type == "cuda" else torch.float32
        whole = Qwen3VLForConditionalGeneration.from_pretrained(model, dtype=dtype, attn_implementation="sdpa")
        self._tower = whole.model.visual.eval().to(self._device)
        self._image_processor = AutoImageProcessor.from_pretrained(model)
        self._video_processor = AutoVideoProcessor.from_pretrained(model)

    @serve.batch(max_batch_size=MAX_BATCH_SIZE, batch_wait_timeout_s=WAIT_S)
    async def encode(self, bodies: list[bytes]) -> list[bytes]:
        return self._encode(bodies)

    @torch.inference_mode()
    def _encode(self, bodies: list[bytes]) -> list[bytes]:
        answers: list[bytes] = [b""] * len(bodies)
        images = [i for i, body in enumerate(bodies) if not _is_video(body)]
        if images:
            pictures = [Image.open(io.BytesIO(bodies[i])).convert("RGB") for i in images]
            inputs = self._image_processor(images=pictures, return_tensors="pt")
            for i, tensors in zip(images, self._run(inputs["pixel_values"], inputs["image_grid_thw"]), strict=True):
                answers[i] = save(tensors)
        for i in (i for i in range(len(bodies)) if i not in images):
            frames, seconds = _frames(bodies[i])
            inputs = self._video_processor(videos=[frames], do_sample_frames=False, return_tensors="pt")
            (tensors,) = self._run(inputs["pixel_values_videos"], inputs["video_grid_thw"])
            pairs = [*seconds, *seconds[-1:]] if len(seconds) % 2 else seconds
            tensors["0.timestamps"] = torch.tensor(pairs, dtype=torch.float32).view(-1, 2).mean(1)
            answers[i] = save(tensors)
        return answers

    def _run(self, pixels: torch.Tensor, grids: torch.Tensor) -> list[dict[str, torch.Tensor]]:
        output = self._tower(pixels.to(self._device, self._tower.dtype), grid_thw=grids.to(self._device))
        rows = torch.cat([output.pooler_output, *output.deepstack_features], 1).cpu()
        parts = rows.split((grids.prod(1) // 4).tolist())
        return [
            {"0.embeddings": part.contiguous(), "0.grid_thw": grid} for part, grid in zip(parts, grids, strict=True)
        ]

    async def __call__(self, request: Request) -> Response:
        if request.url.path == "/health":
            return Response(status_code=200)
        return Response(await self.encode(await request.body()), media_type="application/vnd.safetensors")


def build(args: dict[str, Any]) -> serve.Application:
    """args: model (a folder) and device."""
    options = {"num_cpus": 1, "num_gpus": 1 if args["device"] == "cuda" else 0}
    deployment = serve.deployment(name="Baseline", max_ongoing_requests=256, ray_actor_options=options)
    return deployment(BaselineReplica).bind(args["model"], args["device"])
