"""Clients that mean harm, against a stack of real processes: it goes on answering, and tells no secret."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil
import pytest

from quire.client import AsyncClient, Unauthenticated
from quire.services.local.redis_process import RedisProcess
from quire.services.local.stack import RunningStack
from quire.services.router.tenants.api_keys import Tenant
from tests.testing.api_keys import write_keys
from tests.testing.processes import QUIRE
from tests.testing.stacks import connect, make_prompt

NUM_IDLE = 1000
WAIT_SECONDS = 30.0
START_SECONDS = 120.0
OPTIONS = ("port=0", "http-port=0", "dtype=float32", "num-blocks=256", "log-level=debug")


async def test_a_thousand_idle_connections_keep_no_client_away(stack: RunningStack) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert hard >= NUM_IDLE + 500, "the system permits too few open files for this test"
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        async with AsyncExitStack() as idle:
            for where in (stack.address, stack.ready["decode-0"].address):
                host, port = where.split(":")
                for _ in range(NUM_IDLE // 2):
                    _, writer = await asyncio.open_connection(host, int(port))
                    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
                    idle.callback(writer.close)
            async with connect(stack) as (client, _):
                answer = await client.generate(make_prompt(40), max_tokens=4, ignore_eos=True, timeout=60)
                assert len(answer.token_ids) == 4
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_hundred_calls_without_a_request_keep_no_client_away(stack: RunningStack) -> None:
    async with connect(stack) as (client, _), AsyncExitStack() as open_calls:
        channel = await open_calls.enter_async_context(grpc.aio.insecure_channel(stack.address))
        for _ in range(100):
            call = channel.stream_stream("/quire.v1.GenerationService/GenerateStream", None, None)(None)
            open_calls.callback(call.cancel)
        answer = await client.generate(make_prompt(40), max_tokens=4, ignore_eos=True, timeout=60)
        assert len(answer.token_ids) == 4


@dataclass(frozen=True)
class Serving:
    """The command `quire serve`, and what it must never tell."""

    address: str
    http_port: int
    key: str
    secrets: dict[str, str]
    log: Path
    index: RedisProcess
    process: subprocess.Popen[bytes]

    async def logged(self, pattern: str) -> str:
        """Return the log once it holds a match."""
        async with asyncio.timeout(WAIT_SECONDS):
            while not re.search(pattern, text := self.log.read_text(errors="replace")):
                await asyncio.sleep(0.02)
        return text


@pytest.fixture
def serving(tiny_model: Callable[[str], Path], tmp_path: Path) -> Iterator[Serving]:
    """Run the command at the debug level, with all secrets that there are."""
    (file, [key]), log = write_keys(tmp_path, Tenant("acme")), tmp_path / "log"
    with RedisProcess() as index, log.open("wb") as output:
        password = index.url.split(":")[2].partition("@")[0]
        secrets = {"key": key, "cluster secret": "a-secret-of-the-cluster", "password": password}
        options = [f"--{option}" for option in OPTIONS]
        process = subprocess.Popen(
            [*QUIRE, "serve", str(tiny_model("llama")), *options, "--api-keys", str(file)],
            env={
                **os.environ,
                "QUIRE_REDIS_URL": index.url,
                "QUIRE_CLUSTER_SECRET": secrets["cluster secret"],
                "COLUMNS": "200",
            },
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            address, http_port = _wait_for_banner(process, log)
            yield Serving(address, http_port, key, secrets, log, index, process)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(WAIT_SECONDS)


def _wait_for_banner(process: subprocess.Popen[bytes], log: Path) -> tuple[str, int]:
    banner = re.compile(r"serves \S+ at (\S+:\d+).*?http://\S+:(\d+)/v1", re.DOTALL)
    for _ in range(int(START_SECONDS / 0.05)):
        if found := banner.search(log.read_text(errors="replace")):
            return found[1], int(found[2])
        assert process.poll() is None, log.read_text(errors="replace")
        time.sleep(0.05)
    raise AssertionError(log.read_text(errors="replace"))


async def test_no_log_contains_a_secret(serving: Serving) -> None:
    wrong = serving.key[:-1] + ("A" if serving.key[-1] != "A" else "B")
    async with (
        AsyncClient(serving.address, api_key=serving.key) as client,
        AsyncClient(serving.address, api_key=wrong) as stranger,
        AsyncClient(serving.address) as keyless,
    ):
        await client.generate(list(range(2, 80)), max_tokens=4, request_id="asked-well", cache_salt="a-salt")
        for unknown in (stranger, keyless):
            with pytest.raises(Unauthenticated):
                await unknown.generate([2, 3])
        strange = f"{serving.key}\x01"
        for key, name in ((serving.key, "asked-over-http"), (strange, "x"), (wrong, "a\tb=1")):
            assert serving.key not in await _asked_over_http(serving.http_port, key, name)
        # An index that is gone makes every process complain of it by name.
        serving.index.stop()
        await serving.logged("index_unreachable")
        await client.generate(list(range(2, 80)), max_tokens=4, request_id="asked-again")
    log = await serving.logged("event=request_finished request_id=asked-again tenant=acme")
    assert "level=debug" in log
    assert "request_id=asked-over-http tenant=acme outcome=OK" in log
    assert "event=http_malformed" in log
    # After the banner nothing is written but by the one way of writing lines.
    _, _, events = log.partition("requests up to ")
    assert [line for line in events.splitlines()[1:] if not line.startswith("time=")] == []
    assert "event=index_unreachable" in log
    for name, secret in {**serving.secrets, "wrong key": wrong}.items():
        assert secret not in log, f"the log tells the {name}"
    for each in _processes(serving.process.pid):
        for name, secret in serving.secrets.items():
            assert secret not in each, f"a process list tells the {name}"


async def _asked_over_http(port: int, key: str, request_id: str) -> str:
    """Ask by hand, and return all that comes."""
    body = b'{"prompt": [2, 3], "max_tokens": 2}'
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
        f"Authorization: Bearer {key}\r\nX-Request-Id: {request_id}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + body)
    async with asyncio.timeout(WAIT_SECONDS):
        answer = await reader.read()
    writer.close()
    return answer.decode()


def _processes(parent: int) -> list[str]:
    """Return the command lines of a process and all that it began."""
    root = psutil.Process(parent)
    return [" ".join(process.cmdline()) for process in (root, *root.children(recursive=True))]


def test_settings_do_not_print_secrets() -> None:
    from quire.services.local.config import LocalStackConfig
    from quire.services.router.config import RouterConfig
    from quire.services.worker.config import WorkerConfig

    url = "redis://user:hidden-word@host"
    configs = (
        RouterConfig(cluster_secret=b"hidden-word", redis_url=url),
        WorkerConfig(role="decode", cluster_secret=b"hidden-word", redis_url=url),
        LocalStackConfig(redis_url=url),
    )
    for config in configs:
        assert "hidden-word" not in repr(config)
