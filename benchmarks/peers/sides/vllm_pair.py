"""A prefill and a decode server of vLLM, which hand over KV blocks by NIXL, and the proxy in front of them.

As in vLLM's example of disaggregated serving, the proxy first asks the prefill server for one token and for
the names of the blocks, and then sends the request to the decode server, which reads the blocks and answers.

    python -m quire.benchmarks.peers.sides.vllm_pair --port 8000 --cores 0,1 [options of vLLM's server]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

import psutil
from aiohttp import ClientSession, ClientTimeout, TCPConnector, web

NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
HAND_OVER = {"do_remote_decode": True, "do_remote_prefill": False}
START_SECONDS = 0.1
"""Time between two looks at whether a server has started."""


class _Server(NamedTuple):
    """A running server of vLLM, and the cores that it may use."""

    process: subprocess.Popen[bytes]
    port: int
    cores: Sequence[str]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def main() -> None:
    """Start both servers, each with half of the cores, and the proxy."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--cores", required=True, help="numbers of the cores, separated by commas")
    options, arguments = parser.parse_known_args()
    cores = options.cores.split(",")
    half = max(1, len(cores) // 2)
    ports = _free_ports(4)
    prefill = _start(arguments, ports[:2], cores[:half])
    decode = _start(arguments, ports[2:], cores[-half:])
    try:
        web.run_app(_proxy(prefill, decode), port=options.port)
    finally:
        prefill.process.terminate()
        decode.process.terminate()


def _start(arguments: Sequence[str], ports: Sequence[int], cores: Sequence[str]) -> _Server:
    """Start a server on the first port; it offers the keys of its blocks on the second."""
    variables = {
        "OMP_NUM_THREADS": str(len(cores)),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(cores),
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(ports[1]),
    }
    module = ["-P", "-m", "vllm.entrypoints.openai.api_server"]
    own = ["--host", "127.0.0.1", "--port", str(ports[0]), "--kv-transfer-config", json.dumps(NIXL)]
    command = [sys.executable, *module, *arguments, *own]
    return _Server(subprocess.Popen(command, env={**os.environ, **variables}), ports[0], cores)


def _bind(server: _Server) -> None:
    """Bind the threads of a server to its cores.

    vLLM's NIXL connector moves the thread that computes to the last core of the node, in both servers.
    """
    root = psutil.Process(server.process.pid)
    for process in (root, *root.children(recursive=True)):
        for thread in process.threads():
            os.sched_setaffinity(thread.id, map(int, server.cores))


def _proxy(prefill: _Server, decode: _Server) -> web.Application:
    session = web.AppKey("session", ClientSession)

    async def client(app: web.Application) -> AsyncIterator[None]:
        async with ClientSession(connector=TCPConnector(limit=0), timeout=ClientTimeout(total=600)) as made:
            app[session] = made
            for server in (prefill, decode):
                await _wait_for(made, server.url)
                _bind(server)
            yield

    async def complete(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        first = {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": HAND_OVER}
        del first["stream_options"]
        async with request.app[session].post(f"{prefill.url}/v1/completions", json=first) as reply:
            reply.raise_for_status()
            blocks = (await reply.json())["kv_transfer_params"]
        async with request.app[session].post(
            f"{decode.url}/v1/completions", json={**body, "kv_transfer_params": blocks}
        ) as reply:
            answer = web.StreamResponse(status=reply.status)
            await answer.prepare(request)
            async for chunk in reply.content.iter_any():
                await answer.write(chunk)
            await answer.write_eof()
            return answer

    async def models(request: web.Request) -> web.Response:
        async with request.app[session].get(f"{decode.url}/v1/models") as reply:
            return web.json_response(await reply.json())

    app = web.Application(client_max_size=2**24)
    app.cleanup_ctx.append(client)
    app.add_routes([web.post("/v1/completions", complete), web.get("/v1/models", models)])
    return app


async def _wait_for(session: ClientSession, url: str) -> None:
    while True:
        try:
            async with session.get(f"{url}/health") as reply:
                if reply.status == 200:
                    return
        except OSError:
            pass
        await asyncio.sleep(START_SECONDS)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


if __name__ == "__main__":
    main()
