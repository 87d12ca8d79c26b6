"""Refuses requests that can never run on this worker."""

from __future__ import annotations

from dataclasses import dataclass

from quire.engine.errors import KvBudgetError, RequestTooLongError
from quire.engine.sequences.block_tables import BlockTables
from quire.engine.sequences.sequence import Sequence
from quire.sampling.params import MIN_BUDGET_BLOCKS


@dataclass(frozen=True, slots=True)
class RequestChecks:
    """Compares a request with the limits of the model and of the worker.

    Attributes:
        has_windows: whether the model has layers with sliding windows.
        tables: the ledger of the blocks that a request may need.
        max_num_seqs: most sequences in one step.
        max_model_len: most tokens of a sequence, prompt and output.
        can_rank_blocks: whether all layers keep keys and values of one shape, which show what matters.
    """

    has_windows: bool
    tables: BlockTables
    max_num_seqs: int
    max_model_len: int
    can_rank_blocks: bool = True

    def check(self, prompt: Sequence) -> None:
        """Raise an error for a request that can never run.

        Raises:
            RequestTooLongError: the request can never fit.
            KvBudgetError: its KV budget cannot be kept.
        """
        if prompt.num_tokens >= self.max_model_len:
            raise RequestTooLongError(
                f"{prompt.num_tokens} prompt tokens; this worker takes at most {self.max_model_len - 1}"
            )
        if prompt.kv_budget is not None:
            self._check_budget(prompt.kv_budget)
        self._check_fits(prompt)

    def _check_budget(self, num_tokens: int) -> None:
        least = MIN_BUDGET_BLOCKS * self.tables.block_size
        if num_tokens < least:
            raise KvBudgetError(f"must be at least {least}, {MIN_BUDGET_BLOCKS} blocks; got {num_tokens}")
        if self.has_windows:
            raise KvBudgetError(
                "must be absent: the model's sliding windows depend on distances between tokens, "
                "which evicted blocks would change"
            )
        if not self.can_rank_blocks:
            raise KvBudgetError(
                "must be absent: the blocks of a model with latent attention, or with layers of different "
                "shapes, do not show which tokens matter"
            )

    def _check_fits(self, prompt: Sequence) -> None:
        params = prompt.params
        if params.num_sequences > self.max_num_seqs:
            raise RequestTooLongError(
                f"{params.num_sequences} sequences of one request; "
                f"this worker runs at most {self.max_num_seqs} together"
            )
        num_tokens = min(prompt.num_prompt_tokens + params.max_tokens, self.max_model_len)
        num_blocks = self.tables.max_blocks(prompt, num_tokens)
        if num_blocks > self.tables.pool.num_blocks:
            raise RequestTooLongError(
                f"{params.num_sequences} sequences of up to {num_tokens} tokens take {num_blocks} blocks; "
                f"this worker has {self.tables.pool.num_blocks}: "
                "ask for fewer sequences or a lower max_tokens"
            )
