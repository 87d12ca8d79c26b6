"""The page at the root of the HTTP port, and the picture of the cluster that it loads."""

from __future__ import annotations

import asyncio
import re
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession
from openai import AsyncOpenAI

from quire.protos import worker_pb2
from quire.services.router.http.page import files
from quire.services.router.tenants.api_keys import Tenant
from tests.testing.api_keys import write_keys
from tests.testing.until import until

ASKS: Any = {"model": "", "messages": [{"role": "user", "content": "say hello world, stop here"}]}
TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


def text_of(name: str) -> str:
    return resources.files(files.__package__ or "").joinpath(name).read_text(encoding="utf-8")


@pytest.mark.parametrize("path", files.PAGE_FILES)
async def test_a_file_needs_no_key_and_no_other_host(start: Any, tmp_path: Path, path: str) -> None:
    keys, _ = write_keys(tmp_path, Tenant("blue"))
    http = await start(api_keys_file=keys)
    async with http.get(path) as response:
        assert response.status == 200
        assert await response.text() == text_of(files.PAGE_FILES[path])
        assert response.content_type == TYPES[files.PAGE_FILES[path].rpartition(".")[2]]
        policy = response.headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'self'; ")
        assert "unsafe" not in policy
        assert response.headers["X-Content-Type-Options"] == "nosniff"


async def test_an_agent_finds_a_server_at_the_root(http: ClientSession) -> None:
    async with http.head("/") as response:
        assert (response.status, await response.read()) == (200, b"")


def test_the_page_has_all_its_files_and_nothing_inline() -> None:
    html = text_of("index.html")
    linked = set(re.findall(r'(?:src|href)="([^"]+)"', html))
    for name in re.findall(r'from "\./([^"]+)"', "".join(map(text_of, ["chat.js", "cluster.js"]))):
        linked.add(f"/page/{name}")
    assert linked == files.PAGE_FILES.keys() - {"/"}
    assert not re.search(r"<style|style=|<script(?![^>]* src=)|\son\w+=", html)
    for name in files.PAGE_FILES.values():
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|innerHTML", text_of(name)), name
    folder = Path(str(resources.files(files.__package__ or "")))
    assert {each.name for each in folder.iterdir() if each.suffix not in (".py", "")} == set(
        files.PAGE_FILES.values()
    )


async def test_only_a_key_shows_the_cluster(start: Any, tmp_path: Path) -> None:
    keys, [key] = write_keys(tmp_path, Tenant("blue"))
    http = await start(api_keys_file=keys)
    async with http.get("/v1/cluster") as response:
        assert (response.status, (await response.json())["error"]["code"]) == (401, "no_api_key")
    async with http.get("/v1/cluster", headers={"x-api-key": key}) as response:
        assert response.status == 200
        # A tenant sees neither addresses nor the names that operators use.
        assert not re.search(r"127\.0\.0\.1|\"[pd][12]\"", await response.text())
    # An API key never travels in a URL, which servers and browsers keep.
    async with http.get("/v1/cluster", params={"key": key}) as response:
        assert response.status == 401


async def test_the_view_shows_workers_blocks_and_pushes(pair: Any, start: Any) -> None:
    async def load(request: Any, context: Any) -> worker_pb2.GetLoadResponse:
        return worker_pb2.GetLoadResponse(num_running=1, num_waiting=2, free_blocks=5, cached_blocks=6)

    await pair.add("d3", "decode", GetLoad=load)
    http = await start()
    await pair.running.has_served.wait()
    await pair["d3"].begin_to_stop()
    workers = pair.running.workers
    await until(lambda: workers.draining("decode"))
    async with http.get("/v1/cluster") as response:
        view = await response.json()
    assert (view["requests"], view["pushes"]) == (0, [])
    shown = {each.pop("label"): each for each in view["workers"]}
    assert shown.keys() == {"P1", "P2", "D1", "D2", "D3"}
    (revision,) = {each.pop("revision") for each in shown.values()}
    assert revision
    (loaded,) = (each for each in shown.values() if "blocks" in each)
    assert loaded == {
        "role": "decode",
        "state": "draining",
        "requests": 3,
        "blocks": {"free": 5, "cached": 6, "used": 0},
    }
    assert shown["P1"] == {"role": "prefill", "state": "serving"}


async def test_an_answer_names_its_workers_and_counts_its_blocks(
    pair: Any, http: ClientSession, client: AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.services.router.http.cluster_view.VIEW_SECONDS", 0)
    answer = await client.chat.completions.create(**ASKS)
    work: Any = answer.model_dump()["usage"]["work"]
    source, target = work.pop("workers")
    assert (source[0], target[0]) == ("P", "D")
    assert work == {
        "blocks_shipped": 3,
        "bytes_shipped": 300,
        "blocks_reused_on_decode": 1,
        "blocks_pulled": 0,
        "bytes_pulled": 0,
        "retries": 0,
    }
    push = {"source": source, "target": target, "running": 0, "blocks": 3}
    async with http.get("/v1/cluster") as response:
        assert (await response.json())["pushes"] == [push]
    pair.change(pause_before_token=0)

    async def view_of_the_request() -> Any:
        async with http.get("/v1/cluster") as response:
            view = await response.json()
        return view if view["requests"] and view["pushes"][0]["running"] else None

    # A stream begins with its first token, or after 15 s.
    asked = asyncio.create_task(client.chat.completions.create(**ASKS, stream=True))
    view = await until(view_of_the_request)
    assert (view["requests"], view["pushes"][0]["running"]) == (1, 1)
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    await until(lambda: pair.running.calls.number == 0)


async def test_a_killed_worker_disappears_from_the_view(pair: Any, start: Any) -> None:
    http = await start()
    await pair.running.has_served.wait()
    await pair["d1"].server.stop()
    pair.running.workers.set_aside(pair.running.workers.live("decode")[0])
    await until(lambda: len(pair.running.workers.all()) == 3)
    async with http.get("/v1/cluster") as response:
        labels = {each["label"] for each in (await response.json())["workers"]}
    assert len(labels) == 3
    assert {"P1", "P2"} < labels
