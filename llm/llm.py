"""The offline interface ``LLM``, for use from one thread; its names are those of vLLM."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from quire.engine.device import choose_device
from quire.engine.engine import Engine, EngineParts
from quire.engine.pool_memory import allocate_pool, allocate_swap_space
from quire.engine.ranks.parallel_runner import ParallelRunner
from quire.engine.ranks.ranks import Ranks, load_adapter_on, start_ranks
from quire.engine.runner.processors import num_cores
from quire.engine.scheduling.scheduler import SchedulerConfig
from quire.engine.sequences import sequence as engine_types
from quire.engine.speculation.speculator import SpeculationCounts
from quire.engine.speculation.speculators import load_draft_model, make_speculator
from quire.engine.structured_output.dead_ends import dead_end
from quire.engine.structured_output.grammar import GrammarCompiler, GrammarMatcher
from quire.engine.structured_output.grammar_compile import BadFormatError
from quire.engine.structured_output.logits_rules import LogitsRules
from quire.engine.weights.adapters import Adapter
from quire.engine.weights.loader import load_model
from quire.kvindex.block_hash import CacheScope, root_hash
from quire.llm.adapters import find_adapter, load_adapters
from quire.llm.batch import run_batch
from quire.llm.config import LLMConfig, takes_fields_of
from quire.llm.outputs import EngineStats, RequestOutput, RequestsFailedError
from quire.llm.params import BeamSearchParams, SamplingParams
from quire.llm.prompts import check_prompt, with_texts
from quire.llm.request import EncodedPrompt, Request, TextOptions
from quire.llm.structured import StructuredOutputsParams
from quire.sampling.constraints import contradiction
from quire.sampling.model_defaults import sampling_defaults
from quire.sampling.params import SamplingParams as EngineSamplingParams
from quire.tokenization.chat_template import ChatTemplate
from quire.tokenization.tokenizer import Tokenizer, load_model_files

Prompts = str | Sequence[int] | Sequence[str | Sequence[int]]
"""One prompt or several prompts, each a text or its token ids."""

Conversation = Sequence[Mapping[str, Any]]
"""Messages, each with ``role`` and ``content``, which is a text or a list of parts of type ``text``."""

P = TypeVar("P")


class LLM:
    """A model that answers many prompts together, over paged KV blocks with a prefix cache.

    Use it from one thread. Ctrl-C ends all requests; afterwards the object can be used again.

    It takes the fields of ``LLMConfig`` as arguments, the model also by its position: ``LLM("path",
    dtype="bfloat16", num_blocks=4096)``. Without a model it runs the bundled demo model.

    Raises:
        UnsupportedModelError: the architecture cannot run over paged blocks.
        UnsupportedAdapterError: an adapter cannot be served, or not with this model.
        MissingTokenizerError: the model has no ``tokenizer.json``.
        ValueError: settings are out of range or contradict each other.
    """

    @takes_fields_of(LLMConfig)
    def __init__(self, config: LLMConfig) -> None:
        device = choose_device(config.device)
        torch.set_num_threads(config.threads or min(torch.get_num_threads(), num_cores()))
        files = load_model_files(config.model_path)
        self.tokenizer = Tokenizer.load(files.folder)
        self._chat_template = ChatTemplate.load(files)
        self._folder = files.folder
        self._ranks = start_ranks(config, device)
        try:
            self._engine: Engine | None = _make_engine(config, device, self._ranks)
            self._adapters = load_adapters(config.lora or {}, self._load_adapter)
        except BaseException:
            self._close_ranks()
            raise
        loaded = self._engine.model
        tokenizer_file = files.folder / "tokenizer.json"
        self._grammars = GrammarCompiler(
            lambda: tokenizer_file.read_text("utf-8"), loaded.vocab_size, loaded.eos_token_ids
        )
        self._ids = itertools.count()
        self._num_requests = 0
        self._num_prompt_tokens = 0
        self._num_cached_tokens = 0
        self._num_generated_tokens = 0

    # --- its life -----------------------------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        """The engine that runs the model.

        Raises:
            RuntimeError: this object is closed.
        """
        if self._engine is None:
            raise RuntimeError("this LLM is closed: make a new one")
        return self._engine

    def close(self) -> None:
        """Free the memory of the model and the blocks; the object cannot generate afterwards."""
        self._engine, self._adapters = None, {}
        self._close_ranks()
        self._grammars.close()

    def _close_ranks(self) -> None:
        if self._ranks is not None:
            self._ranks.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def add_adapter(self, name: str, path: str) -> None:
        """Load an adapter, or other weights under the name of one, which requests that have begun keep.

        Args:
            path: a folder in PEFT's format, or a hub id.

        Raises:
            ValueError: the name is empty.
            UnsupportedAdapterError: the adapter cannot be served, or not with this model.
            OSError: there is no such adapter, a file of it is missing or damaged, or a rank cannot place it.
            RanksError: a rank has failed.
        """
        self._adapters |= load_adapters({name: path}, self._load_adapter)

    def _load_adapter(self, path: str) -> Adapter:
        return load_adapter_on(self._ranks, path, self.engine.model)

    def remove_adapter(self, name: str) -> None:
        """Forget an adapter; its memory is freed when the last request that uses it has ended.

        Raises:
            ValueError: there is none of that name.
        """
        find_adapter(self._adapters, "name", name)
        del self._adapters[name]

    def stats(self) -> EngineStats:
        """Return the counts since the start, and the present state of the block pool."""
        counts, preemptions = self.engine.pool.counts, self.engine.preemption.counts
        speculator = self.engine.speculator
        guesses = speculator.counts if speculator else SpeculationCounts(0, 0)
        return EngineStats(
            num_requests=self._num_requests,
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=self._num_cached_tokens,
            num_generated_tokens=self._num_generated_tokens,
            num_swapped=preemptions.swapped,
            num_recomputed=preemptions.recomputed,
            num_draft_tokens=guesses.drafted,
            num_accepted_tokens=guesses.accepted,
            num_free_blocks=counts.free,
            num_cached_blocks=counts.cached,
            num_used_blocks=counts.used,
        )

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters with the defaults of the model's ``generation_config.json``.

        Raises:
            ModelFileError: the file is damaged, or a value can never be served.
        """
        return SamplingParams(**sampling_defaults(self._folder))

    # --- what it does -------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        model: str | Sequence[str] = "",
    ) -> list[RequestOutput]:
        """Answer prompts; return one output for each, in their order.

        Args:
            sampling_params: one object for all prompts, or one for each; None means
                ``get_default_sampling_params()``.
            use_tqdm: show a progress bar on stderr.
            model: name of an adapter for all prompts, or one for each prompt; "" means no adapter.

        Raises:
            ValueError: a prompt, parameter or name can never be served; nothing has been computed.
            RequestsFailedError: some prompts have no answer; the error has the answers of the others.
            StructuredOutputUnavailableError: structured output was requested without llguidance installed.
        """
        return self._generate(self._encode(prompts), sampling_params, use_tqdm, model)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        model: str | Sequence[str] = "",
    ) -> list[RequestOutput]:
        """Answer one conversation or several; the rest is as in ``generate``.

        Raises:
            ChatTemplateError: the model's template refuses a conversation.
            ValueError: the model has no chat template, or a conversation is empty or not made of texts.
        """
        if self._chat_template is None:
            raise ValueError("the model has no chat template: use generate")
        conversations: Any = [messages] if messages and isinstance(messages[0], Mapping) else messages
        texts = [self._chat_template.render(with_texts(each, at)) for at, each in enumerate(conversations)]
        # The template already contains the special tokens.
        encoded = self.tokenizer.encode_batch(texts, add_special_tokens=False)
        prompts = [EncodedPrompt(text, ids, is_chat=True) for text, ids in zip(texts, encoded, strict=True)]
        return self._generate(prompts, sampling_params, use_tqdm, model)

    def beam_search(
        self,
        prompts: Prompts,
        params: BeamSearchParams | Sequence[BeamSearchParams],
        use_tqdm: bool = True,
        model: str | Sequence[str] = "",
    ) -> list[RequestOutput]:
        """Find the most probable answers to prompts by beam search; each output has the best first.

        Raises:
            ValueError: a prompt or name can never be served; nothing has been computed.
            RequestsFailedError: some prompts have no answer; the error has the answers of the others.
        """
        given = self._encode(prompts)
        requests = [
            self._request(at, prompt, each.to_engine(self._num_left(at, prompt)), TextOptions(), name)
            for at, (prompt, each, name) in enumerate(_combined(given, params, model))
        ]
        return self._run(requests, use_tqdm)

    # --- from prompts to requests -------------------------------------------------------------------------

    def _encode(self, prompts: Prompts) -> list[EncodedPrompt]:
        given: Any = [prompts] if isinstance(prompts, str) or _are_token_ids(prompts) else prompts
        for at, prompt in enumerate(given):
            check_prompt(prompt, f"prompts[{at}]")
        texts = [prompt for prompt in given if isinstance(prompt, str)]
        encoded = iter(self.tokenizer.encode_batch(texts))
        return [
            EncodedPrompt(prompt, next(encoded))
            if isinstance(prompt, str)
            else EncodedPrompt(None, list(prompt))
            for prompt in given
        ]

    def _generate(
        self,
        prompts: list[EncodedPrompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        model: str | Sequence[str],
    ) -> list[RequestOutput]:
        requests = []
        given = self.get_default_sampling_params() if params is None else params
        for at, (prompt, each, name) in enumerate(_combined(prompts, given, model)):
            for field, token_ids in each.named_token_ids.items():
                self._check_token_ids(f"sampling_params[{at}].{field}", token_ids)
            sampling = each.to_engine(self._num_left(at, prompt), self._bad_words(each.bad_words))
            options = TextOptions(
                each.stop_strings,
                each.min_tokens,
                each.skip_special_tokens,
                each.include_stop_str_in_output,
                each.num_best,
                each.logprobs is not None,
            )
            request = self._request(at, prompt, sampling, options, name)
            stops = self.engine.model.eos_token_ids | sampling.stop_token_ids
            vocab_size = self.engine.model.vocab_size
            constraint = contradiction(sampling, self.engine.model.eos_token_ids, vocab_size)
            if constraint is not None:
                problem = "leaves no token that the other constraints allow"
                raise ValueError(f"sampling_params[{at}].{constraint} {problem}")
            if each.structured_outputs is not None:
                grammar = self._compile(at, each.structured_outputs, len(prompt.token_ids))
                rules = LogitsRules(sampling, len(prompt.token_ids), grammar)
                request.sequence.logits_rules = rules
                if (error := dead_end(rules, prompt.token_ids, vocab_size, stops)) is not None:
                    raise ValueError(f"sampling_params[{at}].{error}")
            requests.append(request)
        return self._run(requests, use_tqdm)

    def _request(
        self, at: int, prompt: EncodedPrompt, params: EngineSamplingParams, options: TextOptions, model: str
    ) -> Request:
        self._check_token_ids(f"prompts[{at}]", prompt.token_ids)
        adapter = find_adapter(self._adapters, "model", model) if model else None
        sequence = engine_types.Sequence(
            attempt_id=str(next(self._ids)),
            token_ids=list(prompt.token_ids),
            num_prompt_tokens=len(prompt.token_ids),
            params=params,
            root_hash=root_hash(b"", b"", CacheScope(adapter=adapter.digest)) if adapter else b"",
            adapter=adapter,
        )
        return Request(prompt, sequence, options, self.tokenizer)

    def _num_left(self, at: int, prompt: EncodedPrompt) -> int:
        """Return how many tokens may follow a prompt; raise ValueError if there is no room for any."""
        num_tokens, limit = len(prompt.token_ids), self.engine.max_model_len - 1
        if not 1 <= num_tokens <= limit:
            raise ValueError(
                f"prompts[{at}] must hold from 1 to {limit} tokens, one less than the model's length; "
                f"got {num_tokens}"
            )
        return self.engine.max_model_len - num_tokens

    def _check_token_ids(self, name: str, token_ids: Iterable[int]) -> None:
        vocab_size = self.engine.model.vocab_size
        for token_id in token_ids:
            if not 0 <= token_id < vocab_size:
                raise ValueError(f"{name} must be token ids below {vocab_size}; got {token_id}")

    def _compile(self, at: int, form: StructuredOutputsParams, num_prompt_tokens: int) -> GrammarMatcher:
        try:
            return self._grammars.compile(form.to_format(), num_prompt_tokens)
        except BadFormatError as error:
            raise ValueError(f"sampling_params[{at}].structured_outputs: {error}") from error

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return the tokens of words, both at the beginning of a text and after a space."""
        texts = [form for word in words for form in (word.lstrip(), f" {word.lstrip()}")]
        encoded = self.tokenizer.encode_batch(texts, add_special_tokens=False)
        return tuple(dict.fromkeys(map(tuple, encoded)))

    # --- from requests to answers -------------------------------------------------------------------------

    def _run(self, requests: list[Request], use_tqdm: bool) -> list[RequestOutput]:
        run_batch(self.engine, requests, use_tqdm)
        self._count(requests)
        outputs = [request.output() for request in requests if request.error is None]
        if len(outputs) < len(requests):
            good = iter(outputs)
            raise RequestsFailedError([request.error or next(good) for request in requests])
        return outputs

    def _count(self, requests: list[Request]) -> None:
        self._num_requests += len(requests)
        self._num_prompt_tokens += sum(request.sequence.num_prompt_tokens for request in requests)
        self._num_cached_tokens += sum(request.sequence.num_cached_tokens for request in requests)
        self._num_generated_tokens += sum(request.num_generated_tokens for request in requests)


def _are_token_ids(prompts: Prompts) -> bool:
    is_list = isinstance(prompts, Sequence) and not isinstance(prompts, bytes | bytearray)
    return is_list and bool(prompts) and isinstance(prompts[0], int)


def _combined(
    prompts: list[EncodedPrompt], params: P | Sequence[P], model: str | Sequence[str]
) -> list[tuple[EncodedPrompt, P, str]]:
    """Return each prompt with its parameters and its model; raise ValueError if their numbers differ."""
    params_of_each: Any = params if isinstance(params, Sequence) else [params] * len(prompts)
    models = [model] * len(prompts) if isinstance(model, str) else model
    for name, each in (("parameters", params_of_each), ("models", models)):
        if len(each) != len(prompts):
            raise ValueError(f"there are {len(prompts)} prompts, but {name} for {len(each)}")
    return list(zip(prompts, params_of_each, models, strict=True))


def _make_engine(config: LLMConfig, device: torch.device, ranks: Ranks | None) -> Engine:
    collectives = None if ranks is None else ranks.collectives
    loaded = load_model(
        config.model_path, config.dtype, device, config.weight_dtype, config.arithmetic, collectives
    )
    draft = load_draft_model(config, loaded, device)
    memory = allocate_pool(config, loaded, draft, device, share=None if ranks is None else ranks.share_pool)
    limits = SchedulerConfig.of(config)
    swap_memory = allocate_swap_space(config, memory)
    parts = EngineParts(
        swap_memory=swap_memory,
        speculator=make_speculator(config, draft, loaded, memory, limits),
        runner=None if ranks is None else ParallelRunner(loaded, memory, swap_memory, ranks),
    )
    return Engine(loaded, memory, limits, config.max_model_len, parts)
