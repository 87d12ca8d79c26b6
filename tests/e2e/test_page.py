"""The page in a real browser, over a real stack: a chat, and a worker that is killed in the middle of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from quire.models.source import demo_model_path
from quire.services.local.stack import RunningStack
from tests.testing.chromium import Page, chromium, needs_chromium
from tests.testing.stacks import StartStack, connect, kill_busy_worker

LABELS = "[...document.querySelectorAll('.worker')].map((worker) => worker.dataset.label)"
ANSWER = "document.querySelector('.assistant > .text').textContent"
NARROW, HEIGHT = 390, 844


def endless_demo_model(folder: Path) -> str:
    """Copy the demo model; the token that ends its answers is one that it has never learned to write."""
    shutil.copytree(demo_model_path(), folder)
    padding = json.loads((folder / "config.json").read_text())["pad_token_id"]
    for name in ("config.json", "generation_config.json"):
        config = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**config, "eos_token_id": padding}))
    return str(folder)


async def open_page(page: Page, stack: RunningStack) -> None:
    await page.set_view(NARROW, HEIGHT)
    await page.call("Page.navigate", url=f"http://{stack.http_address}/")
    await page.until(f"{LABELS}.length === {len(stack.ready)}")


@needs_chromium
async def test_an_answer_goes_on_while_its_worker_disappears(start_stack: StartStack, tmp_path: Path) -> None:
    model = endless_demo_model(tmp_path / "demo")
    with start_stack("llama", model=model, num_decode=2, http_port=0) as stack:
        async with connect(stack) as (_, workers), chromium(tmp_path / "profile") as page:
            await open_page(page, stack)
            assert sorted(await page.value(LABELS)) == ["D1", "D2", "P1"]
            assert await page.value("document.documentElement.scrollWidth <= innerWidth")
            await page.value("document.querySelector('#prompt').focus()")
            await page.type("the code of the lantern is 417. " * 20 + "what is the code of the lantern?")
            await page.press("Enter")
            # The blocks travel as dots from the prefill worker to the decode worker.
            await page.until("document.querySelector('.dot')")
            await page.until(f"{ANSWER}.length > 200")
            await kill_busy_worker(stack, workers)
            await page.until(f"!{LABELS}.includes('D1') || !{LABELS}.includes('D2')")
            length = await page.value(f"{ANSWER}.length")
            await page.until(f"{ANSWER}.length > {length} + 200")
            await page.press("Escape")
            await page.until("document.querySelector('[aria-busy=false] .problem')")
            assert await page.value("document.querySelector('.problem').textContent") == "Stopped."
            assert page.problems == []


@needs_chromium
async def test_an_answer_shows_how_it_was_computed(demo_stack: RunningStack, tmp_path: Path) -> None:
    async with chromium(tmp_path) as page:
        await open_page(page, demo_stack)
        await page.value("document.querySelector('#example').click()")
        await page.press("Enter")
        await page.until("document.querySelector('.facts')")
        facts = await page.value(
            "Object.fromEntries([...document.querySelectorAll('.facts li')].map((li) => "
            "[li.className, li.textContent]))"
        )
        assert await page.value(ANSWER) == "the score of the palace is 461."
        assert facts.pop("ttft").startswith("first token after ")
        facts.pop("speed", None)
        assert facts == {
            "tokens": "9 tokens",
            "cached": "0 of 100 prompt tokens cached",
            "shipped": "7 blocks shipped",
            "workers": "P1 → D1",
        }
        assert page.problems == []
