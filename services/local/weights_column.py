"""Shows on the terminal how many bytes of weights workers have loaded, and how fast."""

from __future__ import annotations

import time
from collections.abc import Collection

from rich.filesize import decimal
from rich.progress import ProgressColumn, Task
from rich.text import Text

from quire.engine.weights.weights_file import WeightsFile


class WeightsColumn(ProgressColumn):
    """A column of a progress bar.

    Args:
        files: the files that workers write. There may be more of them later.
    """

    max_refresh = 0.5

    def __init__(self, files: Collection[WeightsFile]) -> None:
        super().__init__()
        self._files = files
        self._began: float | None = None

    def render(self, task: Task) -> Text:
        """Return the bytes and the bytes per second since the first byte; nothing before that."""
        # The bar has a thread of its own, and a launcher may add a file meanwhile.
        num_bytes = sum(each.num_bytes for each in tuple(self._files))
        if not num_bytes or all(each.is_complete for each in tuple(self._files)):
            return Text()
        now = time.monotonic()
        if self._began is None:
            self._began = now
        rate = num_bytes / max(now - self._began, self.max_refresh)
        return Text(f"{decimal(num_bytes)} of weights, {decimal(int(rate))}/s")
