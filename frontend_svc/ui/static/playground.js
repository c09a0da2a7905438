// The playground: one request at a time, through the same path as a request over gRPC.

import { Answer } from "./answer.js";
import { EXAMPLES, FieldError, NUMBERS, TEXTS, makeRequest, writeCommand } from "./request.js";
import { copyText, counted } from "./text.js";

const MAX_TURNS = 64; // of a conversation
const MAX_LINE = 4 * 1024 * 1024;
const NUM_TRACES = 32; // of the last requests, among which that of the playground is
const MAX_ROWS = 32; // of a waterfall
// Fields of a request that have another name in the form.
const FIELDS = { structured_output: "schema", json_schema: "schema", messages: "prompt" };

const byId = (id) => document.getElementById(id);

export class Playground {
  constructor() {
    this.answer = new Answer();
    this.turns = []; // of the conversation: { role, text }
    this.sent = null; // the turn of the request that runs
    this.isLastShown = false; // of the turns: by `answer`, token by token
    this.abort = null; // of the request that runs
    this.about = { address: location.host, http_address: "", has_tls: false, needs_key: false };
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
    byId("stop-button").addEventListener("click", () => this.abort?.abort());
    byId("new-chat").addEventListener("click", () => {
      this.turns = [];
      this.#clear();
      this.#changed();
    });
    for (const button of document.querySelectorAll(".example")) {
      button.addEventListener("click", () => {
        byId(button.dataset.for).value = EXAMPLES[button.dataset.for];
        this.#changed();
      });
    }
    byId("copy-kind").addEventListener("change", () => this.#changed());
    byId("copy-button").addEventListener("click", () => this.#copy());
    this.#clear();
    this.#readAbout();
    this.#changed();
  }

  setModels(models) {
    const key = models.join("\n");
    if (key === this.models) return;
    this.models = key;
    byId("model").replaceChildren(...models.map((name) => new Option(name, name)));
    this.#changed();
  }

  get kind() {
    return new FormData(this.form).get("kind");
  }

  async #readAbout() {
    try {
      const response = await fetch("/ui/about");
      if (response.ok) this.about = await response.json();
    } catch {
      return; // The page says already that the frontend is not reachable.
    }
    for (const name of ["address", "http_address"]) {
      this.about[name] = this.about[name].replace(/^(0\.0\.0\.0|\[::\])(?=:)/, location.hostname);
    }
    if (!this.about.http_address) {
      for (const option of byId("copy-kind").options) option.disabled = option.value.startsWith("openai-");
      if (byId("copy-kind").value.startsWith("openai-")) byId("copy-kind").value = "grpc-buf";
    }
    this.#changed();
  }

  #fields() {
    return Object.fromEntries(["model", ...TEXTS, ...NUMBERS].map((name) => [name, byId(name).value]));
  }

  #changed() {
    const isChat = this.kind === "chat";
    byId("system-field").hidden = byId("tools-field").hidden = byId("more-tools").hidden = !isChat;
    byId("new-chat").hidden = !isChat || this.turns.length === 0;
    byId("prompt-label").textContent = isChat ? "Message" : "Prompt";
    const numSet = ["stop", "schema", ...(isChat ? ["tools"] : [])].filter((name) => byId(name).value.trim()).length;
    byId("more-set").textContent = numSet ? `${numSet} set` : "";
    this.#showTurns(isChat);
    byId("command").textContent = this.#command();
    byId("copied").textContent = "";
  }

  // The conversation, without the answer that is shown token by token.
  #showTurns(isChat) {
    const turns = isChat ? [...(this.isLastShown ? this.turns.slice(0, -1) : this.turns), ...(this.sent ? [this.sent] : [])] : [];
    byId("turns").replaceChildren(...turns.map(turnElement));
    byId("turns").hidden = turns.length === 0;
    byId("answer-name").hidden = turns.length === 0;
    byId("result").classList.toggle("without-answer", this.started === null);
    byId("result").hidden = turns.length === 0 && this.started === null;
  }

  #command() {
    let [fields, turns] = [this.#fields(), this.turns];
    // Between two messages: of the last one.
    if (this.kind === "chat" && fields.prompt === "" && turns.length) {
      [fields, turns] = [{ ...fields, prompt: turns.at(-2).text }, turns.slice(0, -2)];
    }
    try {
      return writeCommand(byId("copy-kind").value, this.kind, fields, turns, this.about);
    } catch (error) {
      if (!(error instanceof FieldError)) throw error;
      return `# ${error.message}`;
    }
  }

  async #send() {
    if (this.abort) return;
    this.#showError(null);
    if (this.kind === "chat" && this.turns.length >= MAX_TURNS) {
      this.#showError({ message: `The conversation has ${MAX_TURNS} messages, which is the most here: begin a new one.` });
      return;
    }
    const [kind, text] = [this.kind, byId("prompt").value];
    let request;
    try {
      request = makeRequest(kind, this.#fields(), this.turns);
    } catch (error) {
      if (!(error instanceof FieldError)) throw error;
      this.#showError({ message: error.message, fields: [error.field] });
      byId(error.field).focus();
      return;
    }
    this.abort = new AbortController();
    byId("send").disabled = true;
    byId("stop-button").disabled = false;
    this.#clear();
    this.sent = kind === "chat" ? { role: "USER", text } : null;
    this.#showTurns(kind === "chat");
    byId("progress").textContent = "waits for the first token";
    // Screen readers announce the end, not each token.
    byId("progress").setAttribute("aria-busy", "true");
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
    if (document.activeElement === byId("stop-button")) byId("send").focus();
    byId("stop-button").disabled = true;
    byId("progress").textContent = `${outcome}: ${this.#counted()}`;
    byId("progress").setAttribute("aria-busy", "false");
    this.answer.finish();
    this.#summarize();
    if (this.started) this.#drawWaterfall(this.started.request_id);
    // After a call the conversation does not go on, as nothing here runs tools.
    if (kind === "chat" && this.content && this.calls.length === 0) {
      this.turns.push({ role: "USER", text }, { role: "ASSISTANT", text: this.content });
      this.isLastShown = true;
      this.sent = null;
      byId("prompt").value = "";
    }
    if (this.started === null) this.sent = null;
    this.#changed();
  }

  // Forgets the answer that is shown, but not what it is of the conversation.
  #clear() {
    this.answer.clear();
    this.started = null;
    this.finished = null;
    this.sent = null;
    this.isLastShown = false;
    this.content = "";
    this.calls = []; // of tools, by index: { name, arguments }
    byId("calls").hidden = true;
    byId("summary").replaceChildren();
    byId("waterfall").replaceChildren();
    byId("progress").textContent = "";
  }

  // Shows a line of the stream. Returns how the answer ended, if it did.
  #take({ at_ms: atMs, response, error }) {
    if (error) {
      this.#showError(error);
      return "failed";
    }
    if (response.started) {
      this.started = response.started;
      this.#showTurns(this.kind === "chat");
    } else if (response.delta) {
      const { text = "", content = "", reasoning = "", tool_calls: calls = [] } = response.delta;
      calls.forEach((call) => this.#takeCall(call));
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

  #takeCall({ index = 0, name = "", arguments_json: text = "" }) {
    const call = (this.calls[index] ??= { name: "", arguments: "" });
    call.name += name;
    call.arguments += text;
    byId("calls").textContent = `calls ${this.calls.map((each) => `${each.name}(${each.arguments})`).join(", ")}`;
    byId("calls").hidden = false;
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
    const wrong = new Set(fields.flatMap((field) => field.split(/[.[]/)).map((name) => FIELDS[name] ?? name));
    for (const name of ["model", ...TEXTS, ...NUMBERS]) {
      const isWrong = wrong.has(name);
      if (isWrong && byId("more").contains(byId(name))) byId("more").open = true;
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
    if (await copyText(command.textContent)) {
      byId("copied").textContent = "copied";
    } else {
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
  name.className = "speaker";
  name.textContent = turn.role === "USER" ? "you" : "model";
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
