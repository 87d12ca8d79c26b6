"""The token counts of a request, over all its prompts and in the middle of a stream."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quire.protos import inference_pb2 as pb
from quire.services.router.http.openai.usage import UsageCount

prompts = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 9), st.lists(st.integers(0, 4), max_size=4)), max_size=4
)


@given(prompts=prompts)
def test_the_counts_of_all_prompts_add_up(prompts: list[tuple[int, int, list[int]]]) -> None:
    count = UsageCount()
    for prompt_tokens, cached, messages in prompts:
        count.add(pb.GenerateStreamResponse(prompt_tokens=prompt_tokens))
        for num_tokens in messages:
            count.add(pb.GenerateStreamResponse(token_ids=[5] * num_tokens))
            so_far = count.so_far()
            assert so_far.total_tokens == so_far.prompt_tokens + so_far.completion_tokens
            assert so_far.prompt_tokens_details is None
        # The best of several answers are fewer tokens than were generated, so the last message counts.
        usage = pb.Usage(completion_tokens=sum(messages) + 1, cached_prompt_tokens=cached)
        count.add(pb.GenerateStreamResponse(usage=usage))
    num_prompt = sum(each for each, _, _ in prompts)
    num_answer = sum(sum(messages) + 1 for _, _, messages in prompts)
    final = count.final()
    assert (final.prompt_tokens, final.completion_tokens) == (num_prompt, num_answer)
    assert final.total_tokens == num_prompt + num_answer
    assert final.prompt_tokens_details is not None
    assert final.prompt_tokens_details.cached_tokens == sum(each for _, each, _ in prompts)
    assert count.so_far().completion_tokens == num_answer - len(prompts)


def test_the_token_of_a_request_that_only_reads_is_not_counted() -> None:
    count = UsageCount(is_read_only=True)
    count.add(pb.GenerateStreamResponse(prompt_tokens=7, token_ids=[5], usage=pb.Usage(completion_tokens=1)))
    for counts in (count.so_far(), count.final()):
        assert (counts.prompt_tokens, counts.completion_tokens, counts.total_tokens) == (7, 0, 7)
