// The tree on the screen: of any number of rows only the visible ones are in the document, and their elements are
// reused.

import { escapeName } from "../src/errors.js";
import { afterPaint, button, h } from "./dom.js";
import { shortened, widthOf } from "./short.js";
import { firstDifference, SORTS } from "./tree.js";
import { count, nbytes, shapeText, whole } from "./wording.js";

/** Pixels, as in the style sheet. */
const ROW = 24;
/** Rows above and below the visible ones. */
const SPARE = 8;
/** Browsers have no taller elements than about 33 million pixels. */
const MOST_ROWS = 1_300_000;
/** Characters of a name; of a longer one those at its ends, and where it differs from other rows. */
const LONGEST = 300;
const NEAR = 60;

export class Rows {
  #pool = [];
  #nodes = [];
  #indents = [];
  #cursor = 0;
  /** The node of the open tensor. */
  #chosen = null;
  #typed = { text: "", at: 0 };
  #isFlat = false;
  /**
   * Pixels of the tree and of its column of names: 0 until it is laid out, and the style sheet cuts the names. They are
   * kept, since asking for them lays the page out.
   */
  #height = 0;
  #width = 0;
  /** Whether the tree was ever moved from its top. */
  #isMoved = false;
  /** Whether the first screen is still to be drawn. It has no spare rows. */
  #isFirst = true;
  #isWaiting = false;

  /**
   * Calls `open(tensor)` when a tensor is chosen, and `sort(column)` for a heading. `changeOf` returns the change of a node
   * in a comparison, which takes the column of the parameters.
   */
  constructor(tree, { open, sort, changeOf = null }) {
    this.tree = tree;
    this.open = open;
    this.changeOf = changeOf;
    const head = Object.entries(changeOf ? { ...SORTS, parameters: "Change" } : SORTS).map(([key, text]) =>
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
        class: changeOf ? "tree changes" : "tree",
        tabindex: "0",
        "aria-label": "Tensors",
        onscroll: () => {
          this.#isMoved = true;
          this.#soon();
        },
        onkeydown: (event) => this.#key(event),
        onclick: (event) => this.#click(event),
      },
      h("div", { role: "rowgroup", class: "heads" }, h("div", { role: "row", class: "row" }, head)),
      this.body,
    );
    this.names = head[0];
    this.empty = rowOf(5);
    const observer = new ResizeObserver(() => this.#resized());
    observer.observe(this.element);
    observer.observe(this.names);
  }

  show(filter) {
    // At most the height of the window, until the tree is laid out. Narrow windows begin without it.
    if (this.#isFirst && !matchMedia("(max-width: 760px)").matches) this.#height = innerHeight;
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

  /** Returns whether the tree has another size than at the last call. */
  #measure() {
    const [height, width] = [this.element.clientHeight, this.names.clientWidth];
    if (height === this.#height && width === this.#width) return false;
    [this.#height, this.#width] = [height, width];
    return true;
  }

  #resized() {
    const wasHidden = this.#height === 0;
    // The first rows are about to be drawn again.
    if (!this.#measure() || this.#isWaiting) return;
    if (wasHidden) this.#move(this.#cursor);
    else this.#draw(true);
  }

  /** Marks the node of the open tensor, puts the cursor on it, and scrolls it into view. Without one nothing is marked. */
  point(node) {
    this.#chosen = node;
    const at = this.#nodes.indexOf(node);
    if (at >= 0) this.#move(at);
    else this.#draw(true);
  }

  #soon() {
    this.#frame ??= requestAnimationFrame(() => {
      this.#frame = null;
      this.#draw(false);
    });
  }

  #frame = null;

  #draw(all) {
    // A tree that is not laid out has no visible rows.
    if (this.#height === 0) return;
    const first = this.#isMoved ? Math.max(0, Math.floor(this.element.scrollTop / ROW) - SPARE) : 0;
    const room = Math.ceil(this.#height / ROW) + (this.#isFirst ? 0 : 2 * SPARE);
    while (this.#pool.length < room) this.#pool.push(this.#row());
    const last = Math.min(this.#nodes.length, first + this.#pool.length);
    const names = this.#namesFrom(first, last);
    for (let at = first; at < first + this.#pool.length; at++) {
      const row = this.#pool[at % this.#pool.length];
      const name = names[at - first];
      if (all || row.at !== at || row.isHidden !== at >= last || row.shown !== name?.shown) {
        this.#fill(row, at, name);
      }
    }
    const active = this.#pool.find((row) => row.at === this.#cursor && !row.isHidden);
    if (active) this.element.setAttribute("aria-activedescendant", active.element.id);
    else this.element.removeAttribute("aria-activedescendant");
    if (this.#isFirst) {
      this.#isWaiting = true;
      afterPaint(() => {
        this.#isWaiting = false;
        this.#measure();
        this.#move(this.#cursor);
      });
    }
    this.#isFirst = false;
  }

  #row() {
    const element = /** @type {HTMLElement} */ (this.empty.cloneNode(true));
    element.id = `row-${this.#pool.length}`;
    this.body.append(element);
    return { element, cells: /** @type {any[]} */ ([...element.children]), at: -1, isHidden: false, shown: null };
  }

  /** Shows a node with its name; hides the row without one. */
  #fill(row, at, name) {
    [row.at, row.isHidden, row.shown] = [at, !name, name?.shown];
    row.element.hidden = row.isHidden;
    if (!name) return;
    const { tree } = this;
    const node = this.#nodes[at];
    const isModule = tree.isModule(node);
    const { element, cells } = row;
    element.style.top = `${at * ROW}px`;
    element.setAttribute("aria-rowindex", at + 2);
    element.setAttribute("aria-level", this.#indents[at] + 1);
    element.setAttribute("aria-selected", node === this.#chosen);
    if (isModule) element.setAttribute("aria-expanded", tree.expanded.has(node));
    else element.removeAttribute("aria-expanded");
    element.className = `row${isModule ? " module" : ""}${at === this.#cursor ? " cursor" : ""}`;
    const tensor = isModule ? null : tree.table.tensors[tree.tensor[node]];
    cells[0].style.setProperty("--level", this.#indents[at]);
    put(cells[0].firstChild, name.before + name.shown + name.after);
    cells[0].title = name.name;
    if (name.shown === name.name) cells[0].removeAttribute("aria-label");
    else cells[0].setAttribute("aria-label", name.before + name.name + name.after);
    const change = this.changeOf?.(node);
    put(cells[1], change ? change.text : count(tree.parameters[node]));
    cells[1].title = change ? change.text : whole(tree.parameters[node]);
    cells[1].className = change?.isDifferent ? "differ" : "";
    put(cells[2], nbytes(tree.bytes[node]));
    put(cells[3], tree.dtypeText(node));
    put(
      cells[4],
      tensor ? shapeText(tensor) : `${whole(tree.count[node])} tensor${tree.count[node] === 1 ? "" : "s"}`,
    );
  }

  /** The names of rows, and the parts of them that fit. */
  #namesFrom(first, last) {
    const labels = Array.from({ length: Math.max(0, last - first) }, (_, n) => this.#labelOf(this.#nodes[first + n]));
    const names = labels.map((label, n) => this.#nameOf(first + n, partsOf(label, labels)));
    return this.#width === 0 ? names : shortened(names);
  }

  #nameOf(at, label) {
    const { tree } = this;
    const node = this.#nodes[at];
    const isBold = tree.isModule(node);
    const members = tree.members.get(node)?.length;
    const before = isBold ? (tree.expanded.has(node) ? "▾ " : "▸ ") : "";
    const after = members ? ` ×${members}` : "";
    const indent = 6 + Math.min(14, this.#width / 20) * this.#indents[at];
    // The first rows are drawn without a measure.
    const room = this.#width === 0 ? 0 : this.#width - indent - 5 - widthOf(before + after, isBold);
    const name = escapeName(label) || "(no name)";
    return { name, shown: name, before, after, room, isBold };
  }

  #labelOf(node) {
    return this.#isFlat ? this.tree.table.tensors[this.tree.tensor[node]].name : this.tree.labels[node];
  }

  #move(at) {
    this.#cursor = Math.max(0, Math.min(at, this.#nodes.length - 1));
    const top = this.#cursor * ROW;
    const scrollTop = this.#isMoved ? this.element.scrollTop : 0;
    // The heading covers the first visible row.
    if (top < scrollTop) this.#scroll(top);
    else if (top + 2 * ROW > scrollTop + this.#height) this.#scroll(top + 2 * ROW - this.#height);
    this.#draw(true);
  }

  #scroll(top) {
    if (this.#height === 0) return;
    this.#isMoved = true;
    this.element.scrollTop = top;
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
      if (this.#typed.text === "" && /[cmor?[\]/]/.test(event.key)) return;
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

function rowOf(columns) {
  const cells = Array.from(
    { length: columns },
    (_, column) => h("span", { role: "gridcell" }, column === 0 ? h("bdi") : null),
  );
  return h("div", { role: "row", class: "row" }, cells);
}

/** A very long name, cut to its ends and to the parts near its differences from the others. */
function partsOf(name, others) {
  if (name.length <= LONGEST) return name;
  const places = others.map((other) => (other === name ? 0 : firstDifference(name, other)));
  let [text, end] = ["", 0];
  for (const place of [0, ...places, name.length].sort((a, b) => a - b)) {
    const from = Math.max(end, place - NEAR);
    text += (from > end ? "…" : "") + name.slice(from, place + NEAR);
    end = Math.max(end, place + NEAR);
  }
  return text;
}

/** Sets the text of a cell. An unchanged text stays, since the browser would lay it out again. */
function put(cell, text) {
  if (cell.textContent !== text) cell.textContent = text;
}
