// A list of requests, of which one can be reached by Tab and the others by arrow keys. A long one is folded: a button
// says how many more there are, and shows them.

import { copyText, setText, shortId } from "./text.js";

const NUM_FOLDED = 8; // requests that a folded list shows
const NOTE_MS = 2000; // how long a note stands in the place of an id

export class Lane {
  constructor(section, colours, describe, onHighlight) {
    this.count = section.querySelector(".count");
    this.list = section.querySelector("ul");
    this.more = section.querySelector(".more");
    this.rest = section.querySelector(".rest");
    this.colours = colours;
    this.describe = describe;
    this.onHighlight = onHighlight;
    this.requests = [];
    this.total = 0;
    this.isOpen = false;
    this.items = new Map(); // by the id of a request
    this.list.setAttribute("aria-label", section.querySelector("h4").firstChild.textContent.trim());
    this.list.addEventListener("keydown", (event) => this.#move(event));
    this.more.addEventListener("click", () => {
      this.isOpen = !this.isOpen;
      this.show(this.requests, this.total);
    });
  }

  // An engine lists the first of very many requests; `total` counts all.
  show(requests, total) {
    [this.requests, this.total] = [requests, total];
    setText(this.count, total.toLocaleString("en"));
    const shown = this.isOpen ? requests : requests.slice(0, NUM_FOLDED);
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
      setText(item.querySelector(".numbers-of"), this.describe(request, index));
      const colour = this.colours.of(request.id);
      item.querySelector(".swatch").style.background = colour ?? "";
      item.querySelector(".swatch").classList.toggle("none", colour === null);
    });
    this.#describeRest(requests.length, total);
    if (!this.list.querySelector('[tabindex="0"]')) this.list.querySelector("button")?.setAttribute("tabindex", "0");
  }

  highlight(id) {
    for (const [each, item] of this.items) item.firstElementChild.classList.toggle("shown", each === id);
  }

  #describeRest(numListed, total) {
    const numHidden = Math.max(0, numListed - NUM_FOLDED);
    const numUnlisted = Math.max(0, total - numListed);
    this.list.classList.toggle("open", this.isOpen && numHidden > 0);
    this.more.hidden = numHidden === 0;
    this.more.setAttribute("aria-expanded", String(this.isOpen));
    setText(this.more, this.isOpen ? `Show only ${NUM_FOLDED}` : `Show ${numHidden.toLocaleString("en")} more`);
    const unlisted = numUnlisted > 0 && numListed > 0 ? `${numUnlisted.toLocaleString("en")} more are open, and not listed here` : "";
    setText(this.rest, total === 0 ? "none" : unlisted);
    this.rest.hidden = this.rest.textContent === "";
  }

  #make(id) {
    const item = document.getElementById("request-template").content.cloneNode(true).firstElementChild;
    const button = item.firstElementChild;
    const name = button.querySelector(".id");
    name.textContent = shortId(id);
    button.title = `${id}: click to copy`;
    button.addEventListener("click", async () => {
      // An id that cannot be copied is shown whole, to be selected.
      name.textContent = (await copyText(id)) ? "copied" : id;
      setTimeout(() => setText(name, shortId(id)), NOTE_MS);
    });
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
