"""Makes torchvision, which the reference processors need and the service does not, importable by tests alone; takes
the clock out of property tests."""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from pathlib import Path

import torch
from hypothesis import HealthCheck, settings

# A loaded machine is no reason for a property to fail.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

# `make test` puts torchvision beside the environment, so that processes which tests start run without it.
_REFERENCE = Path(sysconfig.get_path("purelib")).parents[2] / "reference"
if _REFERENCE.is_dir():
    sys.path.append(str(_REFERENCE))

_LIBRARIES: list[torch.library.Library] = []


def _register_torchvision_operators() -> None:
    """Lets torchvision import beside a torch build that its compiled operators do not fit; tests call none of them."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return
    try:
        torch.ops.load_library(next(Path(spec.origin).parent.glob("_C*.so")))
    except (OSError, StopIteration):
        library = torch.library.Library("torchvision", "DEF")
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _LIBRARIES.append(library)


_register_torchvision_operators()
