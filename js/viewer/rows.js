// The tree on the screen: of any number of rows only the visible ones are in the document, and their elements are
// reused.

import { escapeName } from "../src/errors.js";
import { button, h } from "./dom.js";
import { SORTS } from "./tree.js";
import { count, nbytes, shapeText, whole } from "./wording.js";

/** Pixels, as in the style sheet. */
const ROW = 24;
/** Rows above and below the visible ones. */
const SPARE = 8;
/** Pixels of a tree that is not laid out yet. */
const LIKELY_HEIGHT = 800;
/** Browsers have no taller elements than about 33 million pixels. */
const MOST_ROWS = 1_300_000;
const LONGEST = 300;

export class Rows {
  #pool = [];
  #nodes = [];
  #indents = [];
  #cursor = 0;
  #typed = { text: "", at: 0 };
  #isLaidOut = false;
  #isFlat = false;

  /** Calls `open(tensor)` when a tensor is chosen, and `sort(column)` for a heading. */
  constructor(tree, { open, sort }) {
    this.tree = tree;
    this.open = open;
    const head = Object.entries(SORTS).map(([key, text]) =>
      h("span", {
        role: "columnheader",
        "aria-sort": tree.sort === key
          ? (key === "parameters" || key === "bytes" ? "descending" : "ascending")
          : "none",
      }, button(text, () => sort(key), { tabindex: "-1" }))
    );
    this.body = h("div", { role: "rowgroup", class: "rows" });
    this.element = h(
      "div",
      {
        role: "treegrid",
        class: "tree",
        tabindex: "0",
        "aria-label": "Tensors",
        onscroll: () => this.#soon(),
        onkeydown: (event) => this.#key(event),
        onclick: (event) => this.#click(event),
      },
      h("div", { role: "rowgroup", class: "heads" }, h("div", { role: "row", class: "row" }, head)),
      this.body,
    );
    new ResizeObserver(() => this.#resized()).observe(this.element);
  }

  show(filter) {
    const { nodes, indents } = this.tree.visible(filter);
    [this.#nodes, this.#indents, this.#isFlat] = [nodes, indents, Boolean(filter)];
    this.#cursor = Math.max(0, Math.min(this.#cursor, nodes.length - 1));
    this.element.setAttribute("aria-rowcount", nodes.length + 1);
    this.body.style.height = `${Math.min(nodes.length, MOST_ROWS) * ROW}px`;
    this.#draw(true);
  }

  get length() {
    return this.#nodes.length;
  }

  /** Before it is laid out, the visible rows are unknown. */
  #resized() {
    if (this.#isLaidOut) return this.#soon();
    this.#isLaidOut = true;
    this.#move(this.#cursor);
  }

  /** Puts the cursor on a node, and scrolls it into view. */
  point(node) {
    const at = this.#nodes.indexOf(node);
    if (at >= 0) this.#move(at);
  }

  #soon() {
    this.#frame ??= requestAnimationFrame(() => {
      this.#frame = null;
      this.#draw(false);
    });
  }

  #frame = null;

  #draw(all) {
    const first = this.#isLaidOut ? Math.max(0, Math.floor(this.element.scrollTop / ROW) - SPARE) : 0;
    const room = Math.ceil((this.#isLaidOut ? this.element.clientHeight : LIKELY_HEIGHT) / ROW) + 2 * SPARE;
    while (this.#pool.length < room) this.#pool.push(this.#row());
    const last = Math.min(this.#nodes.length, first + this.#pool.length);
    for (let at = first; at < first + this.#pool.length; at++) {
      const row = this.#pool[at % this.#pool.length];
      if (all || row.at !== at || row.isHidden !== at >= last) this.#fill(row, at, at >= last);
    }
    const active = this.#pool.find((row) => row.at === this.#cursor && !row.isHidden);
    if (active) this.element.setAttribute("aria-activedescendant", active.element.id);
    else this.element.removeAttribute("aria-activedescendant");
  }

  #row() {
    const cells = Array.from(
      { length: 5 },
      (_, column) => h("span", { role: "gridcell" }, column === 0 ? h("bdi") : null),
    );
    const element = h("div", { role: "row", class: "row", id: `row-${this.#pool.length}` }, cells);
    this.body.append(element);
    return { element, cells, at: -1, isHidden: false };
  }

  #fill(row, at, isHidden) {
    [row.at, row.isHidden] = [at, isHidden];
    row.element.hidden = isHidden;
    if (isHidden) return;
    const { tree } = this;
    const node = this.#nodes[at];
    const isModule = tree.isModule(node);
    const { element, cells } = row;
    element.style.top = `${at * ROW}px`;
    element.setAttribute("aria-rowindex", at + 2);
    element.setAttribute("aria-level", this.#indents[at] + 1);
    element.setAttribute("aria-selected", at === this.#cursor);
    if (isModule) element.setAttribute("aria-expanded", tree.expanded.has(node));
    else element.removeAttribute("aria-expanded");
    element.className = `row${isModule ? " module" : ""}${this.#isFlat ? " flat" : ""}`;
    const tensor = isModule ? null : tree.table.tensors[tree.tensor[node]];
    const members = tree.members.get(node)?.length;
    const label = this.#isFlat ? tensor.name : tree.labels[node];
    const shown = label === ""
      ? "(no name)"
      : escapeName(label.slice(0, LONGEST)) + (label.length > LONGEST ? "…" : "");
    cells[0].style.paddingInlineStart = `${6 + 14 * this.#indents[at]}px`;
    cells[0].firstChild.textContent = `${isModule ? (tree.expanded.has(node) ? "▾ " : "▸ ") : ""}${shown}${
      members ? ` ×${members}` : ""
    }`;
    cells[0].title = shown;
    cells[1].textContent = count(tree.parameters[node]);
    cells[1].title = whole(tree.parameters[node]);
    cells[2].textContent = nbytes(tree.bytes[node]);
    cells[3].textContent = tree.dtypeText(node);
    cells[4].textContent = tensor
      ? shapeText(tensor)
      : `${whole(tree.count[node])} tensor${tree.count[node] === 1 ? "" : "s"}`;
  }

  #move(at) {
    this.#cursor = Math.max(0, Math.min(at, this.#nodes.length - 1));
    const [top, { scrollTop, clientHeight }] = [this.#cursor * ROW, this.element];
    // The heading covers the first visible row.
    if (top < scrollTop) this.element.scrollTop = top;
    else if (top + 2 * ROW > scrollTop + clientHeight) this.element.scrollTop = top + 2 * ROW - clientHeight;
    this.#draw(true);
  }

  #click(event) {
    const row = this.#pool.find(({ element }) => element.contains(event.target));
    if (!row) return;
    this.#move(row.at);
    this.#enter();
  }

  #enter() {
    const node = this.#nodes[this.#cursor];
    if (node === undefined) return;
    if (this.tree.isModule(node)) this.#toggle(node, !this.tree.expanded.has(node));
    else this.open(this.tree.tensor[node]);
  }

  #toggle(node, isOpen) {
    this.tree.expanded[isOpen ? "add" : "delete"](node);
    this.show(null);
  }

  #key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const { tree } = this;
    const [at, node] = [this.#cursor, this.#nodes[this.#cursor]];
    const page = Math.max(1, Math.floor(this.element.clientHeight / ROW) - 2);
    const above = () => {
      for (let up = at - 1; up >= 0; up--) if (this.#indents[up] < this.#indents[at]) return up;
      return at;
    };
    const actions = {
      ArrowDown: () => this.#move(at + 1),
      ArrowUp: () => this.#move(at - 1),
      PageDown: () => this.#move(at + page),
      PageUp: () => this.#move(at - page),
      Home: () => this.#move(0),
      End: () => this.#move(this.#nodes.length - 1),
      Enter: () => this.#enter(),
      " ": () => this.#enter(),
      ArrowRight:
        () => (node !== undefined && tree.isModule(node) && !tree.expanded.has(node)
          ? this.#toggle(node, true)
          : this.#move(at + 1)),
      ArrowLeft:
        () => (node !== undefined && tree.expanded.has(node) ? this.#toggle(node, false) : this.#move(above())),
    };
    if (actions[event.key]) actions[event.key]();
    else if (event.key.length === 1 && /[\p{L}\p{N}_.-]/u.test(event.key)) {
      // Letters that are keys of the page are typed with Shift, or after another letter.
      if (this.#typed.text === "" && /[cm?[\]/]/.test(event.key)) return;
      this.#typeAhead(event.key);
    } else return;
    event.preventDefault();
    event.stopPropagation();
  }

  /** Goes to the next row with this beginning. */
  #typeAhead(key) {
    const now = performance.now();
    const text = (now - this.#typed.at < 700 ? this.#typed.text : "") + key.toLowerCase();
    this.#typed = { text, at: now };
    const start = text.length > 1 ? this.#cursor : this.#cursor + 1;
    for (let step = 0; step < this.#nodes.length; step++) {
      const at = (start + step) % this.#nodes.length;
      if (this.tree.labels[this.#nodes[at]].toLowerCase().startsWith(text)) return this.#move(at);
    }
  }
}
