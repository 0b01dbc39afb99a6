"""Every error that a client can see, as one class and one table of stable codes.

bytes -> media/  -> MediaError (400, 413, 415, 422, 502) ─┐
options -> schemas.py -> 422 ─────────────────────────────┤
handle -> replica -> 429/503 (full), 504 (deadline) ──────┼─> FovealError -> ingress -> {"error": {...}}
anything unforeseen -> 500 `internal`, logged, no detail ─┘
"""

from __future__ import annotations

from typing import Any

CODES: dict[str, tuple[int, str]] = {
    "empty_body": (400, "the request carries no bytes"),
    "malformed_request": (400, "the JSON or multipart body cannot be parsed"),
    "undecodable_media": (400, "the bytes are damaged or cut short"),
    "unauthorized": (401, "auth.api_keys_file is set, and the request has none of its keys"),
    "not_found": (404, "no such route"),
    "method_not_allowed": (405, "the route exists, the method does not"),
    "upload_timeout": (408, "no byte of an unfinished body came for limits.upload_idle_s"),
    "body_too_large": (413, "more bytes than limits.max_body_bytes"),
    "too_many_pixels": (413, "a picture over limits.max_pixels"),
    "too_many_frames": (413, "more sampled frames than limits.max_frames"),
    "too_long": (413, "a video over limits.max_seconds"),
    "too_many_tokens": (413, "an item over limits.max_tokens"),
    "too_many_items": (413, "more items than limits.max_items"),
    "decode_timeout": (413, "decoding took longer than limits.decode_timeout_s"),
    "unsupported_media": (415, "not an image or video that the service reads"),
    "invalid_option": (422, "an option is unknown or its value is not allowed"),
    "modality_mismatch": (422, "`modality` says one thing, the bytes another"),
    "aspect_ratio": (422, "the longer side is over 200 times the shorter"),
    "fetch_forbidden": (422, "fetching that URL is off or not allowed"),
    "fetch_failed": (502, "the URL could not be fetched"),
    "overloaded": (503, "queues are full; retry after the time in Retry-After"),
    "unavailable": (503, "no healthy replica; retry after the time in Retry-After"),
    "deadline": (504, "limits.deadline_s, or Serve's request_timeout_s, passed"),
    "internal": (500, "a fault of the service"),
}


class FovealError(Exception):
    """An error for the client.

    Args:
        code: a key of `CODES`; gives the HTTP status.
        message: one sentence that names the trouble.
        param: the field, option or part concerned, such as `"file[1]"`.
        retry_after_s: seconds for the Retry-After header.
    """

    def __init__(self, code: str, message: str, param: str | None = None, retry_after_s: int | None = None) -> None:
        super().__init__(code, message, param, retry_after_s)
        self.code, self.message, self.param, self.retry_after_s = code, message, param, retry_after_s

    @property
    def status(self) -> int:
        return CODES[self.code][0]

    @property
    def type(self) -> str:
        return "server_error" if self.status >= 500 else "invalid_request_error"

    def with_param(self, param: str) -> FovealError:
        """The same error, naming the part it came from unless it already names one."""
        return FovealError(self.code, self.message, self.param or param, self.retry_after_s)

    def envelope(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "code": self.code, "param": self.param}}
