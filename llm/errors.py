"""The error of a call in which some requests have failed."""

from __future__ import annotations

from collections.abc import Sequence

from quire.engine.errors import RequestFailedError
from quire.llm.outputs import RequestOutput


class RequestsFailedError(RuntimeError):
    """Some prompts of a call have no answer; the message has the reason of the first of them.

    Attributes:
        outputs: for each prompt, its answers or the error that prevented them.
    """

    def __init__(self, outputs: Sequence[RequestOutput | RequestFailedError]) -> None:
        self.outputs = list(outputs)
        failed = [(at, each) for at, each in enumerate(outputs) if isinstance(each, RequestFailedError)]
        at, error = failed[0]
        super().__init__(f"prompts[{at}]: {error} ({len(failed)} of {len(outputs)} prompts failed)")
