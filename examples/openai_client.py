"""OpenAI's client against `./run`: pip install openai, then python examples/openai_client.py."""

from __future__ import annotations

import asyncio

from openai import APIStatusError, AsyncOpenAI, OpenAI

URL = "http://127.0.0.1:8502/v1"
NOTES = "the code of the lantern is 417. the room of the anchor is 902. "


def chat(client: OpenAI, model: str) -> None:
    """Ask twice; the second prompt begins like the first, whose blocks are still cached."""
    for question in ("what is the code of the lantern?", "what is the room of the anchor?"):
        answer = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": NOTES + question}], temperature=0
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        cached, tokens = answer.usage.prompt_tokens_details.cached_tokens, answer.usage.prompt_tokens
        print(f"{answer.choices[0].message.content}  ({cached} of {tokens} tokens cached)")


def stream(client: OpenAI, model: str) -> None:
    """Print an answer as it comes; vLLM's fields go into ``extra_body``."""
    chunks = client.completions.create(
        model=model,
        prompt="the code of the",
        max_tokens=20,
        stream=True,
        extra_body={"top_k": 20, "min_p": 0.05},
    )
    for chunk in chunks:
        print(chunk.choices[0].text, end="", flush=True)
    print()


def score(client: OpenAI, model: str) -> None:
    """Let the model read a text and say how probable each token of it was; nothing is generated."""
    read = client.completions.create(
        model=model, prompt="the code of the lantern is 417.", echo=True, logprobs=1, max_tokens=0
    )
    logprobs = read.choices[0].logprobs
    assert logprobs is not None
    for token, logprob in zip(logprobs.tokens or [], logprobs.token_logprobs or [], strict=True):
        print(f"{token!r:>12} {'' if logprob is None else format(logprob, '8.3f')}")


async def several(model: str) -> None:
    """Send several requests concurrently, and read an error."""
    async with AsyncOpenAI(base_url=URL, api_key="none") as client:
        answers = await asyncio.gather(
            *(
                client.completions.create(model=model, prompt=f"the {word} of the", max_tokens=8, seed=1)
                for word in ("code", "room", "age")
            )
        )
        print([answer.choices[0].text for answer in answers])
        try:
            await client.completions.create(model=model, prompt="x", temperature=-1)
        except APIStatusError as error:
            print(error.status_code, error.body)


def main() -> None:
    """Show each."""
    with OpenAI(base_url=URL, api_key="none") as client:
        (model,) = (each.id for each in client.models.list())
        chat(client, model)
        stream(client, model)
        score(client, model)
    asyncio.run(several(model))


if __name__ == "__main__":
    main()
