// A card for each engine: its numbers, blocks, requests and steps.

import { BlockMap } from "./blocks.js";
import { Lane } from "./lane.js";
import { StepChart } from "./steps.js";
import { counted, percent, setText } from "./text.js";

const SILENT_MS = 3000; // without a message of an engine that should send ten a second
const GONE_MS = 30000; // an engine that is not listed any more is shown for so long
const MAX_CARDS = 64;
const RATE_MS = 3000; // tokens per second are measured over so long
const PALETTE = [
  "#4e79a7", "#e08a3c", "#59a14f", "#b07aa1", "#d9605f", "#4aa3a0",
  "#c2a032", "#9c755f", "#e58a98", "#6f6fb8", "#8cb369", "#a0568a",
  "#8fb9dd", "#f0b678", "#7fcf93", "#d3addf", "#f0a49c", "#86cdc6",
  "#ddc66e", "#c7a58c",
];
const LAST = "Below is what it did last.";
const DEAD = {
  dead: `No connection to this engine: it died, or cannot be reached. ${LAST}`,
  closed: `This engine was removed. ${LAST}`,
  gone: `This engine is not known any more. ${LAST}`,
};
// What a request waits for, by the name of the blocker; features have further ones.
const BLOCKERS = {
  free_blocks: "KV blocks",
  max_num_seqs: "a slot in the batch",
  max_num_batched_tokens: "a step with room for its tokens",
  paused: "the engine, which is paused",
  wave: "the next wave",
  grammar: "its grammar",
  input: "its input",
};
const NOTICES = {
  reconnecting: "The connection to this engine broke; the frontend connects again.",
  connecting: "The frontend connects to this engine.",
  loading: "This engine loads its model.",
  draining: "This engine finishes its requests and takes no new ones.",
};

export class Engines {
  constructor(list) {
    this.list = list;
    this.colours = new Colours();
    this.cards = new Map();
    document.addEventListener("themechange", () => this.#redraw(true));
    addEventListener("resize", () => this.#redraw(false));
  }

  // Returns how many engines are shown.
  show(state) {
    this.list.classList.remove("stale");
    this.colours.keep(state.engines.flatMap((engine) => engine.requests.filter(isRunning).map((request) => request.id)));
    state.engines.slice(0, MAX_CARDS).forEach((engine, index) => {
      let card = this.cards.get(engine.address);
      if (!card) {
        card = new EngineCard(engine.address, engine.name, this.colours);
        this.cards.set(engine.address, card);
      }
      // Moved only where the order changed: an element that is moved loses the focus.
      if (this.list.children[index] !== card.element) this.list.insertBefore(card.element, this.list.children[index] ?? null);
      card.show(engine, state.at_ms);
    });
    const listed = new Set(state.engines.map((engine) => engine.address));
    for (const [address, card] of this.cards) {
      if (listed.has(address)) continue;
      if (state.at_ms - card.seenAt > GONE_MS || this.cards.size > MAX_CARDS) {
        card.element.remove();
        this.cards.delete(address);
      } else {
        card.setState("gone", null);
      }
    }
    return this.cards.size;
  }

  // What is shown is not followed any more.
  fade() {
    this.list.classList.add("stale");
  }

  #redraw(isThemeNew) {
    for (const card of this.cards.values()) card.redraw(isThemeNew);
  }
}

// A colour for each running request, the same in all engines. Others hold no blocks, and have none.
class Colours {
  #slots = new Map();

  // Gives colours to `ids`, the rarest first, and forgets all other requests.
  keep(ids) {
    const open = new Set(ids);
    for (const id of this.#slots.keys()) if (!open.has(id)) this.#slots.delete(id);
    const uses = new Array(PALETTE.length).fill(0);
    for (const slot of this.#slots.values()) uses[slot] += 1;
    for (const id of open) {
      if (this.#slots.has(id)) continue;
      const slot = uses.indexOf(Math.min(...uses));
      this.#slots.set(id, slot);
      uses[slot] += 1;
    }
  }

  // null: it has none.
  of(id) {
    return PALETTE[this.#slots.get(id)] ?? null;
  }
}

class EngineCard {
  constructor(address, name, colours) {
    const fragment = document.getElementById("engine-template").content.cloneNode(true);
    this.element = fragment.querySelector(".engine");
    this.find = (selector) => this.element.querySelector(selector);
    this.find(".name").textContent = name;
    this.find(".name").title = address;
    this.element.dataset.address = address;
    this.element.setAttribute("aria-label", `Engine ${name}`);
    this.seenAt = 0;
    this.wasReady = false;
    this.samples = []; // of the totals of tokens
    const highlight = (id) => {
      this.blocks.highlight(id);
      this.running.highlight(id);
      this.waiting.highlight(id);
    };
    this.blocks = new BlockMap(this.find(".map"), this.find(".readout"), colours, highlight);
    this.running = new Lane(this.find(".running"), colours, describeRunning, highlight);
    this.waiting = new Lane(this.find(".waiting"), colours, describeWaiting, highlight);
    this.steps = new StepChart(this.find(".steps"), this.find(".step-readout"), this.find(".step-scale"));
  }

  show(engine, atMs) {
    this.seenAt = atMs;
    if (engine.state === "ready") this.wasReady = true;
    if (engine.state === "loading") this.wasReady = false;
    // The attempts to connect again alternate between the two.
    const isDead = engine.state === "down" || (engine.state === "connecting" && this.wasReady);
    this.setState(isDead ? "dead" : engine.state, engine.age_ms);
    // What an engine did last stays, instead of the nothing that is known of it now.
    if (this.wasReady && (isDead || (engine.state === "reconnecting" && engine.age_ms === null))) return;
    const used = engine.total_blocks - engine.free_blocks;
    const set = (selector, value) => setText(this.find(selector), value);
    set(".model", engine.model);
    set(".kv-use", engine.total_blocks ? percent(used / engine.total_blocks) : "–");
    set(".pins", `${counted(engine.pinned_blocks, "block")} by ${counted(engine.pins, "pin")}`);
    this.find(".pins-fact").hidden = !engine.pins;
    set(".hit-rate", engine.prefix_hit_rate === null ? "–" : percent(engine.prefix_hit_rate));
    set(".preemptions", engine.preemptions);
    set(".rank", engine.rank ?? "");
    set(".wave", engine.wave ?? "");
    this.find(".rank-fact").hidden = engine.rank === null;
    this.find(".wave-fact").hidden = engine.wave === null;
    const [outputRate, promptRate] = this.#rates(engine, atMs);
    set(".output-rate", outputRate);
    set(".prompt-rate", promptRate);
    this.running.show(engine.requests.filter(isRunning), engine.running);
    this.waiting.show(engine.requests.filter((request) => !isRunning(request)), engine.waiting);
    this.blocks.show(engine);
    const [inUse, total, rest] = [used, engine.total_blocks, engine.total_blocks - this.blocks.numShown].map((count) => count.toLocaleString("en"));
    const unseen = this.blocks.numShown < engine.total_blocks ? `; ${rest} more are free, and not drawn` : "";
    set(".scale", engine.total_blocks ? `${inUse} of ${total} in use${unseen}` : "");
    this.steps.show(engine.steps);
  }

  setState(state, ageMs) {
    const isSilent = state === "ready" && ageMs !== null && ageMs > SILENT_MS;
    const shown = isSilent ? "silent" : state;
    const badge = this.find(".state");
    badge.dataset.state = shown;
    setText(badge, shown);
    this.element.dataset.state = shown;
    this.element.classList.toggle("dead", state in DEAD);
    const notice = this.find(".notice");
    const text = isSilent ? "No message of this engine for some seconds." : (DEAD[state] ?? NOTICES[state] ?? "");
    notice.classList.toggle("mild", !(state in DEAD));
    notice.hidden = text === "";
    setText(notice, text);
  }

  redraw(isThemeNew) {
    if (isThemeNew) {
      this.blocks.readTheme();
      this.steps.readTheme();
    }
    this.blocks.draw();
    this.steps.draw();
  }

  #rates(engine, atMs) {
    const { generated_tokens: generated, prompt_tokens: prompt, engine_id: id } = engine;
    const last = this.samples.at(-1);
    // Another process under the same address counts from 0.
    if (last && (last.id !== id || last.generated > generated)) this.samples = [];
    this.samples.push({ atMs, id, generated, prompt });
    while (this.samples.length > 2 && atMs - this.samples[1].atMs >= RATE_MS) this.samples.shift();
    const first = this.samples[0];
    const seconds = (atMs - first.atMs) / 1000;
    if (seconds <= 0) return ["–", "–"];
    return [generated - first.generated, prompt - first.prompt].map((count) => Math.round(count / seconds).toLocaleString("en"));
  }
}

const isRunning = (request) => request.status === "RUNNING";

function describeRunning(request) {
  const preempted = request.num_preemptions ? `, preempted ${request.num_preemptions}×` : "";
  const [computed, prompt, output] = [request.num_computed_tokens, request.num_prompt_tokens, request.num_output_tokens].map((count) => count.toLocaleString("en"));
  const isPrefill = request.num_computed_tokens < request.num_prompt_tokens;
  return `${isPrefill ? `${computed}/` : ""}${prompt} prompt, ${output} output${preempted}`;
}

function describeWaiting(request, index) {
  const preempted = request.num_preemptions ? `preempted ${request.num_preemptions}×, ` : "";
  const blockers = request.blockers.map((name) => BLOCKERS[name] ?? name.replaceAll("_", " "));
  if (blockers.length) return `${preempted}waits for ${blockers.join(", ")}`;
  return `${preempted}${request.status === "BLOCKED" ? "blocked" : `number ${index + 1} in the queue`}`;
}
