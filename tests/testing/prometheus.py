"""Runs a Prometheus on the loopback inside a context, and queries it over HTTP."""

from __future__ import annotations

import json
import math
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import SystemRandom
from typing import Any, NamedTuple
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

START_SECONDS = 20.0
STOP_SECONDS = 10.0
POLL_SECONDS = 0.05
HTTP_SECONDS = 30.0
FIRST_PORT, LAST_PORT = 10_000, 32_000
"""Range below the ports that Linux assigns dynamically, so that a port found free is not taken by chance."""
ALERTS = Path(__file__).parents[2] / "observability" / "alerts.yml"


class PrometheusNotStartedError(RuntimeError):
    """Prometheus ended, or did not answer in time; the message has the end of its log."""


class Series(NamedTuple):
    """The values of one label set over time; NaN where the expression gave NaN."""

    labels: Mapping[str, str]
    times: Sequence[float]
    values: Sequence[float]

    @property
    def has_nan(self) -> bool:
        """Whether any value is not a number."""
        return any(math.isnan(value) for value in self.values)


class PrometheusClient:
    """Queries a Prometheus at ``http://host:port``."""

    def __init__(self, url: str) -> None:
        self._url = url

    def query(self, expression: str) -> list[Series]:
        """Return the values now."""
        result = self._get("query", query=expression)["result"]
        return [_series(each["metric"], [each["value"]]) for each in result]

    def query_range(self, expression: str, start: float, end: float, step: float) -> list[Series]:
        """Return the values from ``start`` to ``end``, seconds since the epoch, every ``step`` seconds."""
        result = self._get("query_range", query=expression, start=start, end=end, step=step)["result"]
        return [_series(each["metric"], each["values"]) for each in result]

    def rules(self) -> list[dict[str, Any]]:
        """Return the state of every rule: its health, its last error, its alerts."""
        return [rule for group in self._get("rules")["groups"] for rule in group["rules"]]

    def is_ready(self) -> bool:
        """Return whether Prometheus answers."""
        try:
            with urlopen(f"{self._url}/-/ready", timeout=HTTP_SECONDS):
                return True
        except (URLError, OSError):
            return False

    def _get(self, path: str, **parameters: object) -> Any:
        with urlopen(f"{self._url}/api/v1/{path}?{urlencode(parameters)}", timeout=HTTP_SECONDS) as response:
            answer = json.load(response)
        return answer["data"]


def find_prometheus() -> str | None:
    """Return the path of the binary, or None if there is none on PATH."""
    return shutil.which("prometheus")


def free_ports(count: int) -> int:
    """Return the first of ``count`` consecutive loopback ports that are free now."""
    random = SystemRandom()
    while True:
        first = random.randrange(FIRST_PORT, LAST_PORT - count)
        if all(_is_free(first + index) for index in range(count)):
            return first


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


@contextmanager
def running_prometheus(
    binary: str, jobs: Mapping[str, Sequence[str]], scrape_seconds: float
) -> Iterator[PrometheusClient]:
    """Scrape ``host:port`` addresses by job, with our alert rules, until the context ends.

    Raises:
        PrometheusNotStartedError: it does not answer.
    """
    with tempfile.TemporaryDirectory(prefix="quire-prometheus-") as folder:
        config = Path(folder, "prometheus.json")  # JSON is YAML
        config.write_text(json.dumps(_config(jobs, scrape_seconds)), encoding="utf-8")
        port = free_ports(1)
        log = Path(folder, "log")
        with log.open("wb") as output:
            process = subprocess.Popen(
                [
                    binary,
                    f"--config.file={config}",
                    f"--storage.tsdb.path={folder}/data",
                    f"--web.listen-address=127.0.0.1:{port}",
                ],
                stdout=output,
                stderr=output,
            )
        try:
            client = PrometheusClient(f"http://127.0.0.1:{port}")
            _wait_until_ready(client, process, log)
            yield client
        finally:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _config(jobs: Mapping[str, Sequence[str]], scrape_seconds: float) -> dict[str, Any]:
    interval = f"{round(1000 * scrape_seconds)}ms"
    return {
        "global": {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": interval},
        "rule_files": [str(ALERTS)],
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": list(addresses)}]}
            for job, addresses in jobs.items()
        ],
    }


def _wait_until_ready(client: PrometheusClient, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not client.is_ready():
        if process.poll() is not None or time.monotonic() > deadline:
            raise PrometheusNotStartedError(f"prometheus did not start: {log.read_text('utf-8')[-2000:]}")
        time.sleep(POLL_SECONDS)


def _series(labels: Mapping[str, str], samples: Sequence[tuple[float, str]]) -> Series:
    return Series(labels, [at for at, _ in samples], [float(value) for _, value in samples])
