// Tokens of the last steps of an engine as bars, the newest at the right. A prompt has a hundred times the tokens of
// a step without one, hence the logarithms.

import { addCursor, drawAxes, plotArea, prepare, themeColours } from "./canvas.js";
import { counted, setText } from "./text.js";

const MAX_STEPS = 120;
const HEIGHT = 96;
const MIN_TOP = 10; // tokens, so that few of them do not fill the chart

export class StepChart {
  constructor(element, readout, scale) {
    this.element = element;
    this.canvas = element.querySelector("canvas");
    this.readout = readout;
    this.scale = scale;
    this.steps = [];
    this.cell = -1;
    this.readTheme();
    addCursor(element, readout, {
      cellAt: (x) => this.#cellAt(x),
      numCells: () => this.steps.length,
      numColumns: () => 10,
      onMove: (cell) => {
        this.cell = cell;
        this.draw();
      },
    });
  }

  readTheme() {
    const [accent, text, line, quiet] = themeColours("accent", "text", "line", "quiet");
    this.theme = { accent, text, line, quiet };
  }

  show(steps) {
    this.steps = steps.slice(-MAX_STEPS);
    this.draw();
  }

  draw() {
    const { context, width } = prepare(this.canvas, HEIGHT);
    const area = plotArea(width, HEIGHT);
    const most = Math.max(0, ...this.steps.map((step) => step.num_tokens));
    const numPowers = Math.ceil(Math.log10(Math.max(MIN_TOP, most)));
    const share = (tokens) => Math.log10(1 + tokens) / Math.log10(1 + 10 ** numPowers);
    const ticks = Array.from({ length: numPowers + 1 }, (_, power) => 10 ** power);
    const rows = [0, ...ticks].map((tokens) => ({ at: share(tokens), text: tokens.toLocaleString("en") }));
    const columns = [{ at: 0, text: `${MAX_STEPS} steps ago` }, { at: 1, text: "newest step" }];
    drawAxes(context, area, { rows, columns }, this.theme);
    const pitch = area.width / MAX_STEPS;
    this.steps.forEach((step, index) => {
      const height = Math.max(1, area.height * share(step.num_tokens));
      context.fillStyle = index === this.cell ? this.theme.text : this.theme.accent;
      const x = width - (this.steps.length - index) * pitch;
      context.fillRect(x, area.top + area.height - height, Math.max(1, pitch - 1), height);
    });
    this.element.dataset.numSteps = this.steps.length;
    const summary = this.steps.length ? `at most ${counted(most, "token")}` : "no step yet";
    setText(this.scale, summary);
    this.element.setAttribute("aria-label", `Tokens per step: ${summary}. Arrow keys move.`);
    const step = this.steps[this.cell] ?? this.steps.at(-1);
    const text = step ? `step ${step.step.toLocaleString("en")}: ${counted(step.num_tokens, "token")} of ${counted(step.num_requests, "request")} in ${step.duration_ms.toFixed(1)} ms` : "";
    setText(this.readout, text);
  }

  #cellAt(x) {
    const width = this.element.clientWidth;
    const cell = this.steps.length - 1 - Math.floor((width - x) / (plotArea(width, HEIGHT).width / MAX_STEPS));
    return cell >= 0 && cell < this.steps.length ? cell : -1;
  }
}
