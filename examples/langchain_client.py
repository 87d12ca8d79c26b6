"""LangChain against `./run`: pip install langchain-openai, then python examples/langchain_client.py."""

from __future__ import annotations

import asyncio

from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

OPTIONS = {
    "base_url": "http://127.0.0.1:8502/v1",
    "api_key": "none",
    "model": "demo",
    "temperature": 0,
    "max_tokens": 100,
}
QUESTION = "the code of the lantern is 417. what is the code of the lantern?"


class Code(BaseModel):
    """The structure that the answer must have."""

    value: int


def main() -> None:
    """Show each way of asking."""
    chat = ChatOpenAI(**OPTIONS)
    answer = chat.invoke([("system", "the age of the dog is 3."), ("human", QUESTION)])
    print("invoke    ", answer.content, answer.usage_metadata["total_tokens"], "tokens")
    print("stream    ", [chunk.content for chunk in chat.stream(QUESTION)])
    print("ainvoke   ", asyncio.run(chat.ainvoke(QUESTION)).content)
    print("batch     ", [each.content for each in chat.batch([QUESTION, QUESTION])])
    scored = ChatOpenAI(**OPTIONS, logprobs=True, top_logprobs=2, stop=["7"]).invoke(QUESTION)
    print("logprobs  ", scored.content, len(scored.response_metadata["logprobs"]["content"]), "tokens")
    print("structured", chat.with_structured_output(Code, method="json_schema").invoke(QUESTION))
    print("completion", OpenAI(**{**OPTIONS, "max_tokens": 8}).invoke("the code of the"))


if __name__ == "__main__":
    main()
