"""The blocking client: whole answers, streams, chats, errors. Needs a running server: ./run"""

from __future__ import annotations

import sys

from quire.client import Client, InvalidRequest, Message, Overloaded, QuireError

NOTES = "the code of the lantern is 417. the age of the cat is 900. "


def main() -> None:
    with Client("127.0.0.1:8500", timeout=30) as client:
        info = client.model_info()
        print(
            f"{info.model}: up to {info.max_model_len} tokens, {info.num_decode_workers} decode worker(s)\n"
        )

        # A whole answer, and the origin of its KV blocks.
        messages: list[Message] = [
            {"role": "user", "content": NOTES + "what is the code of the lantern?"},
        ]
        completion = client.chat(messages, max_tokens=32, temperature=0)
        usage = completion.usage
        print(completion.text, f"({completion.finish_reason}, {usage.blocks_shipped} blocks shipped)")

        # The next turn begins with the same tokens, whose blocks are found in the cache.
        messages += [
            {"role": "assistant", "content": completion.text},
            {"role": "user", "content": "what is the age of the cat?"},
        ]
        for delta in client.stream(messages, max_tokens=32, temperature=0):
            print(delta.text, end="", flush=True)
            if delta.usage is not None:
                print(f" ({delta.usage.cached_prompt_tokens} of {delta.usage.prompt_tokens} tokens cached)")

        # Leaving the loop cancels the request and frees its blocks.
        for delta in client.stream("the", max_tokens=1000, ignore_eos=True):
            print(f"enough after {len(delta.token_ids)} token(s)")
            break

        try:
            client.generate("the", max_tokens=10**6)
        except InvalidRequest as error:
            print(f"refused, field {error.field}: {error}")
        except Overloaded as error:
            print(f"full, try again in {error.retry_after} s")


if __name__ == "__main__":
    try:
        main()
    except QuireError as error:
        sys.exit(f"{type(error).__name__}: {error}")
