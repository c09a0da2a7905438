// A colour for each request, the same in all engines as long as it is open.

const PALETTE = [
  "#4e79a7", "#e08a3c", "#59a14f", "#b07aa1", "#d9605f", "#4aa3a0",
  "#c2a032", "#9c755f", "#e58a98", "#6f6fb8", "#8cb369", "#a0568a",
];

export class Colours {
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

  of(id) {
    return PALETTE[this.#slots.get(id) ?? 0];
  }
}
