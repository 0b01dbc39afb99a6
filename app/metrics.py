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
BYTES_IN = Metric(
    "foveal_bytes_in",
    "counter",
    (),
    "bytes of request bodies, and of media in handle calls, received; fetched URLs do not count",
)
BYTES_OUT = Metric(
    "foveal_bytes_out",
    "counter",
    (),
    "bytes of response bodies, and of embeddings in handle calls, sent, on all routes",
)
ERRORS = Metric(
    "foveal_errors",
    "counter",
    ("code",),
    "requests answered with an error, by its code (errors.md); broken_response: one that failed while it was sent",
)
CANCELLED = Metric(
    "foveal_requests_cancelled", "counter", (), "requests whose client left before the response was sent"
)
ITEMS_IN_FLIGHT = Metric(
    "foveal_items_in_flight", "gauge", (), "items that are received or worked on, under limits.max_items_in_flight"
)
BYTES_IN_FLIGHT = Metric(
    "foveal_bytes_in_flight", "gauge", (), "bytes of the request bodies held, under limits.max_bytes_in_flight"
)
STORE_SECONDS = Metric(
    "foveal_store_seconds", "histogram", (), "an item delivered to the store: until its file is in place", BUCKETS_S
)
STORE_ITEMS = Metric(
    "foveal_store_items",
    "counter",
    ("result",),
    "items of `deliver=store`: hit: was there; new: was encoded and written; refused: had no room",
)
STORE_EVICTIONS = Metric("foveal_store_evictions", "counter", (), "files removed from the store to make room")
STORE_BYTES = Metric(
    "foveal_store_bytes", "gauge", (), "bytes in the store, as this replica last knew; all replicas share it"
)

STAGE_SECONDS = {
    "fetch": FETCH_SECONDS,
    "decode": DECODE_SECONDS,
    "store": STORE_SECONDS,
    "format": FORMAT_SECONDS,
    "total": TOTAL_SECONDS,
}

METRICS = (
    *REPLICA_METRICS,
    *STAGE_SECONDS.values(),
    STORE_ITEMS,
    STORE_EVICTIONS,
    STORE_BYTES,
    BYTES_IN,
    BYTES_OUT,
    ITEMS_IN_FLIGHT,
    BYTES_IN_FLIGHT,
    ERRORS,
    CANCELLED,
)
