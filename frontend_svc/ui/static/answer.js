// An answer token by token: how long each took, and what the model could have chosen instead.

import { prepare, themeColours } from "./canvas.js";

const MAX_TOKENS = 4096; // shown; later ones are counted
const MAX_BARS = 256;
const PACES = [2, 4, 8]; // times the median
const MIN_SLOW_MS = 10; // what is faster is not slow, whatever the median
const GAPS_HEIGHT = 48;

const byId = (id) => document.getElementById(id);

export class Answer {
  constructor() {
    this.element = byId("answer");
    this.gaps = byId("gaps");
    this.detail = byId("token");
    this.hint = this.detail.firstElementChild;
    this.theme = themeColours("accent", "text");
    this.clear();
    this.element.addEventListener("focusin", (event) => this.#select(event.target));
    this.element.addEventListener("pointerover", (event) => this.#select(event.target));
    this.element.addEventListener("pointerdown", (event) => this.#select(event.target));
    this.element.addEventListener("keydown", (event) => this.#move(event));
    this.gaps.addEventListener("pointermove", (event) => this.#select(this.#tokenAt(event.offsetX)?.element));
    this.element.addEventListener("scroll", () => {
      const { scrollHeight, scrollTop, clientHeight } = this.element;
      this.isAtEnd = scrollHeight - scrollTop - clientHeight < 30;
    });
    document.addEventListener("themechange", () => {
      this.theme = themeColours("accent", "text");
      this.draw();
    });
    addEventListener("resize", () => this.draw());
  }

  clear() {
    this.tokens = []; // { element, atMs, gapMs, entries, isJoined }, the last: to the message before
    this.numTokens = 0;
    this.median = 0;
    this.selected = null;
    this.isDrawing = false;
    this.isAtEnd = true; // of what can be scrolled, and to be kept there
    this.element.replaceChildren();
    this.detail.replaceChildren(this.hint);
  }

  // A delta of the stream; `text` is what it adds to the answer.
  add(atMs, text, delta, isReasoning) {
    const entries = entriesOf(delta);
    this.numTokens += entries.length;
    const texts = entries.map((entry) => entry.text);
    // Text that may begin a stop string or a tool call is held back: then it is not that of the tokens.
    const parts = texts.length > 1 && texts.join("") === text ? entries.map((entry) => [entry.text, [entry]]) : [[text, entries]];
    parts.forEach(([part, its], index) => {
      if (this.tokens.length < MAX_TOKENS) this.#append(atMs, part, its, isReasoning, index > 0);
    });
    if (this.tokens.length % 16 === 0) this.#pace(false);
    this.#drawSoon();
  }

  finish() {
    this.#pace(true);
    this.draw();
  }

  get isWhole() {
    return this.tokens.length < MAX_TOKENS;
  }

  // The times of the tokens, in milliseconds; gaps are those between two of them.
  times() {
    const gaps = this.#gapsSorted();
    const [first, last] = [this.tokens[0]?.atMs, this.tokens.at(-1)?.atMs];
    return { first, last, median: gaps[gaps.length >> 1], most: gaps.at(-1) };
  }

  draw() {
    this.isDrawing = false;
    if (this.element.offsetParent === null) return;
    const { context, width } = prepare(this.gaps, GAPS_HEIGHT);
    const shown = this.tokens.slice(-MAX_BARS);
    const most = Math.max(1, ...shown.slice(1).map((token) => token.gapMs));
    const pitch = this.#pitch(width);
    const [accent, text] = this.theme;
    shown.forEach((token, index) => {
      // The first one of all has the time to the first token, which is another scale.
      if (token === this.tokens[0]) return;
      const height = Math.max(1, (GAPS_HEIGHT * token.gapMs) / most);
      context.fillStyle = token.element === this.selected ? text : accent;
      context.fillRect(index * pitch, GAPS_HEIGHT - height, Math.max(1, pitch - 1), height);
    });
    this.gaps.setAttribute("aria-label", `Time before each token: at most ${most.toFixed(1)} ms`);
  }

  #append(atMs, text, entries, isReasoning, isJoined) {
    const element = document.createElement("span");
    element.role = "option";
    element.tabIndex = this.tokens.length === 0 ? 0 : -1;
    element.textContent = text || "·";
    if (!text) element.className = "mark";
    if (isReasoning) element.classList.add("reasoning");
    const gapMs = atMs - (this.tokens.at(-1)?.atMs ?? 0);
    element.dataset.index = this.tokens.length;
    element.dataset.gapMs = gapMs.toFixed(2);
    this.tokens.push({ element, atMs, gapMs, entries, isJoined });
    this.element.append(element);
    this.#mark(this.tokens.at(-1), this.tokens.length - 1);
  }

  #gapsSorted() {
    return this.tokens.slice(1).filter((token) => !token.isJoined).map((token) => token.gapMs).sort((a, b) => a - b);
  }

  #pace(isWhole) {
    const gaps = this.#gapsSorted();
    this.median = gaps[gaps.length >> 1] ?? 0;
    if (isWhole) this.tokens.forEach((token, index) => this.#mark(token, index));
  }

  #mark(token, index) {
    const isSlow = index > 0 && this.median > 0 && token.gapMs >= MIN_SLOW_MS;
    const pace = isSlow ? PACES.filter((factor) => token.gapMs > factor * this.median).length : 0;
    for (let each = 1; each <= PACES.length; each += 1) token.element.classList.toggle(`pace-${each}`, each === pace);
  }

  #drawSoon() {
    if (this.isDrawing) return;
    this.isDrawing = true;
    requestAnimationFrame(() => {
      this.draw();
      if (this.isAtEnd) this.element.scrollTop = this.element.scrollHeight;
    });
  }

  #pitch(width) {
    return Math.min(12, width / Math.max(1, Math.min(MAX_BARS, this.tokens.length)));
  }

  #tokenAt(x) {
    const shown = this.tokens.slice(-MAX_BARS);
    return shown[Math.floor(x / this.#pitch(this.gaps.clientWidth))];
  }

  #select(element) {
    const token = this.tokens[element?.dataset?.index];
    if (!token || token.element === this.selected) return;
    this.selected?.classList.remove("shown");
    this.selected?.setAttribute("aria-selected", "false");
    this.selected = token.element;
    token.element.classList.add("shown");
    token.element.setAttribute("aria-selected", "true");
    this.detail.replaceChildren(...describe(token, Number(element.dataset.index)));
    this.#drawSoon();
  }

  #move(event) {
    const last = this.tokens.length - 1;
    const index = Number(document.activeElement.dataset.index ?? -1);
    const to = { ArrowRight: index + 1, ArrowDown: index + 1, ArrowLeft: index - 1, ArrowUp: index - 1, Home: 0, End: last }[event.key];
    const next = this.tokens[to];
    if (index < 0 || !next) return;
    event.preventDefault();
    this.tokens[index].element.tabIndex = -1;
    next.element.tabIndex = 0;
    next.element.focus();
  }
}

// The tokens of a delta: id, text, log probability, rank, and the most likely ones at their positions.
function entriesOf(delta) {
  const logprobs = delta.logprobs;
  return (delta.token_ids ?? []).map((id, index) => ({
    id,
    text: logprobs?.texts?.[index],
    logprob: logprobs?.logprobs?.[index],
    rank: logprobs?.ranks?.[index],
    top: logprobs?.top?.[index],
  }));
}

function describe(token, index) {
  const later = token.isJoined ? "in one message with the one before" : `${token.gapMs.toFixed(1)} ms after the one before`;
  const since = index === 0 ? "the first token" : later;
  const nodes = [paragraph(`Token ${index + 1}: ${since}, ${token.atMs.toFixed(1)} ms after the request.`)];
  for (const entry of token.entries) {
    const parts = [`id ${entry.id}`];
    if (entry.text !== undefined) parts.push(JSON.stringify(entry.text));
    if (typeof entry.logprob === "number") parts.push(`log probability ${entry.logprob.toFixed(3)} (${percent(entry.logprob)})`);
    if (entry.rank) parts.push(`rank ${entry.rank}`);
    nodes.push(paragraph(parts.join(" · ")));
    if (entry.top?.token_ids?.length) nodes.push(alternatives(entry));
  }
  return nodes;
}

function alternatives(entry) {
  const table = document.createElement("table");
  entry.top.token_ids.forEach((id, index) => {
    const logprob = entry.top.logprobs[index];
    const row = table.insertRow();
    if (id === entry.id) row.className = "chosen";
    row.insertCell().textContent = JSON.stringify(entry.top.texts?.[index] ?? `#${id}`);
    const number = row.insertCell();
    number.className = "number";
    number.textContent = percent(logprob);
    const bar = row.insertCell();
    bar.className = "bar";
    const fill = document.createElement("div");
    fill.className = "fill";
    fill.style.width = `${Math.max(0, 100 * Math.exp(logprob)) || 0}%`;
    bar.append(fill);
  });
  return table;
}

function paragraph(text) {
  const element = document.createElement("p");
  element.textContent = text;
  return element;
}

const percent = (logprob) => (typeof logprob === "number" ? `${(100 * Math.exp(logprob)).toFixed(1)} %` : "–");
