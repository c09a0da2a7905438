// The page: follows the frontend's state and shows it. The playground is beside it.

import { Engines } from "./engines.js";
import { History } from "./history.js";
import { Playground } from "./playground.js";
import { setText } from "./text.js";

const STATE_INTERVAL_MS = 100; // of two reads of the state
const HISTORY_INTERVAL_MS = 1000;
const LIMIT_MS = 3000; // of one read
const MAX_DELAY_MS = 5000; // of the next attempt after failures
const THEMES = ["auto", "light", "dark"];

const byId = (id) => document.getElementById(id);

function showConnection(state, text) {
  const badge = byId("connection");
  badge.dataset.state = state;
  // Screen readers announce each change.
  setText(badge, text);
}

// Reads a page of JSON again and again, one read at a time, while the tab is not hidden.
class Follower {
  constructor(path, intervalMs, onState, onFailure) {
    this.path = path;
    this.intervalMs = intervalMs;
    this.onState = onState;
    this.onFailure = onFailure;
    this.isPaused = false;
    this.isReading = false;
    this.numFailures = 0;
    this.timer = 0;
    document.addEventListener("visibilitychange", () => this.read());
  }

  pause(isPaused) {
    this.isPaused = isPaused;
    this.read();
  }

  async read() {
    clearTimeout(this.timer);
    if (this.isReading || this.isPaused || document.hidden) return;
    this.isReading = true;
    const startedAt = performance.now();
    let state = null;
    let failure = "";
    try {
      const response = await fetch(this.path, { signal: AbortSignal.timeout(LIMIT_MS) });
      if (response.ok) state = await response.json();
      else failure = `the frontend answered ${response.status}`;
    } catch (error) {
      failure = error.name === "TimeoutError" ? "the frontend does not answer" : "the frontend is not reachable";
    }
    this.isReading = false;
    let delay = Math.max(0, this.intervalMs - (performance.now() - startedAt));
    if (state === null) {
      delay = Math.min(MAX_DELAY_MS, 250 * 2 ** this.numFailures);
      this.numFailures += 1;
    } else {
      this.numFailures = 0;
    }
    this.timer = setTimeout(() => this.read(), delay);
    if (this.isPaused) return;
    if (state === null) this.onFailure(failure);
    else this.onState(state);
  }
}

function startTheme() {
  const button = byId("theme");
  let theme = "auto";
  try {
    theme = localStorage.getItem("theme") ?? "auto";
  } catch {
    // Storage may be forbidden; then the choice ends with the page.
  }
  const show = () => {
    document.documentElement.dataset.theme = theme;
    button.textContent = `Theme: ${theme}`;
    document.dispatchEvent(new Event("themechange"));
  };
  button.addEventListener("click", () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    try {
      localStorage.setItem("theme", theme);
    } catch {
      // As above.
    }
    show();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
  show();
}

function start() {
  const engines = new Engines(byId("engine-list"));
  const playground = new Playground();
  startTheme();

  const history = new History();
  const states = new Follower(
    "/ui/state",
    STATE_INTERVAL_MS,
    (state) => {
      showConnection("live", "live");
      setText(byId("version"), state.version);
      for (const name of ["open", "queued", "held"]) setText(byId(name), state.frontend[name]);
      setText(byId("coordinator"), state.coordinator.connected ? "connected" : "not connected");
      byId("no-engines").hidden = engines.show(state) > 0;
      playground.setModels([...new Set(state.engines.map((engine) => engine.model).filter(Boolean))]);
    },
    (failure) => {
      showConnection("unreachable", failure);
      engines.fade();
    },
  );
  // Of a failure the state says enough.
  const samples = new Follower("/ui/history", HISTORY_INTERVAL_MS, (content) => history.show(content), () => {});
  byId("pause").addEventListener("click", (event) => {
    const isPaused = event.target.getAttribute("aria-pressed") !== "true";
    event.target.setAttribute("aria-pressed", String(isPaused));
    event.target.textContent = isPaused ? "Continue" : "Pause";
    if (isPaused) showConnection("paused", "paused");
    for (const follower of [states, samples]) follower.pause(isPaused);
  });
  for (const follower of [states, samples]) follower.read();
}

start();
