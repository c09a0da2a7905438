// A list of requests, of which one can be reached by Tab and the others by arrow keys.

import { setText } from "./text.js";

const MAX_SHOWN = 32;

export class Lane {
  constructor(section, colours, describe, onHighlight) {
    this.count = section.querySelector(".count");
    this.list = section.querySelector("ul");
    this.more = section.querySelector(".more");
    this.colours = colours;
    this.describe = describe;
    this.onHighlight = onHighlight;
    this.items = new Map(); // by the id of a request
    this.list.setAttribute("aria-label", section.querySelector("h4").firstChild.textContent.trim());
    this.list.addEventListener("keydown", (event) => this.#move(event));
  }

  show(requests, total) {
    setText(this.count, total);
    const shown = requests.slice(0, MAX_SHOWN);
    const open = new Set(shown.map((request) => request.id));
    for (const [id, item] of this.items) {
      if (open.has(id)) continue;
      if (item.contains(document.activeElement)) this.onHighlight(null);
      item.remove();
      this.items.delete(id);
    }
    shown.forEach((request, index) => {
      let item = this.items.get(request.id);
      if (!item) {
        item = this.#make(request.id);
        this.items.set(request.id, item);
      }
      // Moved only where the order changed: an element that is moved loses the focus.
      if (this.list.children[index] !== item) this.list.insertBefore(item, this.list.children[index] ?? null);
      const text = this.describe(request, index);
      setText(item.querySelector(".numbers-of"), text);
      item.querySelector(".swatch").style.background = this.colours.of(request.id);
    });
    const hidden = total - shown.length;
    const text = total === 0 ? "none" : hidden > 0 ? `and ${hidden} more` : "";
    setText(this.more, text);
    this.more.hidden = text === "";
    if (!this.list.querySelector('[tabindex="0"]')) this.list.querySelector("button")?.setAttribute("tabindex", "0");
  }

  highlight(id) {
    for (const [each, item] of this.items) item.firstElementChild.classList.toggle("shown", each === id);
  }

  #make(id) {
    const item = document.getElementById("request-template").content.cloneNode(true).firstElementChild;
    const button = item.firstElementChild;
    const name = button.querySelector(".id");
    name.textContent = id;
    name.title = id;
    button.addEventListener("focus", () => this.onHighlight(id));
    button.addEventListener("blur", () => this.onHighlight(null));
    button.addEventListener("pointerenter", () => this.onHighlight(id));
    button.addEventListener("pointerleave", () => this.onHighlight(null));
    return item;
  }

  #move(event) {
    const buttons = [...this.list.querySelectorAll("button")];
    const index = buttons.indexOf(document.activeElement);
    const to = { ArrowDown: index + 1, ArrowUp: index - 1, Home: 0, End: buttons.length - 1 }[event.key];
    const next = buttons[to];
    if (index < 0 || !next) return;
    event.preventDefault();
    buttons[index].setAttribute("tabindex", "-1");
    next.setAttribute("tabindex", "0");
    next.focus();
  }
}
