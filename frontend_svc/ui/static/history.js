// The last five minutes as plots: tokens per second, requests, time to the first token, use of the KV cache.

import { addCursor, drawAxes, plotArea, prepare, themeColours } from "./canvas.js";
import { percent, setText } from "./text.js";

const MIN_LABELLED_WIDTH = 180; // of a plot with a label for each minute
const GAP_MS = 3500; // between samples that are not connected: the frontend was stopped
const PLOTS = [
  { name: "throughput", series: [{ column: "tokens_per_s", label: "tokens/s" }], minTop: 10, format: whole },
  { name: "requests", series: [{ column: "running", label: "running" }, { column: "waiting", label: "waiting" }], minTop: 4, format: whole },
  {
    name: "first-token",
    series: [{ column: "first_token_p50_ms", label: "p50" }, { column: "first_token_p95_ms", label: "p95" }],
    minTop: 10,
    format: duration,
  },
  { name: "kv", series: [{ column: "kv_use", label: "in use" }], minTop: 1, format: percent },
];

export class History {
  constructor() {
    this.plots = PLOTS.map((plot) => new Plot(document.querySelector(`figure[data-plot="${plot.name}"]`), plot));
    document.addEventListener("themechange", () => this.#draw(true));
    addEventListener("resize", () => this.#draw(false));
  }

  // The JSON of /ui/history.
  show(content) {
    for (const plot of this.plots) plot.show(content);
  }

  #draw(isThemeNew) {
    for (const plot of this.plots) {
      if (isThemeNew) plot.readTheme();
      plot.draw();
    }
  }
}

class Plot {
  constructor(figure, { series, minTop, format }) {
    this.element = figure.querySelector(".plot");
    this.canvas = figure.querySelector("canvas");
    this.values = [...figure.querySelectorAll("b")];
    this.readout = figure.querySelector("output");
    this.title = figure.querySelector(".title").textContent;
    this.series = series;
    this.minTop = minTop;
    this.format = format;
    this.ages = [];
    this.columns = series.map(() => []);
    this.spanMs = 1;
    this.cell = -1;
    this.readTheme();
    addCursor(this.element, this.readout, {
      cellAt: (x) => this.#cellAt(x),
      numCells: () => this.ages.length,
      numColumns: () => 10,
      onMove: (cell) => {
        this.cell = cell;
        this.draw();
      },
    });
  }

  readTheme() {
    const [first, second, text, line, quiet] = themeColours("accent", "second", "text", "line", "quiet");
    this.theme = { lines: [first, second], text, line, quiet };
  }

  show(content) {
    this.spanMs = content.span_ms;
    this.ages = content.age_ms;
    this.columns = this.series.map(({ column }) => content[column]);
    this.element.dataset.spanMs = this.spanMs;
    this.element.dataset.numSamples = this.ages.length;
    this.draw();
  }

  draw() {
    const { context, width } = prepare(this.canvas, this.element.clientHeight);
    const area = plotArea(width, this.element.clientHeight);
    const top = niceAbove(Math.max(this.minTop, ...this.columns.flat()));
    const rows = [0, 0.5, 1].map((at) => ({ at, text: this.format(at * top) }));
    const minutes = this.spanMs / 60000;
    const inner = area.width < MIN_LABELLED_WIDTH ? [] : Array.from({ length: Math.max(0, Math.ceil(minutes) - 1) }, (_, index) => index + 1);
    const columns = inner.map((ago) => ({ at: 1 - ago / minutes, text: `−${ago}` }));
    drawAxes(context, area, { rows, columns: [{ at: 0, text: `−${minutes} min` }, ...columns, { at: 1, text: "now" }] }, this.theme);
    // The second is drawn first: where both have a value, the first one matters more.
    for (let index = this.columns.length - 1; index >= 0; index -= 1) this.#drawLine(context, area, top, index);
    if (this.cell >= 0 && this.cell < this.ages.length) {
      context.fillStyle = this.theme.text;
      context.fillRect(Math.round(this.#x(area, this.cell)), area.top, 1, area.height);
    }
    this.#describe();
  }

  #drawLine(context, area, top, index) {
    const column = this.columns[index];
    const y = (value) => area.top + area.height * (1 - value / top);
    context.strokeStyle = context.fillStyle = this.theme.lines[index];
    context.lineWidth = 1.5;
    context.lineJoin = "round";
    for (const [from, to] of this.#runs(column)) {
      context.beginPath();
      for (let cell = from; cell <= to; cell += 1) context.lineTo(this.#x(area, cell), y(column[cell]));
      // A value that stands alone has no line.
      if (from === to) context.fillRect(this.#x(area, from) - 1, y(column[from]) - 1, 2, 2);
      else context.stroke();
      if (index > 0 || from === to) continue;
      context.lineTo(this.#x(area, to), area.top + area.height);
      context.lineTo(this.#x(area, from), area.top + area.height);
      context.globalAlpha = 0.12;
      context.fill();
      context.globalAlpha = 1;
    }
  }

  // First and last sample of each part of a column that is a line.
  #runs(column) {
    const runs = [];
    column.forEach((value, cell) => {
      if (value === null) return;
      const isNext = cell > 0 && column[cell - 1] !== null && this.ages[cell - 1] - this.ages[cell] < GAP_MS;
      if (isNext) runs.at(-1)[1] = cell;
      else runs.push([cell, cell]);
    });
    return runs;
  }

  #describe() {
    const text = (value) => (value === null || value === undefined ? "–" : this.format(value));
    this.columns.forEach((column, index) => setText(this.values[index], text(column.at(-1))));
    const now = this.series.map(({ label }, index) => `${label} ${text(this.columns[index].at(-1))}`).join(", ");
    this.element.setAttribute("aria-label", `${this.title}, the last ${this.spanMs / 60000} minutes; now: ${now}. Arrow keys move.`);
    const isPointed = this.cell >= 0 && this.cell < this.ages.length;
    const values = this.series.map(({ label }, index) => `${label} ${text(this.columns[index][this.cell])}`).join(", ");
    setText(this.readout, isPointed ? `${ago(this.ages[this.cell])}: ${values}` : "");
  }

  #x(area, cell) {
    return area.left + area.width * (1 - this.ages[cell] / this.spanMs);
  }

  // The sample that is nearest to a position.
  #cellAt(x) {
    const area = plotArea(this.element.clientWidth, this.element.clientHeight);
    let nearest = -1;
    for (let cell = 0; cell < this.ages.length; cell += 1) {
      if (nearest < 0 || Math.abs(this.#x(area, cell) - x) < Math.abs(this.#x(area, nearest) - x)) nearest = cell;
    }
    return nearest;
  }
}

// The least of 1, 2, 4, 10, 20, 40, ... that is not below `value`: their halves are short numbers, too.
function niceAbove(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 10].map((factor) => factor * power).find((each) => each >= value * 0.9999);
}

function whole(count) {
  return Math.round(count).toLocaleString("en");
}

function duration(ms) {
  if (ms >= 1000) return `${Number((ms / 1000).toFixed(ms < 10000 ? 1 : 0))} s`;
  return `${Number(ms.toFixed(ms < 10 ? 1 : 0))} ms`;
}

function ago(ageMs) {
  const seconds = Math.round(ageMs / 1000);
  const minutes = Math.floor(seconds / 60);
  return `${minutes ? `${minutes} min ` : ""}${seconds % 60} s ago`;
}
