"""Tiny models, a forwarding server, the settings of the property tests, and Python's signal handlers."""

from __future__ import annotations

import asyncio
import gc
import json
import signal
import ssl
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing, suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from quire.services.local.redis_process import RedisProcess
from quire.tokenization.tokenizer import Tokenizer
from tests.testing.manual_clock import ManualClock

# Every run tries the same examples, so few suffice. A busy machine makes an example slow, which is no defect.
settings.register_profile(
    "suite",
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=True,
    database=None,
    print_blob=True,
)
# For ``pytest --hypothesis-profile search``: every run tries other examples.
settings.register_profile("search", parent=settings.get_profile("suite"), max_examples=100, derandomize=False)
settings.load_profile("suite")
# Hypothesis also draws constants of the imported modules, so a test's examples would depend on which other
# tests run, and on edits of other files. No setting of 6.170 turns this off; these lines do so for "suite".
_find_constants = providers._get_local_constants
providers._get_local_constants = lambda: Constants() if settings().derandomize else _find_constants()

VOCAB_SIZE = 320
TEMPLATE = """{{ bos_token }}{% for message in messages %}
<|{{ message.role }}|>{{ message.content | trim }}{{ eos_token }}
{% endfor %}
{% if add_generation_prompt %}<|assistant|>{% endif %}"""


def pytest_collection_finish() -> None:
    """Spare garbage collection the modules and tests: a pass over all of them takes a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _signal_handlers() -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt, and undo what a command that runs in this process sets."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _num_threads() -> Iterator[None]:
    """Undo a change of torch's number of threads, where a test module has imported torch."""
    torch = sys.modules.get("torch")
    before = torch.get_num_threads() if torch else None
    yield
    if torch and torch.get_num_threads() != before:
        torch.set_num_threads(before)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisProcess]:
    """Run a Redis for the tests of one file."""
    with RedisProcess() as process:
        yield process


@pytest.fixture
def forwarding() -> Callable[..., AbstractAsyncContextManager[int]]:
    """A server that forwards connections to a port, late or behind TLS; it yields its own port."""
    return _forwarding


@asynccontextmanager
async def _forwarding(
    port: int, *, delay_seconds: float = 0.0, tls: ssl.SSLContext | None = None
) -> AsyncIterator[int]:
    connections: set[asyncio.Task[None]] = set()

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError), closing(writer):
            while data := await reader.read(1 << 16):
                await asyncio.sleep(delay_seconds)
                writer.write(data)
                await writer.drain()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        with closing(writer):
            back_reader, back_writer = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(copy(reader, back_writer), copy(back_reader, writer))

    async with await asyncio.start_server(forward, "127.0.0.1", 0, ssl=tls) as server:
        yield server.sockets[0].getsockname()[1]
    # A connection that stays open would be reported by a later test.
    for task in connections:
        task.cancel()
    await asyncio.gather(*connections, return_exceptions=True)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder that holds a byte-level BPE tokenizer: <s> is 0, </s> is 1."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["hello world, stop here and say the end"] * 4, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    folder = tmp_path_factory.mktemp("model")
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>"},
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer.load(model_folder)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function from an architecture, and changed sizes, to the folder of its tiny random model."""
    # It imports torch, which most tests do without.
    from tests.testing.tiny_models import make_random_model

    @cache
    def make(architecture: str, **sizes: Any) -> Path:
        return make_random_model(architecture, tmp_path_factory.mktemp(architecture), **sizes)

    return make


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the ranks that this process starts, for a test of what they compute."""
    from quire.engine.ranks import ranks
    from tests.testing.forked_ranks import forked_rank

    monkeypatch.setattr(ranks, "_start", forked_rank)


@pytest.fixture(scope="session")
def check_greedy(tiny_model: Callable[..., Path]) -> Callable[..., None]:
    """Return a function that checks an answer to a prompt: ``num_new`` greedy tokens of transformers."""
    from tests.testing.tiny_models import best_tokens, load_reference

    def check(architecture: str, prompt: list[int], tokens: list[int], num_new: int = 64) -> None:
        assert len(tokens) == num_new
        assert tokens == best_tokens(load_reference(tiny_model(architecture)), prompt, tokens)

    return check


@pytest.fixture(scope="session")
def expected(tiny_model: Callable[..., Path]) -> Callable[..., list[int]]:
    """Return a function from (architecture, prompt) to the first greedy tokens of transformers."""
    from tests.testing.tiny_models import generate_greedy, load_reference

    @cache
    def generate(architecture: str, prompt: tuple[int, ...], num_new: int) -> list[int]:
        return generate_greedy(load_reference(tiny_model(architecture)), list(prompt), num_new)

    # Many tests have the same prompts, and transformers takes longer than the engine.
    return lambda architecture, prompt, num_new=64: [*generate(architecture, tuple(prompt), num_new)]
