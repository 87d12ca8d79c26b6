"""How a client's channel behaves: message limits, keepalive, retries."""

from __future__ import annotations

import json

MAX_MESSAGE_BYTES = 16 << 20

# gRPC retries only while nothing of the answer has arrived, so no token is ever drawn twice into one stream.
_SERVICE_CONFIG = {
    "methodConfig": [
        {
            "name": [{"service": "quire.v1.GenerationService"}],
            "retryPolicy": {
                "maxAttempts": 4,
                "initialBackoff": "0.1s",
                "maxBackoff": "2s",
                "backoffMultiplier": 3,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ],
    # A router in trouble is not asked four times as often: with half the tokens gone nothing is retried.
    "retryThrottling": {"maxTokens": 10, "tokenRatio": 0.1},
}


def channel_options() -> list[tuple[str, int | str]]:
    """Return the options of a channel to a router."""
    return [
        # The default of 4 MiB refuses a long prompt of token ids.
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        # A router whose machine vanished is noticed after 30 s, not when TCP gives up after 15 min.
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        # Without this the core stops its pings after two when no data flows, as in a long prefill.
        ("grpc.http2.max_pings_without_data", 0),
        # The default back-off grows to two minutes: a restarted router would stay unreachable as long.
        ("grpc.max_reconnect_backoff_ms", 2_000),
        ("grpc.service_config", json.dumps(_SERVICE_CONFIG)),
    ]
