"""What the ingress measures, and the table of all metrics of the service."""

from __future__ import annotations

from deployments.metrics import BUCKETS_S, REPLICA_METRICS, Metric

FETCH_SECONDS = Metric(
    "foveal_fetch_seconds", "histogram", (), "an item sent as a URL: until its bytes are here", BUCKETS_S
)
DECODE_SECONDS = Metric(
    "foveal_decode_seconds",
    "histogram",
    (),
    "an item: from its bytes to its resized frames, the wait for a decoder included",
    BUCKETS_S,
)
FORMAT_SECONDS = Metric("foveal_format_seconds", "histogram", (), "an answered request: making the response", BUCKETS_S)
TOTAL_SECONDS = Metric(
    "foveal_total_seconds", "histogram", (), "an answered request: from its headers to its response's", BUCKETS_S
)
BYTES_IN = Metric("foveal_bytes_in", "counter", (), "bytes of request bodies received; fetched URLs do not count")
BYTES_OUT = Metric("foveal_bytes_out", "counter", (), "bytes of response bodies sent, on all routes")
ERRORS = Metric(
    "foveal_errors",
    "counter",
    ("code",),
    "requests answered with an error, by its code (errors.md); broken_response: one that failed while it was sent",
)
CANCELLED = Metric(
    "foveal_requests_cancelled", "counter", (), "requests whose client left before the response was sent"
)

STAGE_SECONDS = {"fetch": FETCH_SECONDS, "decode": DECODE_SECONDS, "format": FORMAT_SECONDS, "total": TOTAL_SECONDS}

METRICS = (*REPLICA_METRICS, *STAGE_SECONDS.values(), BYTES_IN, BYTES_OUT, ERRORS, CANCELLED)
