// Tokens of the last steps of an engine as bars, the newest at the right. A prompt has a hundred times the tokens of
// a step without one, hence the square roots.

import { addCursor, prepare, themeColours } from "./canvas.js";
import { counted, setText } from "./text.js";

const MAX_STEPS = 120;
const HEIGHT = 56;
const MIN_TOP = 16; // tokens, so that few of them do not fill the chart

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
    const [accent, text, line] = themeColours("accent", "text", "line");
    this.theme = { accent, text, line };
  }

  show(steps) {
    this.steps = steps.slice(-MAX_STEPS);
    this.draw();
  }

  draw() {
    const { context, width } = prepare(this.canvas, HEIGHT);
    const most = Math.max(0, ...this.steps.map((step) => step.num_tokens));
    const top = Math.max(MIN_TOP, most);
    const pitch = width / MAX_STEPS;
    context.fillStyle = this.theme.line;
    context.fillRect(0, HEIGHT - 1, width, 1);
    this.steps.forEach((step, index) => {
      const height = Math.max(1, (HEIGHT - 2) * Math.sqrt(step.num_tokens / top));
      context.fillStyle = index === this.cell ? this.theme.text : this.theme.accent;
      context.fillRect(width - (this.steps.length - index) * pitch, HEIGHT - 1 - height, Math.max(1, pitch - 1), height);
    });
    this.element.dataset.numSteps = this.steps.length;
    const summary = this.steps.length ? `last ${this.steps.length} steps, at most ${counted(most, "token")} (square-root scale)` : "no step yet";
    setText(this.scale, summary);
    this.element.setAttribute("aria-label", `Tokens per step: ${summary}. Arrow keys move.`);
    const step = this.steps[this.cell] ?? this.steps.at(-1);
    const text = step ? `step ${step.step}: ${counted(step.num_tokens, "token")} of ${counted(step.num_requests, "request")} in ${step.duration_ms.toFixed(1)} ms` : "";
    setText(this.readout, text);
  }

  #cellAt(x) {
    const width = this.element.clientWidth;
    const cell = this.steps.length - 1 - Math.floor((width - x) / (width / MAX_STEPS));
    return cell >= 0 && cell < this.steps.length ? cell : -1;
  }
}
