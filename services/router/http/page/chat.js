// A conversation; under each answer, how it was computed.

import { events, keys, request } from "./api.js";

// Long enough that a prefill worker computes it.
const EXAMPLE =
  "the height of the box is 114. the price of the dog is 177. the weight of the fern is 613. " +
  "the age of the rose is 450. the weight of the ball is 590. the height of the banana is 265. " +
  "the number of the knife is 777. the score of the puzzle is 826. the price of the pencil is 673. " +
  "the score of the palace is 461. the price of the daisy is 703. what is the score of the palace?";

const [log, empty, example, composer, prompt, send, model, newChat] = [
  "log", "empty", "example", "composer", "prompt", "send", "model", "new-chat",
].map((id) => document.getElementById(id));

let messages = [];
let running = null; // The AbortController of the answer that is being written.

function element(name, className, text = "") {
  const made = document.createElement(name);
  made.className = className;
  made.textContent = text;
  return made;
}

/** Change the conversation; a reader at its end stays there. */
function follow(change) {
  const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
  change();
  if (isAtEnd) log.scrollTop = log.scrollHeight;
}

function addMessage(role, author, text = "") {
  const article = element("article", role);
  article.append(element("h3", "", author), element("p", "text", text));
  empty.hidden = true;
  log.append(article);
  log.scrollTop = log.scrollHeight;
  return article;
}

/** Writes one answer into the page, and measures it. */
class Answer {
  constructor(author) {
    this.article = addMessage("assistant", author);
    // A screen reader reads the answer once it is complete.
    this.article.setAttribute("aria-busy", "true");
    this.text = this.article.lastChild;
    this.start = performance.now();
  }

  add(chunk) {
    const { content, reasoning_content: reasoning } = chunk.choices[0]?.delta ?? {};
    if (content || reasoning) {
      this.last = performance.now();
      this.first ??= this.last;
      follow(() => {
        if (reasoning) this.reasoning.append(reasoning);
        if (content) this.text.append(content);
      });
    }
    this.usage = chunk.usage ?? this.usage;
  }

  get reasoning() {
    if (!this.thoughts) {
      const folded = element("details", "reasoning");
      this.thoughts = element("p", "text");
      folded.append(element("summary", "", "Reasoning"), this.thoughts);
      this.text.before(folded);
    }
    return this.thoughts;
  }

  end(problem) {
    follow(() => {
      if (problem) this.article.append(element("p", "problem", problem));
      if (this.usage) this.article.append(this.facts());
    });
    this.article.setAttribute("aria-busy", "false");
  }

  facts() {
    const { prompt_tokens: prompts, completion_tokens: tokens, prompt_tokens_details: details, work } = this.usage;
    const seconds = (this.last - this.first) / 1000;
    const facts = [
      this.first && ["ttft", `first token after ${number(this.first - this.start)} ms`],
      seconds > 0 && ["speed", `${number((tokens - 1) / seconds)} tokens/s`],
      ["tokens", counted(tokens, "token")],
      ["cached", `${number(details.cached_tokens)} of ${number(prompts)} prompt tokens cached`],
      ["shipped", `${counted(work.blocks_shipped, "block")} shipped`],
      work.blocks_pulled && ["pulled", `${counted(work.blocks_pulled, "block")} pulled`],
      work.retries && ["retries", counted(work.retries, "retry", "retries")],
      ["workers", work.workers.join(" → ")],
    ];
    const list = element("ul", "facts");
    list.append(...facts.filter(Boolean).map(([name, text]) => element("li", name, text)));
    return list;
  }
}

const number = (value) => value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 1 : 0 });
const counted = (value, one, many = `${one}s`) => `${number(value)} ${value === 1 ? one : many}`;

async function ask(text) {
  addMessage("user", "You", text);
  const answer = new Answer(model.value);
  const mine = (running = new AbortController());
  send.textContent = "Stop";
  let problem = "";
  try {
    const body = {
      model: model.value,
      messages: [...messages, { role: "user", content: text }],
      stream: true,
      stream_options: { include_usage: true },
    };
    const response = await request("/v1/chat/completions", { body, signal: mine.signal });
    for await (const chunk of events(response)) answer.add(chunk);
  } catch (error) {
    problem = mine.signal.aborted ? "Stopped." : error.message;
  }
  answer.end(problem);
  if (mine !== running) return; // A new chat has begun.
  running = null;
  send.textContent = "Send";
  const content = answer.text.textContent;
  if (content) messages.push({ role: "user", content: text }, { role: "assistant", content });
  else if (problem) prompt.value ||= text;
}

async function listModels() {
  const { data } = await (await request("/v1/models")).json();
  model.replaceChildren(...data.map(({ id }) => new Option(id)));
  model.disabled = data.length < 2;
  example.hidden = data[0].id !== "demo";
}

composer.addEventListener("submit", (event) => {
  event.preventDefault();
  const text = prompt.value.trim();
  if (running) running.abort();
  else if (text) {
    prompt.value = "";
    ask(text);
  }
});
prompt.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!running) composer.requestSubmit();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
newChat.addEventListener("click", () => {
  running?.abort();
  running = null;
  send.textContent = "Send";
  messages = [];
  empty.hidden = false;
  log.replaceChildren(empty);
  prompt.focus();
});
example.addEventListener("click", () => {
  prompt.value = EXAMPLE;
  prompt.focus();
});
keys.addEventListener("change", () => listModels().catch(() => {}));
// Without a model list the server still answers with the model that it serves, or says what is wrong.
listModels().catch(() => {});
