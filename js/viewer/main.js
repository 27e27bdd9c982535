// The page: the open models, the screen of the current address, and the keys.

import { escapeName } from "../src/errors.js";
import { Comparison } from "./compare.js";
import { fromAddress, fromFiles, fromReport, fromServer, listServed } from "./doors.js";
import { afterPaint, button, card, h } from "./dom.js";
import { listenForDrops } from "./drops.js";
import { isAbort, runIsolated } from "./jobs.js";
import { fileMap } from "./map.js";
import { meantOf } from "./meant.js";
import { overview } from "./overview.js";
import { choose, panes, toggle } from "./panes.js";
import { Rows } from "./rows.js";
import { State } from "./state.js";
import { tensorScreen } from "./tensor.js";
import { filterOf, Tree } from "./tree.js";
import { many, nameOf, whole } from "./wording.js";

const KEYS = {
  "/": "filter the tensors",
  "[": "previous tensor",
  "]": "next tensor",
  o: "overview",
  m: "file map",
  c: "comparison",
  r: "quantised weights as stored, or dequantised",
  Esc: "cancel what runs, leave the filter, or close “Open…”",
  "?": "these keys",
  "Arrows, Home, End": "move in the tree; letters go to the next row that begins so",
  Enter: "open a module or a tensor",
};
/** Keys that scroll the screen, by parts of its height, when nothing has the focus. */
const SCROLLS = { PageDown: 0.9, PageUp: -0.9, " ": 0.9, ArrowDown: 0.1, ArrowUp: -0.1, End: 1e6, Home: -1e6 };
const FIRST_ROWS = 60;
/** Milliseconds until the page shows that a model is loading. Earlier, it would only be laid out and painted twice. */
const PATIENCE = 200;
/** Milliseconds that regular expressions of a filter may take. */
const LONGEST_SEARCH = 5000;
const RECENT = "ingot-recent";

class Page {
  constructor(state, token) {
    this.state = state;
    this.token = token;
    /** The model, and the one that it is compared with. */
    this.tables = [null, null];
    this.controller = new AbortController();
    this.screen = h("main", { tabindex: "-1", id: "screen" });
    this.filter = h("input", {
      type: "search",
      placeholder: "name, /regex/, dtype:BF16, size:>10MB",
      "aria-label": "Filter the tensors",
      oninput: () => this.state.set({ find: this.filter.value || null }, true),
    });
    this.status = h("p", { class: "status", role: "status" });
    const wide = h("input", { type: "checkbox", onchange: () => this.side.classList.toggle("wide", wide.checked) });
    this.side = h(
      "aside",
      { id: "side", "aria-label": "Tensors", hidden: true },
      this.filter,
      h("label", { class: "narrow" }, wide, " All columns"),
      this.status,
    );
    this.panes = panes(this.side, this.screen);
    this.toggle = toggle(this.panes);
    this.nav = h("nav", { "aria-label": "Screens" });
    this.shell = [
      h("header", {}, h("h1", {}, "ingot"), this.nav),
      this.panes,
    ];
    /** Whether the door is shown in place of the screen of the state. */
    this.isOpening = false;
    this.state.addEventListener("change", () => {
      this.isOpening = false;
      this.render();
    });
    addEventListener("keydown", (event) => this.#key(event));
    listenForDrops({
      open: (models, place) => this.#files(models, place),
      fail: (error) => this.#fail(error),
      openName: () => this.tables[0] && escapeName(nameOf(this.tables[0].label)),
    });
    this.opening = h("p", { role: "status" }, "Opening…");
    this.screen.append(this.opening);
  }

  /** Adds the page to the document, once it has contents. */
  #show() {
    // Beside the scripts, if the page is one file: the worker is made from one, and the report is in another.
    if (!this.screen.isConnected) document.body.append(...this.shell);
  }

  /** Opens the models that the page was made or started with; `listed` is the answer of the local server. */
  async start(report, listed) {
    setTimeout(() => this.#show(), PATIENCE);
    try {
      if (report) await this.#open(JSON.parse(report.textContent).map((one) => () => fromReport(one)));
      else if (listed) await this.#open(await fromServer(await listed, this.token));
      else if (this.state.a) {
        await this.#open([this.state.a, this.state.b].filter(Boolean).map((address) => () => fromAddress(address)));
      } else this.render();
    } catch (error) {
      this.#fail(error);
    }
    if (!report && this.token) tellParent();
  }

  /** Opens models, the first from scratch; `place` 1 puts one beside it. */
  async #open(doors, place = 0) {
    this.screen.replaceChildren(this.opening);
    for (const [number, door] of doors.slice(0, 2).entries()) this.tables[place + number] = await door();
    if (place === 0 && doors.length === 1) this.tables[1] = null;
    this.#showTree();
    if (this.tables[1] && this.state.go === null && this.state.t === null) this.state.go = "compare";
    this.render();
  }

  /** Opens models chosen by the user, and shows errors as a card. */
  open(doors, changes, place = 0) {
    // The new model begins at its overview.
    this.state.set({
      ...(place === 0
        ? { a: null, b: null, t: null, s: null, w: null, at: null, q: null, find: null, go: null }
        : { go: "compare" }),
      ...changes,
    }, true);
    return this.#open(doors, place).catch((error) => this.#fail(error));
  }

  #fail(error) {
    if (isAbort(error)) return;
    this.failed = card(error);
    this.render();
    this.failed = null;
  }

  #showTree() {
    const [table, other] = this.tables;
    this.comparison = other ? new Comparison(table, other) : null;
    /** What the tree shows: the tensors of the model, or of both. */
    this.tree = this.comparison?.tree ?? new Tree(table);
    if (Object.hasOwn({ parameters: 1, bytes: 1, dtype: 1, shape: 1 }, this.state.sort ?? "")) {
      this.tree.orderBy(this.state.sort);
    }
    this.tree.openFirst(FIRST_ROWS);
    this.meant = null;
    this.#putRows();
    document.title = `${escapeName(nameOf(table.label))} – ingot`;
  }

  #putRows() {
    this.rows?.element.remove();
    const sort = (column) => {
      this.tree.orderBy(column);
      this.state.set({ sort: column === "name" ? null : column }, true);
      this.#putRows();
      this.render();
    };
    const compared = this.comparison;
    const open = (number) => (compared ? this.#openPair(compared.rows[number].name) : this.openTensor(number));
    this.rows = new Rows(this.tree, { open, sort, changeOf: compared && ((node) => compared.changeOf(node)) });
    this.side.append(this.rows.element);
    this.side.hidden = false;
    this.found = this.pointed = this.node = undefined;
  }

  #openPair(name) {
    choose(this.panes, this.toggle, false);
    this.state.set({ go: "compare", t: name, s: null, w: null, at: null });
  }

  openTensor(number) {
    choose(this.panes, this.toggle, false);
    this.state.set({ go: "tensor", t: this.tables[0].tensors[number].name, s: null, w: null, at: null });
  }

  #go(screen) {
    choose(this.panes, this.toggle, false);
    this.state.set({ go: screen });
  }

  get screenName() {
    const { go, t } = this.state;
    return ["overview", "map", "compare", "tensor"].includes(go) ? go : t !== null ? "tensor" : "overview";
  }

  render() {
    this.controller.abort();
    this.controller = new AbortController();
    const [table] = this.tables;
    const name = this.screenName;
    const screens = { overview: "Overview", map: "File map", compare: "Compare" };
    this.nav.replaceChildren(
      ...(table ? [this.toggle] : []),
      ...(table
        ? Object.entries(screens).map(([key, text]) =>
          button(text, () => this.#go(key), { "aria-current": name === key && !this.isOpening ? "page" : null })
        )
        : []),
      ...(!table || table.report
        ? []
        : [button("Open…", () => this.#showDoor(true), { "aria-current": this.isOpening ? "page" : null })]),
      button("Keys", () => this.#showKeys(), { class: "keys", "aria-label": "Keys" }),
    );
    if (table) this.#renderTree(name);
    const focused = document.activeElement?.id;
    try {
      this.screen.replaceChildren(
        ...[this.failed, table && !this.isOpening ? this.#screen(name) : this.#door()].filter(Boolean),
      );
    } catch (error) {
      this.screen.replaceChildren(card(error));
    }
    this.#show();
    const shown = [this.isOpening, name, this.state.t, this.state.view].join();
    // Not for the first screen, since it lays the page out.
    if (shown !== (this.shown ?? shown)) this.screen.scrollTop = 0;
    this.shown = shown;
    // A control that changed the screen keeps the focus.
    if (focused && document.activeElement === document.body) document.getElementById(focused)?.focus();
  }

  #renderTree(screen) {
    const { find, t } = this.state;
    if (this.found !== find) {
      if (document.activeElement !== this.filter) this.filter.value = find ?? "";
      this.found = find;
      this.#find(find);
    }
    const opened = screen === "tensor" || screen === "compare" ? t ?? undefined : undefined;
    if (this.pointed !== opened) {
      this.pointed = opened;
      const number = this.tree.table.numberOf(opened);
      this.node = number === undefined ? undefined : this.tree.reveal(number);
      if (!find && this.node) this.rows.show(this.comparison?.filter);
      this.rows.point(this.node);
    }
  }

  /** Shows the tensors that match a filter: at once, or for a regular expression when a worker has matched the names.
   */
  async #find(find) {
    this.finding?.abort();
    const { signal } = (this.finding = new AbortController());
    const { tensors } = this.tree.table;
    try {
      const filter = filterOf(find);
      let test = filter?.test;
      if (filter?.patterns.length > 0) {
        this.status.textContent = "Searching…";
        const input = { names: tensors.map(({ name }) => name), patterns: filter.patterns };
        const matches = await runIsolated("matching", input, { signal, timeout: LONGEST_SEARCH });
        test = (tensor, number) => matches[number] === 1 && filter.test(tensor);
      }
      const only = this.comparison?.filter;
      this.rows.show(
        test && only
          ? (tensor, number) => only(tensor, number) && /** @type {any} */ (test)(tensor, number)
          : (test ?? only),
      );
      if (filter?.patterns.length > 0) this.rows.point(this.node);
      this.status.textContent = filter || only ? `${whole(this.rows.length)} of ${many(tensors.length, "tensor")}` : "";
    } catch (error) {
      if (!isAbort(error)) this.status.textContent = error.message;
    }
  }

  #screen(name) {
    const [table, other] = this.tables;
    const openTensor = (number) => this.openTensor(number);
    const context = { table, state: this.state, signal: this.controller.signal };
    if (name === "overview") {
      const find = (filter) => {
        choose(this.panes, this.toggle, true);
        this.state.set({ find: filter }, true);
      };
      return overview(table, { openTensor, find, signal: context.signal });
    }
    if (name === "map") return fileMap(table, { openTensor });
    if (name === "compare") {
      if (!other) {
        return h(
          "article",
          {},
          h("h2", {}, "Comparison"),
          h("p", {}, "Open the model to compare with."),
          this.#chooser(1),
        );
      }
      return this.comparison.screen({ ...context, onChange: () => this.#find(this.state.find) });
    }
    const number = table.numberOf(this.state.t);
    if (number === undefined) {
      return h(
        "article",
        {},
        h("h2", {}, "No such tensor"),
        h("p", {}, `The model has no tensor \`${escapeName((this.state.t ?? "").slice(0, 300))}\`.`),
      );
    }
    this.meant ??= meantOf(table);
    const meant = table.report ? null : this.meant(number);
    if (!(meant instanceof Promise)) return tensorScreen({ ...context, number, meant });
    meant.then(() => !context.signal.aborted && this.render());
    return h("article", { "aria-busy": "true" }, h("p", {}, "Reading…"));
  }

  // --- What opens models by hand ---

  #door() {
    const recent = recents();
    return h(
      "article",
      { class: "door" },
      h("h2", {}, "Open a model"),
      this.#chooser(0),
      recent.length > 0 ? h("p", {}, `Opened before: ${recent.map(escapeName).join(", ")}`) : null,
      h(
        "p",
        {},
        "Nothing leaves this machine: the page reads the parts of a file that it shows, and sends nothing anywhere.",
      ),
    );
  }

  #showDoor(isOpening) {
    choose(this.panes, this.toggle, false);
    this.isOpening = isOpening;
    this.render();
  }

  #chooser(place) {
    const files = (attributes, text) => {
      const input = h("input", {
        type: "file",
        ...attributes,
        onchange: () => input.files.length > 0 && this.#files([[...input.files]], place),
      });
      return h("label", {}, `${text} `, input);
    };
    const address = h("input", {
      type: "text",
      size: 40,
      placeholder: "https://… or hf://owner/name",
      "aria-label": "Address",
    });
    const go = (event) => {
      event.preventDefault();
      const text = address.value.trim();
      if (text !== "") this.open([() => fromAddress(text)], { [place === 0 ? "a" : "b"]: text }, place);
    };
    return h(
      "div",
      { class: "drop" },
      h("p", {}, "Drop a file or a folder here, or choose."),
      files({ multiple: true }, "Files"),
      files({ webkitdirectory: true }, "A folder"),
      // The page of the local server makes no other requests: `ingot view URL` reads remote files.
      this.token ? null : h("form", { onsubmit: go }, h("label", {}, "An address ", address), h("button", {}, "Open")),
    );
  }

  /** Opens the files of one model, or of two that are compared. */
  #files(models, place) {
    const changes = models.length === 2 ? { go: "compare" } : {};
    const door = (files) => async () => {
      const table = await fromFiles(files);
      remember(files);
      return table;
    };
    return this.open(models.map(door), changes, place);
  }

  // --- Keys ---

  #showKeys() {
    if (!this.help) document.body.append(this.help = helpOn(KEYS));
    this.help.showModal();
  }

  #key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || this.help?.open) return;
    const isTyping = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
    if (event.key === "Escape") {
      if (event.target === this.filter) this.rows?.element.focus();
      this.comparison?.cancel();
      if (this.isOpening) this.#showDoor(false);
      for (const cancel of /** @type {NodeListOf<HTMLElement>} */ (document.querySelectorAll(".cancel"))) {
        cancel.click();
      }
      return;
    }
    if (event.target === this.filter && /^(Enter|ArrowDown)$/.test(event.key)) {
      this.rows?.element.focus();
      event.preventDefault();
    }
    if (isTyping) return;
    if (event.target === document.body && Object.hasOwn(SCROLLS, event.key)) {
      this.screen.scrollTop += SCROLLS[event.key] * this.screen.clientHeight;
      event.preventDefault();
      return;
    }
    const go = (screen) => () => this.tables[0] && this.#go(screen);
    const actions = {
      "/": () => {
        choose(this.panes, this.toggle, true);
        this.filter.focus();
      },
      "?": () => this.#showKeys(),
      o: go("overview"),
      m: go("map"),
      c: go("compare"),
      "[": () => this.#step(-1),
      "]": () => this.#step(1),
      r: () => this.state.set({ q: this.state.q === "raw" ? null : "raw", s: null, w: null, at: null }),
    };
    const action = actions[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  }

  #step(by) {
    const [table] = this.tables;
    if (!table || table.tensors.length === 0) return;
    const now = table.numberOf(this.state.t) ?? (by > 0 ? -1 : 0);
    this.openTensor((now + by + table.tensors.length) % table.tensors.length);
  }
}

function helpOn(keys) {
  const rows = Object.entries(keys).flatMap(([key, text]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, text)]);
  const close = button("Close", () => help.close());
  const head = h("div", { class: "controls" }, h("h2", {}, "Keys"), close);
  const help = h("dialog", { "aria-label": "Keys" }, head, h("dl", {}, rows));
  return help;
}

/** Names of files that were opened; nothing else is kept. */
function recents() {
  try {
    return JSON.parse(localStorage.getItem(RECENT) ?? "[]").filter((name) => typeof name === "string").slice(0, 5);
  } catch {
    return [];
  }
}

function remember(files) {
  try {
    const name = files[0].webkitRelativePath.split("/")[0] || files[0].name;
    localStorage.setItem(RECENT, JSON.stringify([name, ...recents().filter((other) => other !== name)].slice(0, 5)));
  } catch {
    // A page of one file may have no storage.
  }
}

/** Tells the page of a notebook that this frame reached its server, at once and when it is asked. */
function tellParent() {
  if (parent === window) return;
  parent.postMessage("ingot ready", "*");
  addEventListener("message", ({ source, data }) => {
    if (source === parent && data === "ingot?") parent.postMessage("ingot ready", "*");
  });
}

export function start() {
  const state = new State();
  const token = state.findToken();
  const report = document.querySelector("#report");
  // Before the page is made, so that the server answers meanwhile.
  const listed = token && !report ? listServed(token) : null;
  // The page awaits it later.
  listed?.catch(() => {});
  // Both take a while, and change nothing that the first screen shows.
  afterPaint(() => state.hideToken());
  return new Page(state, token).start(report, listed);
}
