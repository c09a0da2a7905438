// The KV blocks of an engine as squares.

import { addCursor, prepare, themeColours } from "./canvas.js";
import { setText, shortId } from "./text.js";

const MAX_HEIGHT = 176;
const MAX_SIZE = 14;
const MIN_SIZE = 4;
const MIN_SHOWN = 256; // blocks
const MAX_NAMES = 4; // of requests in one readout
const NONE = 0xffff;

export class BlockMap {
  constructor(element, readout, colours, onHighlight) {
    this.element = element;
    this.canvas = element.querySelector("canvas");
    this.readout = readout;
    this.colours = colours;
    this.onHighlight = onHighlight;
    this.requests = [];
    this.fills = []; // by request
    this.numShown = 0; // blocks from 1 on; all later ones are free
    this.highlighted = null; // the id of a request whose blocks stand out
    this.cell = -1;
    this.layout = layOut(0, 1);
    this.owners = new Uint16Array(0); // by block: the first of its requests
    this.counts = new Uint16Array(0); // by block: how many requests it has
    this.cached = new Uint8Array(0);
    this.readTheme();
    addCursor(element, readout, {
      cellAt: (x, y) => this.#cellAt(x, y),
      numCells: () => this.layout.numCells,
      numColumns: () => this.layout.columns,
      onMove: (cell) => this.#point(cell),
    });
  }

  readTheme() {
    const [text, cached, free, accent, edge] = themeColours("text", "cached", "free", "accent", "edge");
    this.theme = { text, cached, free, accent, edge };
  }

  show(engine) {
    // Ids begin at 1; block 0 is a placeholder that no request holds.
    let numIds = engine.total_blocks + 1;
    for (const request of engine.requests) for (const id of request.blocks) if (id >= numIds) numIds = id + 1;
    if (this.owners.length !== numIds) {
      this.owners = new Uint16Array(numIds);
      this.counts = new Uint16Array(numIds);
      this.cached = new Uint8Array(numIds);
    }
    this.owners.fill(NONE);
    this.counts.fill(0);
    this.cached.fill(0);
    this.requests = engine.requests;
    // Kept, as the requests of an engine that died have other colours where they run now, or none.
    this.fills = this.requests.map((request) => this.colours.of(request.id));
    this.requests.forEach((request, index) => {
      for (const id of new Set(request.blocks)) {
        if (id === 0) continue;
        if (this.counts[id] === 0) this.owners[id] = index;
        this.counts[id] += 1;
      }
    });
    for (const id of engine.cached_blocks) if (id < numIds) this.cached[id] = 1;
    // An element that is removed gets no event that the pointer has left it.
    if (!this.requests.some((request) => request.id === this.highlighted)) this.onHighlight(null);
    this.#chooseShown();
    this.#describe();
    this.draw();
    if (this.cell >= 0) this.#point(Math.min(this.cell, this.layout.numCells - 1));
  }

  highlight(id) {
    if (this.highlighted === id) return;
    this.highlighted = id;
    const request = this.requests.find((each) => each.id === id);
    setText(this.readout, request ? describeRequest(request, this.counts) : "");
    this.draw();
  }

  draw() {
    this.layout = layOut(this.numShown, this.element.clientWidth);
    const { columns, pitch, size, perCell, numCells } = this.layout;
    const rows = Math.ceil(numCells / columns);
    const { context } = prepare(this.canvas, rows * pitch);
    const blocks = this.requests.find((each) => each.id === this.highlighted)?.blocks ?? [];
    const own = blocks.length ? new Set(blocks) : null; // which stand out
    for (let cell = 0; cell < numCells; cell += 1) {
      const x = (cell % columns) * pitch;
      const y = Math.floor(cell / columns) * pitch;
      const id = this.#shownBlock(cell);
      const count = this.counts[id];
      context.globalAlpha = own === null || own.has(id) ? 1 : 0.3;
      if (count > 0) context.fillStyle = this.fills[this.owners[id]] ?? this.theme.edge;
      else context.fillStyle = this.cached[id] ? this.theme.cached : this.theme.free;
      context.fillRect(x, y, size, size);
      if (count > 1) {
        const width = size >= 8 ? 2 : 1;
        context.strokeStyle = this.theme.text;
        context.lineWidth = width;
        context.strokeRect(x + width / 2, y + width / 2, size - width, size - width);
      }
    }
    context.globalAlpha = 1;
    if (this.cell >= 0) {
      context.strokeStyle = this.theme.accent;
      context.lineWidth = 2;
      const [x, y] = [(this.cell % columns) * pitch, Math.floor(this.cell / columns) * pitch];
      context.strokeRect(x + 1, y + 1, size - 2, size - 2);
    }
    this.element.dataset.perCell = perCell;
  }

  // The block that a cell shows: of several the first with a request, else the first that is cached.
  #shownBlock(cell) {
    const first = 1 + cell * this.layout.perCell;
    const end = Math.min(first + this.layout.perCell, this.numShown + 1);
    let shown = first;
    for (let id = first; id < end; id += 1) {
      if (this.counts[id] > 0) return id;
      if (this.cached[id] && !this.cached[shown]) shown = id;
    }
    return shown;
  }

  // Most caches are larger than what is in use: then their rest is left out. Doubled, so that squares keep their
  // positions for long.
  #chooseShown() {
    const total = this.owners.length - 1;
    let last = total;
    while (last > 0 && this.counts[last] === 0 && !this.cached[last]) last -= 1;
    if (this.numShown > total) this.numShown = 0;
    while (this.numShown < Math.max(last, Math.min(MIN_SHOWN, total))) {
      this.numShown = Math.min(total, Math.max(MIN_SHOWN, 2 * this.numShown));
    }
  }

  #describe() {
    let [used, shared, cached] = [0, 0, 0];
    for (let id = 1; id < this.counts.length; id += 1) {
      if (this.counts[id] > 0) used += 1;
      else if (this.cached[id]) cached += 1;
      if (this.counts[id] > 1) shared += 1;
    }
    const total = this.counts.length - 1;
    Object.assign(this.element.dataset, { total, used, shared, cached, shown: this.numShown });
    const label = `${total} blocks: ${used} of requests, ${shared} of them shared, ${cached} cached. Arrow keys move.`;
    this.element.setAttribute("aria-label", label);
  }

  #cellAt(x, y) {
    const { columns, pitch, numCells } = this.layout;
    const column = Math.floor(x / pitch);
    const cell = Math.floor(y / pitch) * columns + column;
    return column < columns && cell >= 0 && cell < numCells ? cell : -1;
  }

  #point(cell) {
    this.cell = cell;
    if (cell < 0) {
      setText(this.readout, "");
      this.onHighlight(null);
      this.draw();
      return;
    }
    const id = this.#shownBlock(cell);
    const owners = this.requests.filter((request) => request.blocks.includes(id));
    const [first, last] = [1 + cell * this.layout.perCell, Math.min(this.numShown, (cell + 1) * this.layout.perCell)];
    const name = last > first ? `block ${id} of ${first}–${last}` : `block ${id}`;
    this.onHighlight(owners[0]?.id ?? null);
    setText(this.readout, `${name}: ${describeOwners(owners, this.cached[id])}`);
    this.draw();
  }
}

function layOut(numBlocks, width) {
  if (numBlocks < 1) return { columns: 1, pitch: 1, size: 1, perCell: 1, numCells: 0 };
  for (let size = MAX_SIZE; size >= MIN_SIZE; size -= 1) {
    const pitch = size + (size >= 8 ? 2 : 1);
    const columns = Math.max(1, Math.floor((width + 1) / pitch));
    const rows = Math.floor(MAX_HEIGHT / pitch);
    if (columns * rows >= numBlocks || size === MIN_SIZE) {
      const perCell = Math.ceil(numBlocks / (columns * rows));
      return { columns, pitch, size, perCell, numCells: Math.ceil(numBlocks / perCell) };
    }
  }
}

function describeOwners(owners, isCached) {
  if (owners.length === 0) return isCached ? "cached content, no request" : "free";
  const names = owners.slice(0, MAX_NAMES).map((request) => shortId(request.id)).join(", ");
  const more = owners.length > MAX_NAMES ? ` and ${owners.length - MAX_NAMES} more` : "";
  return owners.length > 1 ? `shared by ${owners.length}: ${names}${more}` : names;
}

function describeRequest(request, counts) {
  const blocks = request.blocks.filter((id) => id !== 0);
  const numShared = blocks.filter((id) => counts[id] > 1).length;
  const shared = numShared ? `, ${numShared} of them shared` : "";
  return `${shortId(request.id)}: ${blocks.length} blocks${blocks.length ? ` (${ranges(blocks)})` : ""}${shared}`;
}

// Block ids as ranges, at most eight of them.
function ranges(ids) {
  const sorted = [...new Set(ids)].sort((a, b) => a - b);
  const parts = [];
  for (let i = 0; i < sorted.length; ) {
    let j = i;
    while (sorted[j + 1] === sorted[j] + 1) j += 1;
    parts.push(i === j ? `${sorted[i]}` : `${sorted[i]}–${sorted[j]}`);
    i = j + 1;
  }
  return parts.length > 8 ? `${parts.slice(0, 8).join(", ")}, …` : parts.join(", ");
}
