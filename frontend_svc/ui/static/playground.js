// The playground: one request at a time, through the same path as a request over gRPC.

import { Answer } from "./answer.js";
import { NUMBERS, makeRequest, writeCommand } from "./request.js";
import { counted } from "./text.js";

const MAX_TURNS = 64; // of a conversation
const MAX_LINE = 4 * 1024 * 1024;
const NUM_TRACES = 32; // of the last requests, among which that of the playground is
const MAX_ROWS = 32; // of a waterfall

const byId = (id) => document.getElementById(id);

export class Playground {
  constructor() {
    this.answer = new Answer();
    this.turns = []; // of the conversation: { role, text }
    this.abort = null; // of the request that runs
    this.address = location.host;
    this.models = "";
    this.form = byId("form");
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    this.form.addEventListener("input", () => this.#changed());
    byId("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.#send();
    });
    byId("stop").addEventListener("click", () => this.abort?.abort());
    byId("new-chat").addEventListener("click", () => {
      this.turns = [];
      this.#changed();
    });
    byId("copy-kind").addEventListener("change", () => this.#changed());
    byId("copy-button").addEventListener("click", () => this.#copy());
    this.#readAddress();
    this.#changed();
  }

  setModels(models) {
    const key = models.join("\n");
    if (key === this.models) return;
    this.models = key;
    byId("model").replaceChildren(...models.map((name) => new Option(name, name)));
    byId("model-field").hidden = models.length < 2;
    this.#changed();
  }

  get kind() {
    return new FormData(this.form).get("kind");
  }

  async #readAddress() {
    try {
      const response = await fetch("/ui/about");
      if (response.ok) this.address = (await response.json()).address;
    } catch {
      return; // The page says already that the frontend is not reachable.
    }
    this.address = this.address.replace(/^(0\.0\.0\.0|\[::\])(?=:)/, location.hostname);
    this.#changed();
  }

  #request() {
    const names = ["prompt", "system", ...NUMBERS];
    const fields = Object.fromEntries(names.map((name) => [name, byId(name).value]));
    if (!byId("model-field").hidden) fields.model = byId("model").value;
    return makeRequest(this.kind, fields, this.turns);
  }

  #changed() {
    const isChat = this.kind === "chat";
    byId("system-field").hidden = !isChat;
    byId("new-chat").hidden = !isChat || this.turns.length === 0;
    byId("prompt-label").textContent = isChat ? "Message" : "Prompt";
    byId("turns").hidden = !isChat || this.turns.length === 0;
    byId("turns").replaceChildren(...this.turns.map(turnElement));
    byId("turns").scrollTop = byId("turns").scrollHeight;
    byId("command").textContent = writeCommand(byId("copy-kind").value, this.kind, this.#request(), this.address);
    byId("copied").textContent = "";
  }

  async #send() {
    if (this.abort) return;
    this.#showError(null);
    if (this.kind === "chat" && this.turns.length >= MAX_TURNS) {
      this.#showError({ message: `The conversation has ${MAX_TURNS} messages, which is the most here: begin a new one.` });
      return;
    }
    const [kind, request, text] = [this.kind, this.#request(), byId("prompt").value];
    this.abort = new AbortController();
    byId("send").disabled = true;
    byId("stop").disabled = false;
    this.#begin();
    let outcome = "the answer broke off: the connection to the frontend ended";
    try {
      const response = await fetch(`/ui/${kind}`, {
        method: "POST",
        headers: { "content-type": "application/json" },
        body: JSON.stringify(request),
        signal: this.abort.signal,
      });
      if (!response.ok) throw new Error((await response.text()).trim());
      for await (const line of linesOf(response.body)) {
        const end = this.#take(line);
        if (end) outcome = end;
      }
      if (outcome.startsWith("the answer broke off")) this.#showError({ message: outcome });
    } catch (error) {
      outcome = this.abort.signal.aborted ? "stopped" : "failed";
      if (outcome === "failed") this.#showError({ message: error instanceof TypeError ? "The frontend is not reachable." : error.message });
    }
    this.abort = null;
    byId("send").disabled = false;
    // A disabled button loses the focus.
    if (document.activeElement === byId("stop")) byId("send").focus();
    byId("stop").disabled = true;
    byId("progress").textContent = `${outcome}: ${this.#counted()}`;
    byId("progress").setAttribute("aria-busy", "false");
    this.answer.finish();
    this.#summarize();
    if (this.started) this.#drawWaterfall(this.started.request_id);
    if (kind === "chat" && this.content) {
      this.turns.push({ role: "USER", text }, { role: "ASSISTANT", text: this.content });
      byId("prompt").value = "";
    }
    this.#changed();
  }

  #begin() {
    this.answer.clear();
    this.started = null;
    this.finished = null;
    this.content = "";
    byId("summary").replaceChildren();
    byId("waterfall").replaceChildren();
    byId("result").hidden = true;
    byId("progress").textContent = "waits for the first token";
    // Screen readers announce the end, not each token.
    byId("progress").setAttribute("aria-busy", "true");
  }

  // Shows a line of the stream. Returns how the answer ended, if it did.
  #take({ at_ms: atMs, response, error }) {
    if (error) {
      this.#showError(error);
      return "failed";
    }
    if (response.started) {
      this.started = response.started;
      byId("result").hidden = false;
    } else if (response.delta) {
      const { text = "", content = "", reasoning = "", tool_calls: calls = [] } = response.delta;
      const called = calls.map((call) => `${call.name ?? ""}${call.arguments_json ?? ""}`).join("");
      this.content += text + content;
      this.answer.add(atMs, text + reasoning + content + called, response.delta, reasoning !== "");
      byId("progress").textContent = this.#counted();
    } else if (response.finished) {
      this.finished = response.finished;
      const reason = response.finished.reason.replace("FINISH_REASON_", "").toLowerCase();
      if (response.finished.error_message) this.#showError({ message: response.finished.error_message });
      return reason;
    }
    return "";
  }

  #counted() {
    const { numTokens, isWhole } = this.answer;
    return `${counted(numTokens, "token")}${isWhole ? "" : ", the last of which are not shown"}`;
  }

  #showError(error) {
    const box = byId("error");
    box.hidden = error === null;
    const fields = error?.fields ?? [];
    const code = error?.code ? `${error.code}: ` : "";
    const retry = error?.retry_after_ms === undefined ? "" : ` Try again in ${error.retry_after_ms} ms.`;
    box.textContent = error === null ? "" : `${code}${error.message}${retry}`;
    for (const name of [...NUMBERS, "prompt"]) {
      const isWrong = fields.some((field) => field.split(/[.[]/).includes(name));
      byId(name).setAttribute("aria-invalid", String(isWrong));
      if (isWrong) byId(name).setAttribute("aria-describedby", "error");
      else byId(name).removeAttribute("aria-describedby");
    }
  }

  #summarize() {
    const { first, last, median, most } = this.answer.times();
    if (first === undefined) return;
    const facts = { "first token": `${first.toFixed(1)} ms` };
    if (median !== undefined) {
      facts["between tokens"] = `${median.toFixed(1)} ms`;
      facts.slowest = `${most.toFixed(1)} ms`;
      if (last > first) facts["tokens/s"] = ((1000 * (this.answer.numTokens - 1)) / (last - first)).toFixed(1);
    }
    const usage = this.finished?.usage;
    if (usage) {
      facts.prompt = `${usage.num_prompt_tokens ?? 0} (${usage.num_cached_tokens ?? 0} cached)`;
      facts.output = usage.num_completion_tokens ?? 0;
    }
    const stats = this.finished?.stats;
    if (stats?.num_preemptions) facts.preemptions = stats.num_preemptions;
    if (stats?.num_migrations) facts.moves = stats.num_migrations;
    byId("summary").replaceChildren(...Object.entries(facts).map(([name, value]) => fact(name, value)));
  }

  // The request's trace, which the frontend keeps of the last requests: where it spent its time.
  async #drawWaterfall(requestId) {
    try {
      const response = await fetch(`/traces/last?n=${NUM_TRACES}`);
      const { traces } = await response.json();
      const trace = traces.find((each) => each.spans[0].attributes["triptych.request_id"] === requestId);
      if (trace && requestId === this.started?.request_id) byId("waterfall").replaceChildren(...rowsOf(trace));
    } catch {
      // The page says already that the frontend is not reachable.
    }
  }

  async #copy() {
    const command = byId("command");
    try {
      await navigator.clipboard.writeText(command.textContent);
      byId("copied").textContent = "copied";
    } catch {
      // Without TLS only pages of this machine may write to the clipboard.
      getSelection().selectAllChildren(command);
      command.focus();
      byId("copied").textContent = "selected; copy it by the keyboard";
    }
  }
}

async function* linesOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  while (true) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    if (rest.length > MAX_LINE) throw new Error(`a line of the answer is longer than ${MAX_LINE} characters`);
    for (const line of lines) yield JSON.parse(line);
  }
}

function turnElement(turn) {
  const element = document.createElement("p");
  const name = document.createElement("b");
  name.textContent = turn.role === "USER" ? "you " : "model ";
  element.append(name, turn.text);
  return element;
}

function fact(name, value) {
  const element = document.createElement("div");
  const [term, description] = [document.createElement("dt"), document.createElement("dd")];
  term.textContent = name;
  description.textContent = value;
  element.append(term, description);
  return element;
}

// A row for each span, of the same scale; the ends of long traces are left out.
function rowsOf(trace) {
  const [root, ...spans] = trace.spans;
  const total = Math.max(0.001, ...trace.spans.map((span) => span.start_ms + span.duration_ms));
  const rows = [root, ...spans.sort((a, b) => a.start_ms - b.start_ms)].slice(0, MAX_ROWS);
  return rows.map((span, index) => {
    const engine = span.attributes["triptych.engine"];
    const name = index === 0 ? "request" : span.name;
    return row(name, engine ?? "", (100 * span.start_ms) / total, (100 * span.duration_ms) / total, `${span.duration_ms.toFixed(1)} ms`);
  });
}

function row(name, title, left, width, text) {
  const element = document.createElement("div");
  element.className = "row";
  const [label, track, bar, number] = ["span", "div", "i", "span"].map((tag) => document.createElement(tag));
  label.textContent = name;
  element.title = title;
  track.className = "track";
  number.className = "number";
  number.textContent = text;
  bar.style.left = `${left}%`;
  bar.style.width = `${width}%`;
  track.append(bar);
  element.append(label, track, number);
  return element;
}
