"""Response formats, one module each, by the name that `format=` takes."""

from app.formats import json, safetensors
from app.formats.types import Render

FORMATS: dict[str, Render] = {"safetensors": safetensors.render, "json": json.render}
# These make the whole body at once, which is no work for an event loop; the others only describe it.
SLOW = frozenset({"json"})
