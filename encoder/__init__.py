"""The Qwen3-VL vision tower under CUDA graphs. Knows nothing of Ray, HTTP or settings files."""
