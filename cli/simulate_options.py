"""The options of ``quire simulate``, and the objects that they describe."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quire.cli.failure import writable
from quire.routing.placement import PolicyConfig
from quire.routing.policy import Policy
from quire.routing.pulls import Pulls
from quire.services.router.config import RouterConfig
from quire.simulator.workload import MOONCAKE_RATE, Workload, make_requests

SYNTHETIC_REQUESTS = 2000
"""Default number of requests without a trace."""

if TYPE_CHECKING:
    from quire.simulator.cluster import ClusterConfig
    from quire.simulator.figures import Slo
    from quire.simulator.trace import TraceRequest

CALIBRATION, REQUESTS, CLUSTER, OBJECTIVE = "Calibration", "Requests", "Cluster", "Objective"


def _option(flag: str, help: str, panel: str, **more: Any) -> Any:
    return typer.Option(flag, help=help, rich_help_panel=panel, **more)


@dataclass(frozen=True)
class CalibrationOptions:
    """Options of the calibration, which has the costs of all work."""

    calibration: Annotated[
        Path | None,
        _option("--calibration", "File of measured costs; by default the demo model's.", CALIBRATION),
    ] = None
    calibrate: Annotated[
        str | None,
        _option("--calibrate", "Measure the idle cluster there first.", CALIBRATION, metavar="ADDRESS"),
    ] = None
    save_calibration: Annotated[
        Path | None,
        _option("--save-calibration", "Write the calibration to this file.", CALIBRATION, callback=writable),
    ] = None
    num_blocks: Annotated[
        int, _option("--num-blocks", "Blocks of a worker; for --calibrate.", CALIBRATION, min=1)
    ] = 8192
    max_num_seqs: Annotated[
        int, _option("--max-num-seqs", "Most sequences in a step; for --calibrate.", CALIBRATION, min=1)
    ] = 64


@dataclass(frozen=True)
class RequestOptions:
    """Options of the requests to replay."""

    trace: Annotated[
        Path | None,
        _option(
            "--trace",
            "Replay this file, in the format of Mooncake's traces.",
            REQUESTS,
            exists=True,
            dir_okay=False,
        ),
    ] = None
    trace_block: Annotated[
        int, _option("--trace-block", "Tokens of one hash id in the trace.", REQUESTS, min=1)
    ] = 512
    workload: Annotated[
        Workload, _option("--workload", "Without a trace: shape of synthetic requests.", REQUESTS)
    ] = Workload.MOONCAKE
    num_requests: Annotated[
        int | None,
        _option("--num-requests", "How many; by default all of a trace, or 2000.", REQUESTS, min=1),
    ] = None
    rate: Annotated[float, _option("--rate", "Requests a second.", REQUESTS, min=0.001, max=1e6)] = round(
        MOONCAKE_RATE, 2
    )
    speedup: Annotated[
        float, _option("--speedup", "Replay a trace this many times as fast.", REQUESTS, min=0.001, max=1e6)
    ] = 1.0
    input_len: Annotated[int, _option("--input-len", "Tokens of a prompt or turn.", REQUESTS, min=1)] = 1024
    shared_len: Annotated[int, _option("--shared-len", "Tokens of a shared prefix.", REQUESTS, min=0)] = 768
    output_len: Annotated[int, _option("--output-len", "Tokens of an answer.", REQUESTS, min=1)] = 64
    save_trace: Annotated[
        Path | None, _option("--save-trace", "Write the requests to this file.", REQUESTS)
    ] = None
    seed: Annotated[int, _option("--seed", "Same seed, same requests and choices.", REQUESTS)] = 0

    def requests(self) -> list[TraceRequest]:
        """Return the requests, read or made, and write them to a file if the options say so.

        Raises:
            TraceError: the trace is malformed.
            OSError: a file cannot be read or written.
        """
        from quire.simulator.trace import read_trace, scaled, write_trace

        if self.trace is not None:
            requests = scaled(read_trace(self.trace, self.trace_block)[: self.num_requests], self.speedup)
        else:
            requests = self._made()
        if self.save_trace is not None:
            write_trace(self.save_trace, requests)
        return requests

    def _made(self) -> list[TraceRequest]:
        return make_requests(
            self.workload,
            self.num_requests or SYNTHETIC_REQUESTS,
            self.rate,
            self.seed,
            input_tokens=self.input_len,
            shared_tokens=min(self.shared_len, self.input_len),
            output_tokens=self.output_len,
            block_tokens=self.trace_block,
        )


@dataclass(frozen=True)
class ClusterOptions:
    """Options of the simulated cluster."""

    num_prefill: Annotated[int, _option("--prefill", "Prefill workers, without --find.", CLUSTER, min=0)] = 2
    num_decode: Annotated[int, _option("--decode", "Decode workers, without --find.", CLUSTER, min=1)] = 2
    is_one_machine: Annotated[
        bool,
        _option("--one-machine", "All workers share the processors that were calibrated.", CLUSTER),
    ] = False
    policies: Annotated[
        list[Policy] | None,
        _option("--policy", "Policy; may be repeated to compare. By default all.", CLUSTER),
    ] = None
    pulls: Annotated[Pulls, _option("--pulls", "When blocks are copied.", CLUSTER)] = PolicyConfig.pulls
    local_prefill_tokens: Annotated[
        int, _option("--local-prefill-tokens", "As the router's option.", CLUSTER, min=0)
    ] = PolicyConfig.local_prefill_tokens
    max_requests: Annotated[
        int, _option("--max-requests", "Most requests at a time; more are refused.", CLUSTER, min=1)
    ] = RouterConfig.max_requests

    def configs(self, seed: int) -> dict[str, ClusterConfig]:
        """Return the configuration of a cluster for each policy."""
        from quire.simulator.cluster import ClusterConfig

        return {
            policy.value: ClusterConfig(
                num_prefill=self.num_prefill,
                num_decode=self.num_decode,
                placing=PolicyConfig(
                    policy=policy,
                    pulls=self.pulls,
                    local_prefill_tokens=self.local_prefill_tokens,
                ),
                max_requests=self.max_requests,
                is_one_machine=self.is_one_machine,
                seed=seed,
            )
            for policy in self.policies or Policy
        }


@dataclass(frozen=True)
class ObjectiveOptions:
    """Options of the objective that requests must meet."""

    find: Annotated[
        bool, _option("--find", "Search for the smallest cluster that meets the objective.", OBJECTIVE)
    ] = False
    ttft: Annotated[float, _option("--ttft", "Longest time to the first token, in s.", OBJECTIVE)] = 2.0
    tpot: Annotated[float, _option("--tpot", "Longest mean time of a token, in s.", OBJECTIVE)] = 0.1
    share: Annotated[
        float, _option("--share", "Share of the requests that must be within both.", OBJECTIVE, min=0, max=1)
    ] = 0.9
    max_workers: Annotated[int, _option("--max-workers", "Most workers to try.", OBJECTIVE, min=1)] = 64

    def slo(self) -> Slo:
        """Return the objective."""
        from quire.simulator.figures import Slo

        return Slo(self.ttft, self.tpot, self.share)
