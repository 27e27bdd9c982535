// Two models side by side: tensors in only one of them, differences in dtype or shape, and distances of the values.

import { escapeName } from "../src/errors.js";
import { button, card, h, table as tableOf } from "./dom.js";
import { isAbort, run } from "./jobs.js";
import { Matrix } from "./lines.js";
import { nameOf, shortName } from "./overview.js";
import { domainOf, heatmap, histogram } from "./plots.js";
import { natural } from "./tree.js";
import { many, real, shapeText, share, whole } from "./wording.js";

/** Rows in the document; an export has all of them. */
const MOST_ROWS = 150;
const BINS = 64;
const CELLS = [192, 192];
const SAMPLE = 64 << 20;

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

const WORDS = { same: "alike", dtype: "of another dtype", shape: "of another shape" };
const COLUMNS = ["Name", "Headers", "Shape", "Equal", "Largest |Δ|", "Relative L2", "Cosine"];
const SORTS = {
  Name: () => 0,
  Headers: (row) => ["added", "removed", "shape", "dtype", "same"].indexOf(row.kind),
  Equal: ({ found }) => (found ? 1 - found.different / found.count : 2),
  "Largest |Δ|": ({ found }) => -(found?.largest ?? -1),
  "Relative L2": ({ found }) => -(found?.relative ?? -1),
  Cosine: ({ found }) => found?.cosine ?? 2,
};

/** Values and headers of both models. It lives as long as the models do, so that results are kept. */
export class Comparison {
  #controller = null;

  constructor(one, two) {
    this.one = one;
    this.two = two;
    /** @type {any[]} */
    this.rows = matched(one, two);
    this.sort = "Name";
    this.pairs = this.rows.filter(({ kind }) => kind === "same" || kind === "dtype");
    this.byName = new Map(this.rows.map((row) => [row.name, row]));
  }

  screen(context) {
    this.context = context;
    const chosen = this.byName.get(context.state.t);
    this.list = h("div", {});
    this.bar = h("progress", {
      max: String(Math.max(1, this.pairs.length)),
      value: "0",
      "aria-label": "Tensors compared",
      hidden: true,
    });
    this.status = h("p", { role: "status" });
    this.#list();
    const kinds = ["added", "removed", "shape", "dtype", "same"].map((kind) => ({
      kind,
      number: this.rows.filter((row) => row.kind === kind).length,
    }));
    const parts = kinds.filter(({ kind, number }) => number > 0 || kind === "same").map(({ kind, number }) =>
      `${whole(number)} ${WORDS[kind] ?? kind}`
    );
    const model = ({ label }) => h("b", { title: escapeName(label) }, shortName(nameOf(label)));
    return h(
      "article",
      {},
      h("h2", {}, "Comparison"),
      h("p", {}, model(this.one), " and ", model(this.two), `: ${parts.join(", ")}.`),
      h(
        "div",
        { class: "controls" },
        button("Compare all values", () => this.all()),
        button("Cancel", () => this.cancel(), { "aria-keyshortcuts": "Escape" }),
        this.bar,
        ["JSON", "Markdown", "CSV"].map((kind) => button(`Save ${kind}`, () => this.#save(kind))),
      ),
      this.status,
      chosen?.one !== undefined && chosen?.two !== undefined ? this.#detail(chosen) : null,
      this.list,
    );
  }

  cancel() {
    this.#controller?.abort();
  }

  /** Compares the values of all tensors that both have. */
  async all() {
    this.cancel();
    const controller = (this.#controller = new AbortController());
    this.bar.hidden = false;
    const started = performance.now();
    let done = 0;
    const onProgress = (news) => {
      for (const [place, found] of news) this.pairs[place].found = found;
      this.bar.value = done += news.length;
    };
    try {
      const found = await this.#distances(this.pairs, { signal: controller.signal, onProgress });
      this.pairs.forEach((row, place) => (row.found = found[place]));
      const differing = this.pairs.filter(({ found }) => found?.different > 0).length;
      this.status.textContent = `${whole(found.length)} tensors compared in ${
        ((performance.now() - started) / 1000).toFixed(2)
      } s: ${many(differing, "differs", "differ")} in values.`;
    } catch (error) {
      controller.abort();
      if (isAbort(error)) this.status.textContent = `Cancelled after ${whole(done)} tensors.`;
      else this.status.replaceChildren(card(error));
    }
    this.bar.hidden = true;
    this.#list();
  }

  #distances(rows, how) {
    return run("distances", { pairs: rows.map((row) => [this.one.wired(row.one), this.two.wired(row.two)]) }, how);
  }

  #list() {
    const rank = SORTS[this.sort];
    const rows = this.rows.toSorted((a, b) => rank(a) - rank(b));
    const head = COLUMNS.map((column) => (SORTS[column]
      ? button(column, () => {
        this.sort = column;
        this.#list();
      }, { class: "link", "aria-pressed": String(this.sort === column) })
      : column)
    );
    const cells = rows.slice(0, MOST_ROWS).map((row) => [
      row.two !== undefined && row.one !== undefined
        ? button(shortName(row.name), () => this.context.state.set({ t: row.name }), { class: "link" })
        : h("span", { class: "long" }, shortName(row.name)),
      row.maybe === undefined
        ? row.kind
        : h("span", { class: "long" }, `${row.kind}, perhaps renamed: ${shortName(row.maybe)}`),
      shapeText(row.one === undefined ? this.two.tensors[row.two] : this.one.tensors[row.one]),
      ...(row.found
        ? [
          share(row.found.count - row.found.different, row.found.count),
          real(row.found.largest),
          real(row.found.relative),
          real(row.found.cosine),
        ]
        : ["", "", "", ""]),
    ]);
    const more = rows.length - MOST_ROWS;
    this.list.replaceChildren(
      tableOf("Tensors of both models", head, cells, [3, 4, 5, 6]),
      ...(more > 0 ? [h("p", {}, `… and ${whole(more)} more. Sort, or save all of them.`)] : []),
    );
  }

  /** Both histograms on one axis, and a picture of the difference. */
  #detail(row) {
    const place = h(
      "section",
      { class: "card", "aria-live": "polite" },
      h("h3", {}, shortName(row.name)),
      h("p", {}, "Reading…"),
    );
    this.#drawDetail(row, place).catch((error) => !isAbort(error) && place.replaceChildren(card(error)));
    return place;
  }

  async #drawDetail(row, place) {
    const { signal } = this.context;
    const tensors = [this.one.wired(row.one), this.two.wired(row.two)];
    const drawing = [h("h3", {}, shortName(row.name))];
    const statistics = await Promise.all(
      tensors.map((tensor) =>
        run("statistics", { tensor, bins: BINS, most: SAMPLE, exact: tensor.nbytes <= SAMPLE }, { signal })
      ),
    );
    const series = statistics.filter((found) => found?.bins.length > 0);
    if (series.length > 0) {
      drawing.push(
        histogram(series),
        h(
          "p",
          { class: "legend" },
          h("span", { class: "swatch one" }, shortName(nameOf(this.one.label))),
          h("span", { class: "swatch two" }, shortName(nameOf(this.two.label))),
        ),
      );
    }
    if (row.kind !== "shape" && tensors[0].nbytes > 0) {
      row.found ??= (await this.#distances([row], { signal }))[0];
      if (row.found) {
        drawing.push(
          h(
            "p",
            {},
            `${share(row.found.count - row.found.different, row.found.count)} of the values are equal; largest |Δ| ${
              real(row.found.largest)
            }, relative L2 ${real(row.found.relative)}, cosine ${real(row.found.cosine)}.`,
          ),
        );
      }
      if (row.found?.different !== 0) {
        drawing.push(h("p", {}, "Difference, the second less the first:"), await this.#difference(tensors, signal));
      }
    }
    place.replaceChildren(...drawing);
  }

  async #difference(tensors, signal) {
    const { shape } = tensors[0];
    const layout = shape.length < 2
      ? { down: null, across: null, fixed: [] }
      : { down: shape.length - 2, across: shape.length - 1, fixed: [] };
    const matrix = new Matrix(shape, layout);
    const window = [0, matrix.down, 0, matrix.across];
    const [ours, theirs] = await Promise.all(
      tensors.map((tensor) => run("picture", { tensor, layout, window, cells: CELLS, kind: "mean" }, { signal })),
    );
    const drawn = {
      ...ours,
      values: theirs.values.map((value, cell) => value - ours.values[cell]),
      marks: ours.marks.map((mark, cell) => mark | theirs.marks[cell]),
    };
    return heatmap(drawn, { domain: domainOf(drawn, 1), label: "Picture of the difference" });
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
    const link = h("a", {
      download: `comparison.${{ JSON: "json", Markdown: "md", CSV: "csv" }[kind]}`,
      href: URL.createObjectURL(new Blob([text])),
    });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }
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
