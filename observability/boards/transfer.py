"""The board of block transfers."""

from __future__ import annotations

from collections.abc import Sequence

from grafana_foundation_sdk.models.dashboard import Dashboard

from quire.observability.dashboard import build_board
from quire.observability.panels import Panel, Target, chart, latency, line
from quire.observability.promql import quotient, rate, total

SIZE, SAVED = "quire_kv_transfer_bytes_total", "quire_kv_transfer_saved_bytes_total"
PUSH, WAIT = "quire_kv_push_seconds", "quire_kv_credit_wait_seconds"
FAILURES = "quire_kv_transfer_failures_total"
SENT = rate(SIZE, 'direction="sent"')


def transfer_board() -> Dashboard:
    """Return the board of block transfers."""
    return build_board(
        uid="quire-transfer",
        title="quire / KV transfer",
        description="Blocks from prefill to decode workers, blocks from peer to peer, and what went wrong.",
        rows={
            "Push": _push_panels(),
            "Pull": _pull_panels(),
            "What must be zero": _fault_panels(),
        },
    )


def _push_panels() -> Sequence[Panel]:
    """Return the panels of blocks that prefill workers send to decode workers."""
    return [
        line(
            "Bytes",
            "KV bytes sent and received. On one host the receiver copies them out of the sender's"
            " memory (shared); otherwise they are sent in messages.",
            rate(SIZE, 'direction=~"received|sent"', "direction, transport"),
            "{{direction}} {{transport}}",
            "Bps",
        ),
        chart(
            "Saved",
            "Bytes that were not sent because the receiver had them / these and the sent bytes.",
            [Target(quotient(rate(SAVED), f"({rate(SAVED)} + {SENT})"), "saved")],
            "percentunit",
        ),
        line(
            "Bytes in a second of push",
            "Bytes sent / seconds of pushes without their waits for credit. Pushes overlap with the"
            " computation, so this is not the limit of the network.",
            quotient(SENT, f"({rate(PUSH + '_sum')} - {rate(WAIT + '_sum')})"),
            "",
            "Bps",
        ),
        latency("Push", PUSH, "From open to the receiver's acknowledgement, computation included."),
        latency("Wait for credit", WAIT, "Part of a push in which the receiver had no room."),
        line(
            "Failures by reason",
            "Pushes that ended without a commit, by the receiver's reason.",
            rate(FAILURES, 'kind="push"', "reason"),
            "{{reason}}",
            "ops",
        ),
    ]


def _pull_panels() -> Sequence[Panel]:
    """Return the panels of blocks that workers copy from their peers."""
    return [
        line(
            "Bytes of pulls",
            "KV bytes lent to peers and pulled from them.",
            rate(SIZE, 'direction=~"pulled|lent"', "direction, transport"),
            "{{direction}} {{transport}}",
            "Bps",
        ),
        latency("Pull", "quire_kv_pull_seconds", "From pin to release."),
        chart(
            "Pulls that fell short",
            "By reason; the rest of the prompt was computed.",
            [Target(rate(FAILURES, 'kind="pull"', "reason"), "{{reason}}")],
            "ops",
        ),
        line(
            "Leases",
            "Leases on a worker's blocks.",
            total("quire_kv_leases", by="instance"),
            "{{instance}}",
        ),
        line(
            "Leases expired",
            "Leases that ended without a release, because the puller was lost.",
            rate("quire_kv_leases_expired_total", by="instance"),
            "{{instance}}",
            "ops",
        ),
        line(
            "Pulls asked for",
            "Pulls that the router requested, by their result.",
            rate("quire_kv_pull_requests_total", by="result"),
            "{{result}}",
            "ops",
        ),
    ]


def _fault_panels() -> Sequence[Panel]:
    """Return the panels of damaged blocks, lost attempts and old pins."""
    return [
        chart(
            "Digest failures",
            "Blocks whose bytes changed on the way. Each was refused and sent or computed"
            " again. Any such block means faulty memory or a faulty network.",
            [Target(rate(FAILURES, 'reason="digest_mismatch"', "kind"), "{{kind}}")],
            "ops",
        ),
        line(
            "Retries",
            "Attempts that failed on a worker, by the worker's role and the gRPC status.",
            rate("quire_retries_total", by="role, cause"),
            "{{role}}: {{cause}}",
            "ops",
        ),
        line(
            "Oldest pin",
            "Age of the oldest blocks that are held for another worker.",
            "max by (job) (quire_kv_oldest_pin_seconds)",
            "{{job}}",
            "s",
        ),
    ]
