"""The board of block transfers."""

from __future__ import annotations

from quire.observability.boards.panels import latency, line
from quire.observability.dashboard import Board, Panel, Row, Target
from quire.observability.promql import quotient, rate, total


def transfer_board() -> Board:
    """Return the board of block transfers."""
    size, saved = "quire_kv_transfer_bytes_total", "quire_kv_transfer_saved_bytes_total"
    push, wait = "quire_kv_transfer_seconds", "quire_kv_credit_wait_seconds"
    sent = rate(size, 'direction="sent"')
    return Board(
        uid="quire-transfer",
        title="quire / KV transfer",
        description="Blocks from prefill to decode workers, blocks from peer to peer, and what went wrong.",
        rows=[
            Row(
                "Push",
                [
                    line(
                        "Bytes",
                        "KV bytes sent and received.",
                        rate(size, by="direction"),
                        "{{direction}}",
                        "Bps",
                    ),
                    Panel(
                        title="Saved",
                        description="Bytes not sent, since the receiver had them / those and the bytes sent.",
                        targets=[Target(quotient(rate(saved), f"({rate(saved)} + {sent})"), "saved")],
                        unit="percentunit",
                    ),
                    line(
                        "Bytes in a second of push",
                        "Bytes sent / seconds of pushes less their waits for credit: overlaps the"
                        " computation, so"
                        " it is no bound of the network.",
                        quotient(sent, f"({rate(push + '_sum')} - {rate(wait + '_sum')})"),
                        "",
                        "Bps",
                    ),
                    latency(
                        "Push", push, "From open to the receiver's acknowledgement, computation included."
                    ),
                    latency("Wait for credit", wait, "Part of a push in which the receiver had no room."),
                    line(
                        "Failures by reason",
                        "Pushes that ended without commit, as the receiver names it.",
                        rate("quire_kv_transfer_failures_total", by="reason"),
                        "{{reason}}",
                        "ops",
                    ),
                ],
            ),
            Row(
                "Pull",
                [
                    line(
                        "Bytes of pulls",
                        "KV bytes lent to peers and pulled from them.",
                        rate("quire_kv_pull_bytes_total", by="direction"),
                        "{{direction}}",
                        "Bps",
                    ),
                    latency("Pull", "quire_kv_pull_seconds", "From pin to release."),
                    Panel(
                        title="Pulls that fell short",
                        description="By reason; the rest of the prompt was computed.",
                        targets=[Target(rate("quire_kv_pull_failures_total", by="reason"), "{{reason}}")],
                        unit="ops",
                    ),
                    line(
                        "Leases",
                        "Leases on a worker's blocks.",
                        total("quire_kv_pull_leases", by="instance"),
                        "{{instance}}",
                    ),
                    line(
                        "Leases expired",
                        "Leases that nobody released: a borrower was lost.",
                        rate("quire_kv_pull_leases_expired_total", by="instance"),
                        "{{instance}}",
                        "ops",
                    ),
                    line(
                        "Pulls asked for",
                        "Pulls that the router asked for, by how they ended.",
                        rate("quire_kv_pull_requests_total", by="result"),
                        "{{result}}",
                        "ops",
                    ),
                ],
            ),
            Row(
                "What must be zero",
                [
                    Panel(
                        title="Digest failures",
                        description="Blocks whose bytes were not what was sent. Each was refused and sent"
                        " or computed"
                        " again; more than none means broken memory or network.",
                        targets=[
                            Target(
                                rate("quire_kv_transfer_failures_total", 'reason="digest_mismatch"'), "pushes"
                            ),
                            Target(rate("quire_kv_pull_failures_total", 'reason="digest_mismatch"'), "pulls"),
                        ],
                        unit="ops",
                    ),
                    line(
                        "Retries",
                        "Attempts lost on a worker, by its role and the status it failed with.",
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
                ],
            ),
        ],
    )
