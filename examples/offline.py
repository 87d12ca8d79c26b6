"""The engine in a script, without servers: a batch, samples, beams, a chat, and what the cache saved."""

from __future__ import annotations

from quire.llm import LLM, BeamSearchParams, SamplingParams

NOTES = "the code of the lantern is 417. the age of the cat is 900. "


def main() -> None:
    with LLM() as llm:
        # Many prompts run together; a progress bar on stderr shows how fast.
        prompts = [f"{NOTES}what is the code of the", f"{NOTES}what is the age of the", "the"]
        for output in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12)):
            answer = output.outputs[0]
            print(f"{output.prompt!r} → {answer.text!r} ({answer.finish_reason})")

        # Several samples of one prompt. The prompt is computed once, and its blocks are shared.
        params = SamplingParams(n=4, temperature=1.2, seed=7, max_tokens=16, stop=".", logprobs=0)
        [output] = llm.generate("the height of the", params, use_tqdm=False)
        for answer in output.outputs:
            print(f"sample {answer.index}: {answer.text!r}, logprob {answer.cumulative_logprob:.2f}")

        # The most probable answers, the best first.
        beams = BeamSearchParams(beam_width=3, max_tokens=8)
        [output] = llm.beam_search("the price of the", beams, use_tqdm=False)
        print("beams:", [answer.text for answer in output.outputs])

        # A conversation. The blocks that the earlier turn computed are found in the prefix cache.
        messages = [{"role": "user", "content": NOTES + "what is the code of the lantern?"}]
        for question in ("what is the age of the cat?", None):
            [output] = llm.chat(messages, SamplingParams(temperature=0, max_tokens=32), use_tqdm=False)
            print(f"{output.outputs[0].text} ({output.num_cached_tokens} prompt tokens were cached)")
            if question is not None:
                messages += [
                    {"role": "assistant", "content": output.outputs[0].text},
                    {"role": "user", "content": question},
                ]

        # A value that can never be served is refused before anything runs, and the error names it.
        try:
            llm.generate("the " * 10_000)
        except ValueError as error:
            print(f"refused: {error}")

        print(llm.stats())


if __name__ == "__main__":
    main()
