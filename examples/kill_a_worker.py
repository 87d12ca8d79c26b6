"""Kills a decode worker in the middle of an answer, which continues without losing or changing a token.

Starts a stack of its own, one prefill and two decode workers: python examples/kill_a_worker.py
"""

from __future__ import annotations

import os
import signal

from rich.console import Console

from quire.client import Client, GenerationOptions
from quire.client.admin import AdminClient
from quire.services.local.config import LocalStackConfig
from quire.services.local.stack import RunningStack, local_stack
from quire.services.router.config import RouterConfig

PROMPT = "the code of the lantern is 417. the age of the cat is 900. "
NUM_TOKENS = 400
KILL_AFTER = 150


def busy_decode_worker(stack: RunningStack) -> tuple[str, int]:
    """Return the name and the pid of the decode worker that runs the request."""
    with AdminClient(stack.admin_address) as admin:
        [busy] = (
            worker.address for worker in admin.workers() if worker.role == "decode" and worker.num_requests
        )
    [name] = (name for name, ready in stack.ready.items() if ready.address == busy)
    pid = stack.workers[name].process.pid
    assert pid is not None
    return name, pid


def main() -> None:
    console = Console(highlight=False)
    config = LocalStackConfig(num_prefill=1, num_decode=2, router=RouterConfig(port=0))
    with local_stack(config, console) as stack, Client(stack.address, timeout=60) as client:
        sampling: GenerationOptions = {
            "max_tokens": NUM_TOKENS,
            "temperature": 0.8,
            "seed": 7,
            "ignore_eos": True,
        }
        undisturbed = list(client.generate(PROMPT, **sampling).token_ids)

        token_ids: list[int] = []
        is_killed = False
        for delta in client.stream(PROMPT, **sampling):
            console.print(delta.text, end="", style="green" if is_killed else None)
            token_ids += delta.token_ids
            if not is_killed and len(token_ids) >= KILL_AFTER:
                name, pid = busy_decode_worker(stack)
                os.kill(pid, signal.SIGKILL)
                is_killed = True
                console.print(f"\n[bold red]kill -9 {pid} ({name}), after {len(token_ids)} tokens[/]")
        console.print()
        if token_ids != undisturbed:
            raise SystemExit("the answer is not the one without the kill")
        console.print(f"{len(token_ids)} tokens, the same as without the kill.")


if __name__ == "__main__":
    main()
