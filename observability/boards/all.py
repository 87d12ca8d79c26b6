"""All dashboards, in the order of an analysis: first the service that users get, then where the time goes."""

from __future__ import annotations

from collections.abc import Sequence

from grafana_foundation_sdk.models.dashboard import Dashboard

from quire.observability.boards.decode import decode_board
from quire.observability.boards.prefill import prefill_board
from quire.observability.boards.router import router_board
from quire.observability.boards.slo import slo_board
from quire.observability.boards.transfer import transfer_board
from quire.observability.boards.ttft import ttft_board

BOARDS: Sequence[Dashboard] = (
    slo_board(),
    ttft_board(),
    prefill_board(),
    decode_board(),
    transfer_board(),
    router_board(),
)
