// Two models side by side: tensors in only one of them, differences in dtype or shape, and distances of the values.

import { escapeName } from "../src/errors.js";
import { afterPaint, button, card, download, facts, h, named, rowOf, table as tableOf } from "./dom.js";
import { flattened, indicesOf } from "./difference.js";
import { isAbort, run } from "./jobs.js";
import { kindOfTable } from "./kind.js";
import { Matrix } from "./lines.js";
import { domainOf, heatmap, scaled } from "./plots.js";
import { DTYPE_NUMBERS } from "./table.js";
import { natural, Tree } from "./tree.js";
import { many, nameOf, real, shapeText, share, shortName, whole } from "./wording.js";

/** Rows in the document; an export has all of them. */
const MOST_ROWS = 150;
/** Rows that are drawn at once; the others follow after the next frame. */
const FIRST_ROWS = 40;
const BINS = 64;
const CELLS = [192, 192];
const SAMPLE = 64 << 20;
/** Values of both models that are compared without a request of the user, in bytes, if they are on this machine. */
const AT_ONCE = 1 << 30;

/** Rows of a comparison: `kind` is `added`, `removed`, `dtype`, `shape` or `same`, according to the headers. */
export function matched(one, two) {
  const rows = one.tensors.map((tensor, number) => {
    const other = two.numberOf(tensor.name);
    if (other === undefined) return { name: tensor.name, kind: "removed", one: number };
    const theirs = two.tensors[other];
    const kind = String(theirs.shape) !== String(tensor.shape)
      ? "shape"
      : theirs.dtype !== tensor.dtype
      ? "dtype"
      : "same";
    return { name: tensor.name, kind, one: number, two: other };
  });
  two.tensors.forEach(({ name }, number) =>
    one.numberOf(name) === undefined && rows.push({ name, kind: "added", two: number })
  );
  suggestRenames(rows, one, two);
  return rows.sort((a, b) => natural(a.name, b.name));
}

/** A removed and an added tensor with the same dtype and shape, paired in file order, may be one renamed tensor. */
function suggestRenames(rows, one, two) {
  const added = new Map();
  const key = ({ dtype, shape }) => `${dtype} ${shape}`;
  for (const row of rows) {
    if (row.kind === "added") {
      added.set(key(two.tensors[row.two]), [...(added.get(key(two.tensors[row.two])) ?? []), row]);
    }
  }
  for (const row of rows) {
    if (row.kind === "removed") {
      const other = added.get(key(one.tensors[row.one]))?.shift();
      if (other) [row.maybe, other.maybe] = [other.name, row.name];
    }
  }
}

const WORDS = { same: "with equal headers", dtype: "of another dtype", shape: "of another shape" };
/** The kinds of differences, the largest first, and their words. A tensor that was not compared yet is of no kind. */
const CHANGES = {
  removed: "only in the first",
  added: "only in the second",
  shape: "shape",
  dtype: "dtype",
  values: "values",
  unknown: "not compared",
  equal: "equal",
};
const RANKS = Object.keys(CHANGES);

/** How a tensor differs, by its headers and, once they are compared, by its values. */
function changeOf({ kind, found }) {
  if (kind !== "same") return kind;
  if (!found) return "unknown";
  return found.different > 0 ? "values" : "equal";
}

function isDifferent(row) {
  return RANKS.indexOf(changeOf(row)) < RANKS.indexOf("unknown");
}

const COLUMNS = ["Name", "Difference", "Shape", "Equal", "Largest\n|Δ|", "Relative\nL2", "Cosine"];
/** The columns with numbers. */
const NUMBERS = [3, 4, 5, 6];
/** The columns that begin with the largest. */
const DESCENDING = ["Difference", "Largest\n|Δ|", "Relative\nL2"];
const SORTS = {
  Name: () => 0,
  Difference: (row) => RANKS.indexOf(changeOf(row)) - (row.found?.relative > 0 ? 1 - 1 / (1 + row.found.relative) : 0),
  Equal: ({ found }) => (found ? 1 - found.different / found.count : 2),
  "Largest\n|Δ|": ({ found }) => -(found?.largest ?? -1),
  "Relative\nL2": ({ found }) => -(found?.relative ?? -1),
  Cosine: ({ found }) => found?.cosine ?? 2,
};

/** Values and headers of both models. It lives as long as the models do, so that results are kept. */
export class Comparison {
  /** Cancels the running comparison. */
  #controller = null;
  #wasStarted = false;
  /** What both models are, if the comparison needs it. */
  #kinds = null;

  constructor(one, two) {
    this.one = one;
    this.two = two;
    /** @type {any[]} */
    this.rows = matched(one, two);
    this.sort = "Difference";
    this.onlyDifferent = false;
    this.summary = "";
    this.pairs = this.rows.filter(({ kind }) => kind === "same" || kind === "dtype");
    this.byName = new Map(this.rows.map((row) => [row.name, row]));
    this.tree = new Tree(this.#both());
  }

  /** The tensors of both models, as a table for a tree: of a pair the first one. */
  #both() {
    const places = this.rows.map((row) => (row.one === undefined ? [this.two, row.two] : [this.one, row.one]));
    const numbers = new Map(this.rows.map(({ name }, number) => [name, number]));
    return {
      tensors: places.map(([table, number]) => table.tensors[number]),
      elements: Float64Array.from(places, ([table, number]) => table.elements[number]),
      dtype: Uint8Array.from(places, ([table, number]) => DTYPE_NUMBERS.get(table.tensors[number].dtype)),
      numberOf: (name) => numbers.get(name),
    };
  }

  /** The change of a node of the tree: a word for a tensor, and for a module the number of tensors that differ. */
  changeOf(node) {
    const { tree } = this;
    if (!tree.isModule(node)) {
      const row = this.rows[tree.tensor[node]];
      return { text: CHANGES[changeOf(row)].replace("only in the ", ""), isDifferent: isDifferent(row) };
    }
    const number = this.#differing(node);
    return {
      text: number === 0 ? (this.isCompared ? "equal" : "") : `${whole(number)} differ`,
      isDifferent: number > 0,
    };
  }

  #counted = new Map();

  #differing(node) {
    const { tree } = this;
    if (!tree.isModule(node)) return Number(isDifferent(this.rows[tree.tensor[node]]));
    if (this.#counted.has(node)) return this.#counted.get(node);
    let sum = 0;
    const members = tree.members.get(node);
    if (members) { for (const member of members) sum += this.#differing(member); }
    else for (let child = tree.first[node]; child >= 0; child = tree.next[child]) sum += this.#differing(child);
    this.#counted.set(node, sum);
    return sum;
  }

  get isCompared() {
    return this.pairs.every(({ found }) => found !== undefined);
  }

  /** Whether a tensor of the tree is shown: all are, or those that differ. */
  get filter() {
    return this.onlyDifferent ? (_, number) => isDifferent(this.rows[number]) : null;
  }

  screen(context) {
    this.context = context;
    const chosen = this.byName.get(context.state.t);
    this.list = h("div", { class: "compared" });
    this.bar = h("progress", {
      max: String(Math.max(1, this.pairs.length)),
      value: "0",
      "aria-label": "Tensors compared",
      hidden: !this.#controller,
    });
    this.stop = button("Cancel", () => this.cancel(), {
      "aria-keyshortcuts": "Escape",
      hidden: !this.#controller,
    });
    this.status = h("p", { role: "status" }, this.summary);
    this.fault = h("div", {});
    this.lead = h("p", { class: "lead" });
    this.#list();
    const kinds = ["added", "removed", "shape", "dtype", "same"].map((kind) => ({
      kind,
      number: this.rows.filter((row) => row.kind === kind).length,
    }));
    const parts = kinds.filter(({ kind, number }) => number > 0 || kind === "same").map(({ kind, number }) =>
      `${whole(number)} ${WORDS[kind] ?? kind}`
    );
    const model = ({ label }) => h("b", { title: escapeName(label) }, named(shortName(nameOf(label))));
    const hasValues = !this.one.report && this.pairs.length > 0;
    const only = h("input", {
      type: "checkbox",
      checked: this.onlyDifferent,
      onchange: () => {
        this.onlyDifferent = only.checked;
        this.#list();
        context.onChange();
      },
    });
    const wide = h("input", { type: "checkbox", onchange: () => this.list.classList.toggle("wide", wide.checked) });
    if (hasValues && !this.#wasStarted && this.#isAtHand()) this.all();
    return h(
      "article",
      {},
      h("h2", {}, "Comparison"),
      this.lead,
      this.#adapterNote(),
      h("p", {}, "First: ", model(this.one), ". Second: ", model(this.two), `. Tensors: ${parts.join(", ")}.`),
      this.fault,
      chosen ? this.#detail(chosen) : null,
      h(
        "div",
        { class: "controls" },
        h("label", {}, only, " Only what differs"),
        h("label", { class: "narrow" }, wide, " All columns"),
        ...(hasValues
          ? [
            button("Compare all values", () => this.all()),
            this.stop,
          ]
          : []),
        this.bar,
      ),
      this.list,
      this.status,
      h(
        "div",
        { class: "controls" },
        ["JSON", "Markdown", "CSV"].map((kind) => button(`Save ${kind}`, () => this.#save(kind))),
      ),
    );
  }

  /** A sentence about an adapter that is compared with a model, whose tensors have other names. */
  #adapterNote() {
    if (this.pairs.length > 0) return null;
    this.#kinds ??= [this.one, this.two].map(kindOfTable);
    const adapters = this.#kinds.filter(({ rank }) => rank !== null);
    if (adapters.length !== 1) return null;
    const place = this.#kinds[0] === adapters[0] ? "first" : "second";
    const text =
      `The ${place} model is an adapter (${adapters[0].text}): its tensors are changes to the weights of a base ` +
      "model, so none of them has the name of a tensor of the other model.";
    return h("p", { class: "card" }, text);
  }

  /** Whether all values are on this machine, and few enough to compare them at once. */
  #isAtHand() {
    const tables = [this.one, this.two];
    const isLocal = tables.every(({ isServed, isRemote, files }) =>
      !isRemote && (isServed || files.every(({ source }) => source.wire.blob))
    );
    return isLocal && tables.reduce((sum, table) => sum + table.nbytes, 0) <= AT_ONCE;
  }

  cancel() {
    this.#controller?.abort();
  }

  /** Compares the values of all tensors that both models have, unless a comparison is running. */
  async all() {
    if (this.#controller) return;
    this.#wasStarted = true;
    const controller = (this.#controller = new AbortController());
    this.bar.hidden = this.stop.hidden = false;
    const started = performance.now();
    let done = 0;
    const onProgress = (news) => {
      for (const [place, found] of news) this.pairs[place].found = found;
      this.bar.value = done += news.length;
    };
    let failed = null;
    try {
      const found = await this.#distances(this.pairs, { signal: controller.signal, onProgress });
      this.pairs.forEach((row, place) => (row.found = found[place]));
      const differing = this.pairs.filter(({ found }) => found?.different > 0).length;
      this.summary = `${many(found.length, "tensor")} compared in ${
        ((performance.now() - started) / 1000).toFixed(2)
      } s: ${many(differing, "differs", "differ")} in values.`;
    } catch (error) {
      controller.abort();
      this.summary = isAbort(error) ? `Cancelled after ${whole(done)} tensors.` : "";
      failed = isAbort(error) ? null : card(error);
    }
    this.#controller = null;
    this.bar.hidden = this.stop.hidden = true;
    this.fault.replaceChildren(...[failed].filter(Boolean));
    this.status.replaceChildren(this.summary);
    this.#counted.clear();
    this.#list();
    this.context.onChange();
  }

  #distances(rows, how) {
    return run("distances", { pairs: rows.map((row) => [this.one.wired(row.one), this.two.wired(row.two)]) }, how);
  }

  #list() {
    const rank = SORTS[this.sort];
    const differing = this.rows.filter(isDifferent);
    this.lead.replaceChildren(
      h(
        "b",
        { class: differing.length > 0 ? "differ" : null },
        `${whole(differing.length)} of ${whole(this.rows.length)}`,
      ),
      ` tensors ${differing.length === 1 ? "differs" : "differ"}${
        this.isCompared ? "" : " by the headers; values are not compared yet"
      }.`,
    );
    const rows = (this.onlyDifferent ? differing : this.rows).toSorted((a, b) => rank(a) - rank(b));
    const head = COLUMNS.map((column, at) => {
      const sort = () => {
        this.sort = column;
        this.#list();
      };
      const order = DESCENDING.includes(column) ? "descending" : "ascending";
      return h("th", {
        scope: "col",
        class: NUMBERS.includes(at) ? "number" : null,
        "aria-sort": this.sort === column ? order : null,
      }, SORTS[column] ? button(column, sort, { class: "link" }) : column);
    });
    const cellsOf = (row) => [
      button(named(shortName(row.name)), () => this.context.state.set({ go: "compare", t: row.name }), {
        class: "link",
      }),
      h(
        "span",
        { class: isDifferent(row) ? "long differ" : "long" },
        CHANGES[changeOf(row)],
        ...(row.maybe === undefined ? [] : [", perhaps renamed: ", ...named(shortName(row.maybe))]),
      ),
      shapeText(row.one === undefined ? this.two.tensors[row.two] : this.one.tensors[row.one]),
      ...(row.found
        ? [
          share(row.found.count - row.found.different, row.found.count),
          real(row.found.largest, 4),
          real(row.found.relative, 4),
          real(row.found.cosine),
        ]
        : ["", "", "", ""]),
    ];
    const more = rows.length - MOST_ROWS;
    const cells = rows.slice(0, FIRST_ROWS).map(cellsOf);
    const table = tableOf("Tensors of both models", head, cells, NUMBERS);
    this.list.replaceChildren(
      rows.length > 0 ? table : h("p", {}, "No tensor differs."),
      ...(more > 0 ? [h("p", {}, `… and ${whole(more)} more. Sort, or save all of them.`)] : []),
    );
    if (rows.length <= FIRST_ROWS) return;
    table.setAttribute("aria-busy", "true");
    afterPaint(() => {
      const rest = rows.slice(FIRST_ROWS, MOST_ROWS).map((row) => rowOf(cellsOf(row), NUMBERS));
      table.querySelector("tbody").append(...rest);
      table.removeAttribute("aria-busy");
    });
  }

  /** Both histograms on one axis, and a picture of the difference. */
  #detail(row) {
    const head = [h("h3", {}, named(shortName(row.name))), this.#headers(row)];
    const place = h("section", { class: "card", "aria-live": "polite" }, head);
    if (row.one === undefined || row.two === undefined || this.one.report) return place;
    const reading = h("p", { "aria-busy": "true" }, "Reading…");
    place.append(reading);
    this.#drawDetail(row).then((drawing) => place.replaceChildren(...head, ...drawing)).catch((error) =>
      !isAbort(error) && reading.replaceWith(card(error))
    );
    return place;
  }

  /** The header of a tensor in both models. */
  #headers({ one, two }) {
    const text = (table, number) => {
      if (number === undefined) return "has no such tensor";
      const tensor = table.tensors[number];
      return `${tensor.dtype} ${shapeText(tensor)}`;
    };
    return facts([["First", text(this.one, one)], ["Second", text(this.two, two)]]);
  }

  async #drawDetail(row) {
    const { signal } = this.context;
    const tensors = [this.one.wired(row.one), this.two.wired(row.two)];
    const drawing = [];
    if (row.kind !== "shape" && tensors[0].nbytes > 0) {
      row.found ??= (await this.#distances([row], { signal }))[0];
      if (row.found) drawing.push(h("p", {}, ...wordsOf(row.found)));
      if (row.found?.different !== 0) drawing.push(...await this.#difference(tensors, signal));
    }
    const exact = tensors.every(({ nbytes }) => nbytes <= SAMPLE);
    const statistics = await run("histograms", { tensors, bins: BINS, most: SAMPLE, exact }, { signal });
    const series = statistics.filter((found) => found?.bins.length > 0);
    if (series.length > 0) {
      drawing.push(
        scaled(series, this.context.state),
        h(
          "p",
          { class: "legend" },
          h("span", { class: "swatch one" }, shortName(nameOf(this.one.label))),
          h("span", { class: "swatch two" }, shortName(nameOf(this.two.label))),
          series.length > 1 ? h("span", { class: "swatch both" }, "both") : null,
        ),
      );
    }
    return drawing;
  }

  /** The largest difference, and a picture of all of them. */
  async #difference(tensors, signal) {
    const isWhole = tensors.every(({ nbytes }) => nbytes <= SAMPLE);
    const drawn = isWhole
      ? await run("difference", { tensors: tensors.map(flattened), cells: CELLS }, { signal })
      : await this.#sampled(tensors, signal);
    const picture = heatmap(drawn, {
      domain: domainOf(drawn, 1),
      label: "Picture of the difference",
      isSigned: true,
      unit: "difference",
    });
    const { largest } = drawn;
    const at = (place) => `[${indicesOf(tensors[0].shape, place).map(whole).join(", ")}]`;
    return [
      largest
        ? h(
          "p",
          {},
          `The largest difference is at ${at(largest.place)}: ${real(largest.one)} in the first, ${
            real(largest.two)
          } in the second.`,
        )
        : null,
      h(
        "p",
        {},
        isWhole
          ? "The second less the first; a cell shows its largest difference:"
          : `The second less the first, for ${whole(drawn.rows)} of ${whole(drawn.seen.rows)} rows:`,
      ),
      picture,
    ].filter(Boolean);
  }

  /** The difference of the pictures of two large tensors. */
  async #sampled(tensors, signal) {
    const flat = tensors.map(flattened);
    const { shape } = flat[0];
    const layout = shape.length < 2 ? { down: null, across: null, fixed: [] } : { down: 0, across: 1, fixed: [] };
    const matrix = new Matrix(shape, layout);
    const window = [0, matrix.down, 0, matrix.across];
    const [ours, theirs] = await Promise.all(
      flat.map((tensor) => run("picture", { tensor, layout, window, cells: CELLS, kind: "mean" }, { signal })),
    );
    return {
      ...ours,
      values: theirs.values.map((value, cell) => value - ours.values[cell]),
      marks: ours.marks.map((mark, cell) => mark | theirs.marks[cell]),
    };
  }

  #save(kind) {
    const rows = this.rows.map(({ name, kind: headers, maybe, found }) => ({
      name,
      headers,
      renamed: maybe ?? null,
      different: found?.different ?? null,
      count: found?.count ?? null,
      largest: plain(found?.largest),
      relative_l2: plain(found?.relative),
      cosine: plain(found?.cosine),
    }));
    const text = { JSON: asJson, Markdown: asMarkdown, CSV: asCsv }[kind](rows, [this.one.label, this.two.label]);
    download(`comparison.${{ JSON: "json", Markdown: "md", CSV: "csv" }[kind]}`, new Blob([text]));
  }
}

/** How many values of two tensors differ, and how far they are apart. */
function wordsOf({ count, different, largest, relative, cosine }) {
  if (different === 0) return [`All ${many(count, "value is", "values are")} equal.`];
  return [
    h("b", { class: "differ" }, `${whole(different)} of ${many(count, "value")}`),
    ` ${different === 1 ? "differs" : "differ"}: largest |Δ| ${real(largest)}, relative L2 ${real(relative)}, cosine ${
      real(cosine)
    }.`,
  ];
}

/** Converts values that JSON cannot represent because they are not finite. */
function plain(value) {
  return value === undefined || value === null ? null : Number.isFinite(value) ? value : String(value);
}

function asJson(rows, models) {
  return `${JSON.stringify({ models, tensors: rows }, null, 1)}\n`;
}

function asMarkdown(rows) {
  const cell = (value) => shortName(String(value ?? "")).replace(/[\\|`*_<[\]]/g, "\\$&").replace("(no name)", "");
  const line = (cells) => `| ${cells.map(cell).join(" | ")} |\n`;
  return line(Object.keys(rows[0] ?? {})) + line(Object.keys(rows[0] ?? {}).map(() => "---")) +
    rows.map((row) => line(Object.values(row))).join("");
}

function asCsv(rows) {
  // A spreadsheet takes a cell with such a beginning for a formula.
  const cell = (value) => {
    const text = String(value ?? "");
    const safe = typeof value === "string" && /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
    return /[",\r\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
  };
  return [Object.keys(rows[0] ?? {}), ...rows.map((row) => Object.values(row))].map((row) =>
    `${row.map(cell).join(",")}\r\n`
  ).join("");
}
