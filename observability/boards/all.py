"""The dashboards in the order in which one asks: are users served well, and if not, where is the time?"""

from __future__ import annotations

from collections.abc import Sequence

from quire.observability.boards.decode import decode_board
from quire.observability.boards.prefill import prefill_board
from quire.observability.boards.router import router_board
from quire.observability.boards.slo import slo_board
from quire.observability.boards.transfer import transfer_board
from quire.observability.boards.ttft import ttft_board
from quire.observability.dashboard import Board

BOARDS: Sequence[Board] = (
    slo_board(),
    ttft_board(),
    prefill_board(),
    decode_board(),
    transfer_board(),
    router_board(),
)
