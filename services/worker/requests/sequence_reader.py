"""Reads the router's sequences into the engine's, and compiles the formats that they must have."""

from __future__ import annotations

import asyncio
from functools import partial

from quire.engine.sequences.sequence import Sequence
from quire.engine.structured_output.dead_ends import dead_end
from quire.engine.structured_output.grammar import (
    GrammarCompiler,
    GrammarMatcher,
    StructuredOutputUnavailableError,
)
from quire.engine.structured_output.grammar_compile import BadFormatError
from quire.engine.structured_output.logits_rules import LogitsRules
from quire.protos import worker_pb2
from quire.rpc.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from quire.sampling.messages import format_from_proto
from quire.services.worker.identity import WorkerIdentity
from quire.services.worker.requests.convert import no_token_left, sequence_from_proto
from quire.services.worker.requests.format_queue import FormatQueue
from quire.services.worker.state import WorkerState
from quire.tokenization.tokenizer import MissingTokenizerError

INLINE_HASH_TOKENS = 2048
"""Prompts of up to this length are hashed on the event loop, in about 1 ms; longer ones in a thread."""
FORMAT_SECONDS = 20.0
"""Longest wait of a request for the compilation of its format, including earlier requests' formats."""


class SequenceReader:
    """Reads sequences for one worker."""

    def __init__(self, identity: WorkerIdentity, state: WorkerState, grammars: GrammarCompiler) -> None:
        self._identity = identity
        self._state = state
        self._grammars = grammars
        self._compiling = FormatQueue()

    async def read(self, message: worker_pb2.Sequence, *, stops_after_prefill: bool) -> Sequence:
        """Return the engine's sequence.

        Raises:
            ServiceError: a field is out of range, or the format cannot be compiled, or allows no answer, or
                the adapter is not loaded here.
        """
        adapter = self._state.adapter_of(message.cache_scope.adapter)
        sequence = sequence_from_proto(
            message,
            self._identity.root_hash(message.cache_scope),
            self._identity.vocab_size,
            await self._grammar(message),
            adapter,
            stops_after_prefill=stops_after_prefill,
        )
        rules = sequence.logits_rules
        is_new = not stops_after_prefill and not sequence.num_output_tokens
        if is_new and rules is not None and rules.grammar is not None:
            await asyncio.to_thread(self._refuse_dead_end, sequence, rules)
        await self._hash_blocks(sequence)
        return sequence

    def close(self) -> None:
        """End the compiler of formats."""
        self._compiling.close()
        self._grammars.close()

    async def _hash_blocks(self, sequence: Sequence) -> None:
        """Hash the blocks here, since hashing in the engine's thread would delay all of its sequences."""
        block_size = self._identity.layout.block_size
        if sequence.num_tokens <= INLINE_HASH_TOKENS:
            sequence.extend_hashes(block_size)
        else:
            await asyncio.to_thread(sequence.extend_hashes, block_size)

    def _refuse_dead_end(self, sequence: Sequence, rules: LogitsRules) -> None:
        stops = self._identity.eos_token_ids | sequence.params.stop_token_ids
        error = dead_end(rules, sequence.token_ids, self._identity.vocab_size, stops)
        if error is not None:
            raise no_token_left(error)

    async def _grammar(self, message: worker_pb2.Sequence) -> GrammarMatcher | None:
        output_format = format_from_proto(message.format)
        if output_format is None:
            return None
        num_prompt_tokens = len(message.token_ids) - message.num_output_tokens
        try:
            known = self._grammars.cached_matcher(output_format, num_prompt_tokens)
            if known is not None:
                return known
            async with asyncio.timeout(FORMAT_SECONDS):
                compile_it = partial(self._grammars.compile, output_format, num_prompt_tokens)
                return await self._compiling.run(message.cache_scope.tenant, compile_it)
        except BadFormatError as error:
            raise InvalidArgument(f"format.{output_format.kind}", str(error)) from error
        except TimeoutError as error:
            raise ResourceExhausted(
                f"format.{output_format.kind}: not compiled within {FORMAT_SECONDS:g} s; "
                "others are compiled before it",
                reason="FORMATS_BUSY",
                retry_after_seconds=FORMAT_SECONDS,
            ) from error
        except (StructuredOutputUnavailableError, MissingTokenizerError) as error:
            raise FailedPrecondition(str(error), reason="NO_STRUCTURED_OUTPUT") from error
