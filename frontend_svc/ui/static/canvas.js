// What charts share: sharp canvases, colours of the theme, axes, and a cursor.

const AXIS_WIDTH = 48; // of the labels beside a chart
const AXIS_HEIGHT = 16; // of those below
const HEADROOM = 6; // for the half of the uppermost label
const FONT = '11px system-ui, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", sans-serif';

// Sizes `canvas` to its width on the page and returns its context, in CSS pixels.
export function prepare(canvas, height) {
  const width = canvas.clientWidth;
  const scale = devicePixelRatio || 1;
  const [w, h] = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width };
}

// The area of a chart beside its axes, in a canvas of `width` and `height`.
export function plotArea(width, height) {
  return { left: AXIS_WIDTH, top: HEADROOM, width: width - AXIS_WIDTH, height: height - HEADROOM - AXIS_HEIGHT };
}

// Draws a line and a label for each of `rows` and a label for each of `columns`: { at, text }, `at` a share of the
// area from its lower left corner.
export function drawAxes(context, area, { rows, columns }, { line, quiet }) {
  const bottom = area.top + area.height;
  context.font = FONT;
  context.textBaseline = "middle";
  context.textAlign = "right";
  for (const { at, text } of rows) {
    const y = Math.round(bottom - at * area.height);
    context.fillStyle = line;
    context.fillRect(area.left, y, area.width, 1);
    context.fillStyle = quiet;
    context.fillText(text, area.left - 6, y);
  }
  context.textBaseline = "bottom";
  for (const { at, text } of columns) {
    context.textAlign = at === 0 ? "left" : at === 1 ? "right" : "center";
    context.fillText(text, area.left + at * area.width, bottom + AXIS_HEIGHT);
  }
}

// The custom properties of the theme as colours that a canvas knows, which light-dark() is not.
export function themeColours(...names) {
  const probe = document.createElement("i");
  document.body.append(probe);
  const colours = names.map((name) => {
    probe.style.color = `var(--${name})`;
    return getComputedStyle(probe).color;
  });
  probe.remove();
  return colours;
}

// Moves a cursor over the cells of a chart, by pointer and by arrow keys. -1 is none. What `readout` says is
// announced to screen readers where arrow keys moved the cursor, not when the chart changes.
export function addCursor(element, readout, { cellAt, numCells, numColumns, onMove }) {
  let cell = -1;
  const move = (to) => {
    cell = to;
    readout.setAttribute("aria-live", "off");
    onMove(cell);
  };
  element.addEventListener("pointermove", (event) => move(cellAt(event.offsetX, event.offsetY)));
  element.addEventListener("pointerdown", (event) => move(cellAt(event.offsetX, event.offsetY)));
  element.addEventListener("pointerleave", () => move(-1));
  element.addEventListener("focus", () => {
    if (cell < 0 && element.matches(":focus-visible") && numCells() > 0) move(0);
  });
  element.addEventListener("blur", () => move(-1));
  element.addEventListener("keydown", (event) => {
    const last = numCells() - 1;
    const to = {
      ArrowLeft: cell - 1,
      ArrowRight: cell + 1,
      ArrowUp: cell - numColumns(),
      ArrowDown: cell + numColumns(),
      Home: 0,
      End: last,
    }[event.key];
    if (event.key === "Escape") move(-1);
    if (to === undefined || last < 0) return;
    event.preventDefault();
    cell = Math.max(0, Math.min(last, to));
    readout.setAttribute("aria-live", "polite");
    onMove(cell);
  });
}
