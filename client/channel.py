"""The options of a client's gRPC channel: message limits, keepalive, retries."""

from __future__ import annotations

import json
from collections.abc import Sequence

from quire.protos import inference_pb2 as pb

MAX_MESSAGE_BYTES = 16 << 20

_SERVICE = pb.DESCRIPTOR.services_by_name["GenerationService"]
# In grpcio, a blocking stream with a retry policy outlives its deadline if its only server dies before the
# first message. So gRPC retries only calls with a single response; ``Attempts`` retries streams.
_SERVICE_CONFIG = {
    "methodConfig": [
        {
            "name": [
                {"service": _SERVICE.full_name, "method": method.name}
                for method in _SERVICE.methods
                if not method.server_streaming
            ],
            "retryPolicy": {
                "maxAttempts": 4,
                "initialBackoff": "0.1s",
                "maxBackoff": "2s",
                "backoffMultiplier": 3,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ],
    # A failing router must not get four times the load, so retries stop once half of these tokens are used
    # up.
    "retryThrottling": {"maxTokens": 10, "tokenRatio": 0.1},
}


def several_options(address: str | Sequence[str]) -> list[tuple[str, int]]:
    """Return the further options of channels of a client with several routers: a call that fails is not tried
    again on the same channel, but on another router.
    """
    return [] if isinstance(address, str) or len(address) == 1 else [("grpc.enable_retries", 0)]


def channel_options() -> list[tuple[str, int | str]]:
    """Return the options of a channel to a router."""
    return [
        # gRPC would use the proxy that the environment names, even for the loopback.
        ("grpc.enable_http_proxy", 0),
        # A long prompt of token ids exceeds the default limit of 4 MiB.
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        # With these pings a vanished machine is noticed after 30 s; TCP gives up only after 15 min.
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        # gRPC also pings to measure bandwidth. This limit, a minute by default, holds while such a ping is
        # out.
        ("grpc.http2.ping_timeout_ms", 10_000),
        # By default gRPC stops after two pings while no data flows, as happens during a long prefill.
        ("grpc.http2.max_pings_without_data", 0),
        # The default back-off grows to two minutes, and a restarted router would be unreachable for that
        # long. It must be shorter than the pauses in which a call tries several routers again, together.
        ("grpc.max_reconnect_backoff_ms", 1_000),
        ("grpc.service_config", json.dumps(_SERVICE_CONFIG)),
    ]
