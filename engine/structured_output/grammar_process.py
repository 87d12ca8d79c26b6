"""Tries formats, each in a separate process, so that no format can crash the server.

A chain of 3,500 rules overflows the compiler's stack, a regular expression of 30 KB needs 900 MB, and a
schema of 43 bytes takes minutes. So a forked process with resource limits tries each format. If the format
exceeds the limits, only this fork ends. ``grammar_check`` starts the program and sends it lines of JSON:
first the tokenizer, then formats. The program answers each line with one line: an empty object for the
tokenizer, a verdict for a format.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sys
from typing import TYPE_CHECKING, Any

from quire.engine.structured_output.grammar_compile import (
    MAX_LEXER_STATES,
    BadFormatError,
    compile_format,
    first_line,
    load_tokenizer,
)
from quire.sampling.output_format import OutputFormat

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_CPU_SECONDS = 2
"""Most processor time to compile one format; a JSON schema of 10 KB takes 0.02 s."""
MAX_SECONDS = 10
"""Most wall-clock time to compile one format; a busy machine needs more than the processor time."""
MAX_STACK_BYTES = 1 << 20
"""Most stack to compile one format. The worker compiles it next, in threads with at least 2 MiB."""
MAX_TRIAL_BYTES = 256 << 20
MAX_FORMAT_BYTES = 32 << 20
"""Most bytes that a compiled format may occupy; usual ones occupy 1 to 5 MiB."""
_NUM_TRIAL_TOKENS = 16
_MAX_ERROR_CHARS = 1000
"""The compiler's messages are truncated to this length, since they may contain the format."""


def main() -> None:
    """Answer lines until standard input ends, which happens when the parent process ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tokenizer = load_tokenizer(*json.loads(sys.stdin.readline()))
    _send(sys.stdout.fileno(), {})
    for line in sys.stdin:
        _send(sys.stdout.fileno(), _try_apart(tokenizer, OutputFormat(*json.loads(line))))


def _try_apart(tokenizer: LLTokenizer, output_format: OutputFormat) -> dict[str, Any]:
    """Try a format in a forked process; return its verdict, or an error that says why the process died."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            _limit_resources()
            _send(writer, _try(tokenizer, output_format))
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as verdict:
        text = verdict.read()
    _, status = os.waitpid(pid, 0)
    if text:
        return dict(json.loads(text))
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGALRM, signal.SIGKILL):
        return {"error": f"takes more than {MAX_CPU_SECONDS} s to compile; simplify it"}
    return {"error": "is too large or nests too deeply to be compiled; simplify it"}


def _limit_resources() -> None:
    """Limit the resources of this process. At a limit the kernel ends it: native code gets no exception."""
    limits = [
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_STACK, MAX_STACK_BYTES),
        (resource.RLIMIT_CPU, MAX_CPU_SECONDS),
    ]
    if address_space := _memory("VmSize"):
        limits.append((resource.RLIMIT_AS, address_space + MAX_TRIAL_BYTES))
    for kind, limit in limits:
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    signal.alarm(MAX_SECONDS)


def _try(tokenizer: LLTokenizer, output_format: OutputFormat) -> dict[str, Any]:
    before = _memory("RssAnon")
    try:
        matcher = compile_format(tokenizer, output_format, MAX_LEXER_STATES)
    except BadFormatError as error:
        return {"error": str(error)[:_MAX_ERROR_CHARS]}
    except MemoryError:
        return {"error": "takes too much memory to compile; simplify it"}
    if problem := _walk(matcher):
        return {"error": f"is too complex: {problem}"}
    num_bytes = max(0, _memory("RssAnon") - before)
    if num_bytes > MAX_FORMAT_BYTES:
        return {"error": f"takes {num_bytes >> 20} MiB when compiled, and may take {MAX_FORMAT_BYTES >> 20}"}
    return {"num_bytes": num_bytes}


def _walk(matcher: LLMatcher) -> str:
    """Write a random beginning of an answer; return the error if it cannot be continued, else ""."""
    rng = random.Random(0)
    answer = matcher.deep_copy()
    for _ in range(_NUM_TRIAL_TOKENS):
        bits = answer.compute_bitmask()
        if answer.is_stopped():
            break
        allowed = [index for index, byte in enumerate(bits) if byte]
        index = rng.choice(allowed)
        answer.consume_token(8 * index + bits[index].bit_length() - 1)
    return first_line(answer.get_error())


def _memory(field: str) -> int:
    """Return a field of ``/proc/self/status`` in bytes; 0 if the system does not have it."""
    try:
        with open("/proc/self/status", encoding="ascii") as status:
            return next(int(line.split()[1]) << 10 for line in status if line.startswith(field))
    except (FileNotFoundError, StopIteration):
        return 0


def _send(file: int, value: dict[str, Any]) -> None:
    line = json.dumps(value).encode() + b"\n"
    while line:
        line = line[os.write(file, line) :]


if __name__ == "__main__":
    main()
