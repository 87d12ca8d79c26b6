// Requests to the server that sent this page, with the API key if there is one.

const field = document.querySelector("#key");
const form = document.querySelector("#key-form");
const button = document.querySelector("#key-button");
const STORED = "quire-api-key";

/** Dispatches "change" when the user has given another key. */
export const keys = new EventTarget();

export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

function showKeyForm(isShown) {
  form.hidden = !isShown;
  button.setAttribute("aria-expanded", String(isShown));
  if (isShown) field.focus();
}

button.addEventListener("click", () => showKeyForm(form.hidden));
form.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  showKeyForm(false);
  button.focus();
});
form.addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(STORED, field.value.trim());
  showKeyForm(false);
  button.focus();
  keys.dispatchEvent(new Event("change"));
});
field.value = sessionStorage.getItem(STORED) ?? "";

/** Return the response to a request; with a body it is a POST. Without a valid key, ask for one. */
export async function request(path, { body, signal } = {}) {
  const key = sessionStorage.getItem(STORED);
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  if (body) headers["content-type"] = "application/json";
  const response = await fetch(path, {
    method: body ? "POST" : "GET",
    headers,
    body: body && JSON.stringify(body),
    signal,
  });
  if (response.ok) return response;
  if (response.status === 401 && form.hidden) showKeyForm(true);
  const problem = await response.json().catch(() => null);
  throw new ApiError(problem?.error?.message ?? `The server answered ${response.status}.`, response.status);
}

/** Yield the data of each event of a stream. */
export async function* events(response) {
  let rest = "";
  for await (const text of pieces(response.body.pipeThrough(new TextDecoderStream()))) {
    const lines = (rest + text).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
      const data = JSON.parse(line.slice("data: ".length));
      if (data.error) throw new ApiError(data.error.message);
      yield data;
    }
  }
}

// Safari's streams have no asynchronous iterator.
async function* pieces(stream) {
  const reader = stream.getReader();
  for (let next = await reader.read(); !next.done; next = await reader.read()) yield next.value;
}
