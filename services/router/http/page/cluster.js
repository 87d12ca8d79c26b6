// A live picture of the cluster: the router, the workers with their blocks, and the blocks that travel.

import { keys, request } from "./api.js";

const POLL_MS = 300;
const FAILED_POLL_MS = 2000;
const TRAVEL_MS = 900;
const MAX_DOTS = 12; // for each pair of workers and poll
const WIDTH = 400;
const CARD = { width: 156, height: 86, gap: 14 };
const COLUMNS = { prefill: 2, decode: WIDTH - CARD.width - 2 };
const TOP = 92;
const GRID = { columns: 16, rows: 4, step: 9, size: 7 };

const picture = document.querySelector("#picture");
const summary = document.querySelector("#summary");
const shipped = document.querySelector("#shipped");
const note = document.querySelector("#cluster-note");
const isStill = matchMedia("(prefers-reduced-motion: reduce)");
const [cards, edges] = [new Map(), new Map()];

function draw(name, attributes, parent) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  parent.append(made);
  return made;
}

function write(text, attributes, parent) {
  draw("text", attributes, parent).textContent = text;
  return parent.lastChild;
}

const lines = draw("g", {}, picture);
for (const x of Object.values(COLUMNS).map((left) => left + CARD.width / 2)) {
  draw("path", { class: "line", d: `M${WIDTH / 2} 42C${WIDTH / 2} 66 ${x} 42 ${x} 66` }, lines);
}
const router = draw("g", { class: "router" }, picture);
draw("rect", { x: 132, y: 4, width: 136, height: 38, rx: 19 }, router);
write("router", { x: 200, y: 20, class: "name" }, router);
const routerLoad = write("", { x: 200, y: 34, class: "small" }, router);
for (const [role, left] of Object.entries(COLUMNS)) {
  write(role, { x: left + CARD.width / 2, y: 82, class: "heading" }, picture);
}

const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const requests = (count) => (count === 1 ? "1 request" : `${count} requests`);

/** Return how many cells show each state; a state that some block has gets one at least. */
function shares({ used, cached, free }) {
  const cells = GRID.columns * GRID.rows;
  const total = Math.max(1, used + cached + free);
  const share = (count) => Math.min(cells - 1, Math.max(count ? 1 : 0, Math.round((cells * count) / total)));
  const ofUsed = free || cached ? share(used) : cells;
  return [ofUsed, Math.min(cells - ofUsed, free ? share(cached) : cells)];
}

/** A worker with a grid of its blocks. */
class Card {
  constructor(worker) {
    this.group = draw("g", { class: "worker", "data-label": worker.label }, picture);
    draw("rect", { class: "card", width: CARD.width, height: CARD.height, rx: 9 }, this.group);
    write(worker.label, { x: 9, y: 19, class: "name" }, this.group);
    this.state = write("", { x: CARD.width - 9, y: 19, class: "state small" }, this.group);
    const cells = draw("g", { transform: "translate(7 28)" }, this.group);
    const { columns, rows, step, size } = GRID;
    this.cells = Array.from({ length: columns * rows }, (_, at) =>
      draw("rect", {
        x: step * (at % columns), y: step * Math.floor(at / columns), width: size, height: size, rx: 1.5,
      }, cells));
    this.counts = ["used", "cached", "free"].map((state, at) =>
      write("", { x: 9 + 50 * at, y: 79, class: `count ${state}` }, this.group));
  }

  update(worker, x, y) {
    [this.x, this.y] = [x, y];
    this.group.style.transform = `translate(${x}px, ${y}px)`;
    this.group.classList.toggle("silent", worker.state !== "serving");
    this.state.textContent = worker.requests === undefined || worker.state === "waiting" ? worker.state : requests(worker.requests);
    if (!worker.blocks) return;
    const [used, cached] = shares(worker.blocks);
    this.cells.forEach((cell, at) => {
      cell.setAttribute("class", at < used ? "used" : at < used + cached ? "cached" : "free");
    });
    this.counts.forEach((text) => {
      text.textContent = compact.format(worker.blocks[text.classList[1]]);
    });
  }

  leave() {
    const fade = this.group.animate([{ opacity: 1 }, { opacity: 0 }], isStill.matches ? 0 : 500);
    fade.onfinish = () => this.group.remove();
  }
}

/** The way of blocks from a prefill worker to a decode worker. */
class Edge {
  constructor(push) {
    this.path = draw("path", { class: "line" }, lines);
    this.blocks = push.blocks;
  }

  update(push, source, target) {
    const [x1, y1] = [source.x + CARD.width, source.y + CARD.height / 2];
    const [x2, y2] = [target.x, target.y + CARD.height / 2];
    const middle = (x1 + x2) / 2;
    this.path.setAttribute("d", `M${x1} ${y1}C${middle} ${y1} ${middle} ${y2} ${x2} ${y2}`);
    const blocks = push.blocks - this.blocks;
    this.blocks = push.blocks;
    this.path.classList.toggle("busy", blocks > 0 || push.running > 0);
    if (isStill.matches) return;
    const dots = Math.min(MAX_DOTS, Math.max(blocks, push.running));
    for (let at = 0; at < dots; at += 1) this.send((POLL_MS * at) / dots);
  }

  send(delay) {
    const length = this.path.getTotalLength();
    const steps = Array.from({ length: 13 }, (_, at) => {
      const { x, y } = this.path.getPointAtLength((length * at) / 12);
      return { transform: `translate(${x}px, ${y}px)` };
    });
    const dot = draw("rect", { class: "dot", x: -3.5, y: -3.5, width: 7, height: 7, rx: 1.5 }, picture);
    const travel = dot.animate(steps, { duration: TRAVEL_MS, delay, easing: "ease-in-out", fill: "backwards" });
    travel.onfinish = () => dot.remove();
  }
}

function tell(text) {
  if (note.textContent !== text) note.textContent = text;
}

function show({ workers, pushes, requests: running }) {
  routerLoad.textContent = requests(running);
  const labels = new Set(workers.map(({ label }) => label));
  const left = [...cards.keys()].filter((label) => !labels.has(label));
  const joined = cards.size ? [...labels].filter((label) => !cards.has(label)) : [];
  for (const label of left) {
    cards.get(label).leave();
    cards.delete(label);
  }
  const columns = Object.keys(COLUMNS).map((role) => workers.filter((worker) => worker.role === role));
  const rows = Math.max(...columns.map((column) => column.length));
  for (const column of columns) {
    column.forEach((worker, row) => {
      if (!cards.has(worker.label)) cards.set(worker.label, new Card(worker));
      const free = rows - column.length;
      cards.get(worker.label).update(
        worker, COLUMNS[worker.role], TOP + (row + free / 2) * (CARD.height + CARD.gap),
      );
    });
  }
  picture.setAttribute("viewBox", `0 0 ${WIDTH} ${TOP + rows * (CARD.height + CARD.gap)}`);
  showPushes(pushes);
  summary.replaceChildren(...workers.map(describe));
  if (left.length) tell(`${left.join(", ")} left.`);
  else if (joined.length) tell(`${joined.join(", ")} joined.`);
  else if (!workers.length) tell("No worker has joined yet.");
}

function showPushes(pushes) {
  const present = new Set();
  for (const push of pushes) {
    const name = `${push.source} ${push.target}`;
    present.add(name);
    // Blocks that were sent before the page was opened travel no more.
    if (!edges.has(name)) edges.set(name, new Edge(edges.size || seen ? { blocks: 0 } : push));
    edges.get(name).update(push, cards.get(push.source), cards.get(push.target));
  }
  seen = true;
  for (const [name, edge] of edges) {
    if (present.has(name)) continue;
    edge.path.remove();
    edges.delete(name);
  }
  const total = pushes.reduce((sum, push) => sum + push.blocks, 0);
  shipped.textContent = `${compact.format(total)} ${total === 1 ? "block" : "blocks"} shipped`;
}
let seen = false;

function describe({ label, role, state, blocks }) {
  const item = document.createElement("li");
  const counts = blocks ? `${blocks.used} blocks used, ${blocks.cached} cached, ${blocks.free} free` : "no answer";
  item.textContent = `${label}: ${role}, ${state}, ${counts}`;
  return item;
}

const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
const event = (target, name) => new Promise((resolve) => target.addEventListener(name, resolve, { once: true }));

while (true) {
  if (document.hidden) await event(document, "visibilitychange");
  try {
    show(await (await request("/v1/cluster")).json());
    await pause(POLL_MS);
  } catch (error) {
    if (error.status === 401) {
      tell("The picture needs an API key.");
      await event(keys, "change");
      tell("");
    } else {
      tell(error.status ? error.message : "The router does not answer.");
      await pause(FAILED_POLL_MS);
    }
  }
}
