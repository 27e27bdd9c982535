// One tensor: facts, statistics, a picture, values, code.

import { decode } from "../src/decode.js";
import { escapeName } from "../src/errors.js";
import { codeFor } from "./code.js";
import { hasStatistics } from "./count.js";
import { button, card, copying, download, facts, h, named, select, table as tableOf } from "./dom.js";
import { fromBase64 } from "./doors.js";
import { isAbort, run } from "./jobs.js";
import { Matrix } from "./lines.js";
import { domainOf, heatmap, scaled } from "./plots.js";
import { many, nbytes, real, shapeText, share, shortName, whole } from "./wording.js";

const BINS = 64;
/** Bytes of a tensor that are read without a request of the user: remote and local. Of a larger one, a sample is read.
 */
const AT_ONCE = { remote: 64 << 20, local: 256 << 20 };
/** Histograms of more bytes are counted from upper halves, unless the user asks for another pass. */
const EXACT_NBYTES = 64 << 20;
const CELLS = 256;
const VALUE_ROWS = 32;
const VALUE_COLUMNS = 12;
/** Rows that are shown before a value that is pointed out. */
const ROWS_BEFORE = 3;
/** Values of a slice that is saved as text, and bytes of a tensor that is saved as a NumPy file, which fits in memory. */
const MOST_CSV = 4_000_000;
const MOST_NPY = 1 << 30;
const LONGEST_FILE = 100;
const LONGEST_NAME = 2000;

const VIEWS = { statistics: "Statistics", picture: "Picture", values: "Values", code: "Code" };

/** `context` has the table, the number of the tensor, the state, and a signal that ends with the screen. */
export function tensorScreen(context) {
  const { table, number, state } = context;
  const tensor = table.tensors[number];
  const view = Object.hasOwn(VIEWS, state.view ?? "") ? state.view : "statistics";
  const tabs = Object.entries(VIEWS).map(([key, text]) =>
    // A picture begins with all of the tensor, and the values with the part that the picture showed.
    button(text, () => state.set(key === "picture" && key !== view ? { view: key, w: null } : { view: key }), {
      "aria-pressed": String(view === key),
    })
  );
  const seen = context.meant && state.q !== "raw" ? context.meant : null;
  const shown = { ...context, tensor: seen ?? { ...table.wired(number) } };
  return h(
    "article",
    {},
    h("h2", { class: "name" }, named(shortName(tensor.name))),
    factsOf(table, number),
    context.meant ? meantCard(context) : null,
    h("div", { class: "tabs", role: "group", "aria-label": "What to show" }, tabs),
    tensor.nbytes === 0 && view !== "code"
      ? h("p", {}, "The tensor has no elements.")
      : { statistics, picture: pictureView, values, code }[view](shown),
  );
}

function factsOf(table, number) {
  const tensor = table.tensors[number];
  const position = table.position(number);
  const file = table.files[table.file[number]];
  const { name } = tensor;
  const isCut = name !== "" && shortName(name) !== escapeName(name);
  return facts([
    ["Name", isCut ? named(escapeName(name.slice(0, LONGEST_NAME)) + (name.length > LONGEST_NAME ? "…" : "")) : null],
    ["Dtype", tensor.dtype],
    ["Shape", shapeText(tensor)],
    ["Elements", whole(table.elements[number])],
    ["Size", `${nbytes(tensor.nbytes)} (${whole(tensor.nbytes)} bytes)`],
    ["File", named(escapeName(file.name))],
    ["Bytes in the file", table.isRemote ? null : `${whole(position)} to ${whole(position + tensor.nbytes)}`],
    ["Bytes in the data", `${whole(tensor.begin)} to ${whole(tensor.end)}`],
  ]);
}

function meantCard({ meant, state }) {
  const isRaw = state.q === "raw";
  return h(
    "section",
    { class: "card" },
    h(
      "p",
      {},
      `${meant.kind}: stands for ${shapeText(meant)} numbers with ${
        meant.parts.map(({ name }) => escapeName(name)).join(", ")
      }. `,
      isRaw ? "Shown as it is stored." : "Shown dequantised.",
    ),
    button(
      isRaw ? "Show dequantised" : "Show as it is stored",
      () => state.set({ q: isRaw ? null : "raw", s: null, w: null, at: null }),
      { "aria-keyshortcuts": "r" },
    ),
  );
}

/** A place that shows the progress of a job, and then its result. */
function working(name, input, signal, draw) {
  const bar = h("progress", { max: "1", value: "0", "aria-label": "Progress" });
  const controller = new AbortController();
  const place = h(
    "div",
    { "aria-live": "polite", "aria-busy": "true" },
    h(
      "div",
      { class: "working" },
      bar,
      button("Cancel", () => controller.abort(), { "aria-keyshortcuts": "Escape", class: "cancel" }),
    ),
  );
  const put = (...children) => place.replaceChildren(...children.flat().filter(Boolean));
  const onProgress = (progress) => (typeof progress === "number" ? (bar.value = progress) : put(draw(progress, false)));
  run(name, input, { signal: AbortSignal.any([signal, controller.signal]), onProgress })
    .then((result) => put(draw(result, true)), (error) => put(isAbort(error) ? h("p", {}, "Cancelled.") : card(error)))
    .finally(() => place.removeAttribute("aria-busy"));
  return place;
}

// --- Statistics ---

function statistics(context) {
  const { table, number, tensor, signal } = context;
  const kept = table.report?.statistics?.[table.tensors[number].name];
  if (table.report) {
    return kept ? statisticsOf(context, kept) : h("p", {}, "The report holds no statistics of this tensor.");
  }
  if (tensor.parts) {
    return h(
      "p",
      {},
      "The statistics are of the stored numbers. The picture and the values are dequantised. Show the tensor as it is stored to see its statistics.",
    );
  }
  const place = h("div", {});
  const read = (most, exact) =>
    place.replaceChildren(
      working("statistics", { tensor, bins: BINS, most, exact }, signal, (found) =>
        found === null
          ? h("p", {}, "Dtypes of 6 bits have no settled packing, and no statistics.")
          : statisticsOf(context, found, read)),
    );
  read(
    AT_ONCE[table.isRemote || !isAtHand(table) ? "remote" : "local"] >= tensor.nbytes ? Infinity : 64 << 20,
    tensor.nbytes <= EXACT_NBYTES,
  );
  return place;
}

function isAtHand(table) {
  return table.isServed || table.files.every(({ source }) => source.wire.blob);
}

function statisticsOf(context, found, read) {
  const { tensor, state } = context;
  const count = found.count;
  const note = found.isSample
    ? h(
      "p",
      { class: "card" },
      `A sample of ${share(found.read, tensor.nbytes)}. `,
      button(`Read all ${nbytes(tensor.nbytes)}`, () => read(Infinity, tensor.nbytes <= EXACT_NBYTES)),
    )
    : found.isExact === false
    ? h(
      "p",
      {},
      "The places of the histogram are exact to one part in 128 of each value. ",
      button("Count exactly", () => read(Infinity, true)),
    )
    : null;
  const rows = [
    ["Minimum", real(found.min)],
    ["Maximum", real(found.max)],
    ["Mean", real(found.mean)],
    ["Standard deviation", real(found.std)],
    ["Values", whole(count)],
    ["Zeros", `${whole(found.zeros)} (${share(found.zeros, count)})`],
    ["NaN", whole(found.nans)],
    ["Infinite", whole(found.infinities)],
    ["Neither 0 nor 1", found.malformed > 0 ? whole(found.malformed) : null],
  ];
  return [
    note,
    oddValues(context, found),
    facts(rows),
    found.min === null ? h("p", {}, "No value is finite.") : h(
      "section",
      {},
      h("h3", {}, "Histogram"),
      found.bins?.length > 0 ? scaled([found], state) : null,
    ),
  ].filter(Boolean);
}

/** NaN and infinities, with a button that shows the first of them. */
function oddValues(context, { nans, infinities }) {
  if (nans === 0 && infinities === 0) return null;
  const { table, tensor, state, signal } = context;
  const one = (what, text) => {
    const status = h("span", { role: "status" });
    const show = async () => {
      status.textContent = " Searching…";
      try {
        const index = await run("first", { tensor, what }, { signal });
        if (index === null) status.textContent = " None is left.";
        else state.set({ view: "values", ...placeOf(tensor.shape, index, what) });
      } catch (error) {
        if (!isAbort(error)) status.replaceChildren(card(error));
      }
    };
    const shown = table.report ? [] : [" ", button("Show the first", show), status];
    return h("p", {}, h("span", { class: `swatch ${what}` }, text), ...shown);
  };
  return h(
    "section",
    { class: "card" },
    nans > 0 ? one("nan", `${whole(nans)} NaN`) : null,
    infinities > 0 ? one("infinite", many(infinities, "infinite value")) : null,
  );
}

/** The state that points out an odd value by its index in memory. */
function placeOf(shape, index, what) {
  const places = [];
  for (let [dim, rest] = [shape.length - 1, index]; dim >= 0; dim--) {
    places.unshift(rest % shape[dim]);
    rest = Math.floor(rest / shape[dim]);
  }
  return {
    s: shape.length < 2 ? null : [...places.slice(0, -2), ":", ":"].join(","),
    w: null,
    at: [what, ...places].join(","),
  };
}

/** The pointed out value: its row and column in a layout, and a sentence; null without one in this part. */
function pointed(shape, { down, across, fixed }, text) {
  const [what, ...places] = (text ?? "").split(",");
  if (places.length !== Math.max(1, shape.length) || !places.every((place) => /^\d+$/.test(place))) return null;
  const numbers = places.map(Number);
  const isFold = down === null;
  if (!isFold && fixed.some((index, dim) => dim !== down && dim !== across && index !== numbers[dim])) return null;
  return {
    row: isFold ? Math.floor(numbers[0] / VALUE_COLUMNS) : numbers[down],
    column: isFold ? numbers[0] % VALUE_COLUMNS : numbers[across],
    text: `First ${what === "nan" ? "NaN" : "infinite value"} at [${numbers.map(whole).join(", ")}]`,
  };
}

// --- Pictures and values: the part of the tensor that is shown as a matrix ---

/** The dimensions that run down and across, and the indices of the others, from the state or by default. */
function layoutOf(shape, text) {
  if (shape.length < 2) return { down: null, across: null, fixed: [] };
  const parts = (text ?? "").split(",");
  const axes = parts.flatMap((part, dim) => (/^:\d?$/.test(part) ? [[part, dim]] : [])).sort().map(([, dim]) => dim);
  const isGood = parts.length === shape.length && axes.length === 2;
  const [down, across] = isGood ? axes : [shape.length - 2, shape.length - 1];
  const fixed = shape.map((dim, at) => (isGood && /^\d+$/.test(parts[at]) ? Math.min(Number(parts[at]), dim - 1) : 0));
  return { down, across, fixed };
}

function layoutText(shape, { down, across, fixed }) {
  return shape.map((
    _,
    dim,
  ) => (dim === down ? (down > across ? ":0" : ":") : dim === across ? (down > across ? ":1" : ":") : fixed[dim])).join(
    ",",
  );
}

function layoutControls(shape, layout, state) {
  if (shape.length < 2) return null;
  const go = (changes) => state.set({ s: layoutText(shape, { ...layout, ...changes }), w: null, at: null });
  const dims = shape.map((dim, at) => [at, `${at} (${whole(dim)})`]);
  const swap = (mine, theirs) => (value) =>
    go({ [mine]: Number(value), [theirs]: Number(value) === layout[theirs] ? layout[mine] : layout[theirs] });
  return h(
    "div",
    { class: "controls" },
    select("Down", dims, layout.down, swap("down", "across")),
    select("Across", dims, layout.across, swap("across", "down")),
    shape.map((
      dim,
      at,
    ) => (at === layout.down || at === layout.across
      ? null
      : slider(`Dimension ${at}`, `slice-${at}`, layout.fixed[at], dim - 1, (value) => {
        const fixed = [...layout.fixed];
        fixed[at] = value;
        go({ fixed });
      }))
    ),
  );
}

/** A field for a whole number up to `max`. Another number changes nothing, and a sentence says why. */
function field(attributes, value, max, change) {
  const note = h("span", { class: "refused", role: "alert" });
  const input = h("input", { type: "number", min: "0", max: String(max), value: String(value), ...attributes });
  input.addEventListener("change", () => {
    const found = input.valueAsNumber;
    const isGood = Number.isInteger(found) && found >= 0 && found <= max;
    input.setAttribute("aria-invalid", String(!isGood));
    note.textContent = isGood ? "" : `${input.value || "This"} is no index: expected 0 to ${whole(max)}.`;
    if (isGood) change(found);
  });
  return { input, note };
}

function number(label, value, max, change) {
  const { input, note } = field({}, value, max, change);
  return h("span", {}, h("label", {}, `${label} `, input), " ", note);
}

/** A slider with a field for the same number. */
function slider(label, id, value, max, change) {
  const own = { min: "0", max: String(max), value: String(value) };
  const range = h("input", { type: "range", ...own, id, "aria-label": label });
  const { input, note } = field({ id: `${id}-number` }, value, max, change);
  range.addEventListener("input", () => (input.value = range.value));
  range.addEventListener("change", () => change(Number(range.value)));
  return h("span", {}, h("label", {}, `${label} `, input), " ", range, ` 0 to ${whole(max)} `, note);
}

function windowText(text) {
  const numbers = (text ?? "").split(",").map(Number);
  return numbers.length === 4 && numbers.every((one) => Number.isSafeInteger(one) && one >= 0) ? numbers : null;
}

function pictureView(context) {
  const { table, tensor, state, signal } = context;
  if (table.report) return thumbnailOf(context);
  const { shape } = tensor;
  const layout = layoutOf(shape, state.s);
  const matrix = new Matrix(shape, layout);
  const all = [0, matrix.down, 0, matrix.across];
  const window = windowText(state.w) ?? all;
  const cells = [CELLS, CELLS];
  const settings = { kind: "mean", part: 0.99 };
  const place = h("div", {});
  const draw = (drawn, isDone) =>
    pictureOf(
      drawn,
      isDone,
      settings,
      state,
      `Picture of the tensor, ${whole(drawn.rows)} by ${whole(drawn.columns)} cells`,
    );
  let drawn = null;
  const start = () =>
    place.replaceChildren(
      working("picture", { tensor, layout, window, cells, kind: settings.kind }, signal, (found, isDone) =>
        draw(drawn = found, isDone)),
    );
  start();
  return h(
    "section",
    {},
    layoutControls(shape, layout, state),
    h(
      "div",
      { class: "controls" },
      select("A cell shows", [["mean", "the mean"], ["largest", "the largest by magnitude"]], "mean", (value) => {
        settings.kind = value;
        start();
      }),
      select("Colours span", [[0.99, "99 % of the cells"], [0.9, "90 %"], [1, "all"]], 0.99, (value) => {
        settings.part = Number(value);
        if (drawn) place.replaceChildren(draw(drawn, true));
      }),
      state.w ? button("Show all", () => state.set({ w: null })) : null,
    ),
    place,
  );
}

function pictureOf(drawn, isDone, settings, state, label) {
  const { seen } = drawn;
  const choose = (...window) => state.set({ w: window.join(",") });
  const span = (first, length) => `${whole(first)} to ${whole(first + length - 1)}`;
  return h(
    "div",
    {},
    heatmap(drawn, { domain: domainOf(drawn, settings.part), choose, label }),
    h(
      "p",
      {},
      `Rows ${span(seen.row, seen.rows)}, columns ${span(seen.column, seen.columns)}. `,
      drawn.isSampled ? `${whole(drawn.rows)} of the rows are read. ` : "",
      isDone ? "Drag over a part to look closer." : "Reading more…",
    ),
  );
}

function thumbnailOf({ table, number }) {
  const tensor = table.tensors[number];
  const kept = table.report.thumbnails?.[tensor.name];
  if (!kept) return h("p", {}, "The report holds no picture of this tensor.");
  const [rows, columns] = kept.shape;
  const values = Float32Array.from(decode(tensor.dtype, fromBase64(kept.data)), Number);
  const marks = Uint8Array.from(values, (value) => (Number.isNaN(value) ? 1 : Number.isFinite(value) ? 0 : 2));
  const drawn = { values, marks, rows, columns, seen: { row: 0, rows, column: 0, columns } };
  return h(
    "div",
    {},
    heatmap(drawn, { domain: domainOf(drawn, 0.99), label: `Thumbnail of ${whole(rows)} by ${whole(columns)} values` }),
    h("p", {}, `${whole(rows)} by ${whole(columns)} values, spread evenly over the tensor.`),
  );
}

function values(context) {
  const { table, tensor, state, signal } = context;
  if (table.report) return h("p", {}, "The report holds no values.");
  const { shape } = tensor;
  const layout = shape.length < 2
    ? { down: null, across: null, fixed: [], fold: VALUE_COLUMNS }
    : layoutOf(shape, state.s);
  const matrix = new Matrix(shape, layout);
  const last = [Math.max(0, matrix.down - 1), Math.max(0, matrix.across - 1)];
  const target = pointed(shape, layout, state.at);
  // A few rows before the value that is pointed out; at the right edge, values before it fill the table.
  const [wantedRow, , wantedColumn] = windowText(state.w) ??
    (target
      ? [target.row - ROWS_BEFORE, 0, Math.min(target.column, matrix.across - VALUE_COLUMNS)].map((at) =>
        Math.max(0, at)
      )
      : [0, 0, 0]);
  const [row, column] = [Math.min(wantedRow, last[0]), Math.min(wantedColumn, last[1])];
  const go = (r, c) => {
    const corner = [Math.max(0, Math.min(r, last[0])), Math.max(0, Math.min(c, last[1]))];
    state.set({ w: [corner[0], VALUE_ROWS, corner[1], VALUE_COLUMNS].join(","), at: null }, true);
  };
  const input = { tensor, layout, row, rows: VALUE_ROWS, column, columns: VALUE_COLUMNS };
  const shown = { texts: [], from: 0, upto: VALUE_COLUMNS };
  const draw = (texts) => {
    shown.texts = texts;
    const drawn = valueTable(texts, matrix, row, column);
    const cell = target && drawn.querySelector("tbody").rows[target.row - row]?.cells[target.column - column + 1];
    if (cell) cell.classList.add("pointed");
    const note = h("p");
    let isNew = true;
    fitted(drawn, cell ? target.column - column : 0, (from, upto) => {
      Object.assign(shown, { from, upto });
      const part = matrix.isFold ? "" : `, columns ${whole(column + from)} to ${whole(column + upto - 1)}`;
      const rows = `${matrix.isFold ? "Lines" : "Rows"} ${whole(row)} to ${whole(row + texts.length - 1)}${part}.`;
      note.textContent = `${cell ? `${target.text}. ` : ""}${isOne ? "" : rows}`;
      if (cell && isNew) reveal(cell);
      isNew = false;
    });
    return [note, drawn];
  };
  const isOne = matrix.down * matrix.across === 1;
  const step = () => Math.max(1, shown.upto - shown.from);
  const isElsewhere = wantedRow !== row || wantedColumn !== column;
  return h(
    "section",
    {},
    layoutControls(shape, layout, state),
    isOne ? null : h(
      "div",
      { class: "controls" },
      number("First row", row, last[0], (value) => go(value, column)),
      number("First column", column, last[1], (value) => go(row, value)),
      button("↑", () => go(row - VALUE_ROWS, column), { "aria-label": "Rows before" }),
      button("↓", () => go(row + VALUE_ROWS, column), { "aria-label": "Rows after" }),
      button("←", () => go(row, column + shown.from - step()), { "aria-label": "Columns before" }),
      button("→", () => go(row, column + shown.upto), { "aria-label": "Columns after" }),
    ),
    isElsewhere
      ? h(
        "p",
        { class: "refused", role: "alert" },
        `The address names row ${whole(wantedRow)}, column ${whole(wantedColumn)}: the last ones are ${
          whole(last[0])
        } and ${whole(last[1])}.`,
      )
      : null,
    working("values", input, signal, draw),
    h(
      "div",
      { class: "controls" },
      copying(
        () => shown.texts.map((line) => line.slice(shown.from, shown.upto).join("\t")).join("\n"),
        "Copy these values",
      ),
      ...exports(context, layout, matrix),
    ),
  );
}

function valueTable(texts, matrix, row, column) {
  const { length } = texts[0] ?? [];
  const head = [matrix.isFold ? "From" : "Row", ...Array.from({ length }, (_, at) => whole(column + at))];
  const rows = texts.map((line, at) => [
    h("th", { scope: "row", class: "number" }, whole(matrix.isFold ? (row + at) * matrix.across : row + at)),
    ...line.map(valueCell),
  ]);
  return tableOf("Values", head, rows, head.map((_, at) => at));
}

/**
 * Hides the columns of a table for which its place has no room, so that no number is cut, and calls `onFit` with the
 * range of the others. They contain the column `kept`.
 */
function fitted(place, kept, onFit) {
  const rows = [...place.querySelectorAll("tr")];
  let widths = null;
  let room = null;
  new ResizeObserver(() => {
    if (place.clientWidth === 0 || place.clientWidth === room) return;
    room = place.clientWidth;
    widths ??= Array.from(rows[0].cells, (cell) => cell.getBoundingClientRect().width);
    const [names, ...columns] = widths;
    let [from, upto, left] = [kept, kept + 1, room - names - columns[kept]];
    while (upto < columns.length && columns[upto] <= left) left -= columns[upto++];
    while (from > 0 && columns[from - 1] <= left) left -= columns[--from];
    for (const { cells } of rows) {
      for (let at = 0; at < columns.length; at++) cells[at + 1].hidden = at < from || at >= upto;
    }
    onFit(from, upto);
  }).observe(place);
}

/** Scrolls a value to the middle, and moves the focus to its table. */
function reveal(cell) {
  cell.closest(".scroll").focus({ preventScroll: true });
  cell.scrollIntoView({ block: "center", inline: "nearest" });
}

const ODD = { NaN: "nan", Infinity: "infinite", "-Infinity": "infinite", 0: "zero", "-0": "zero" };

function valueCell(text) {
  return h("td", { class: Object.hasOwn(ODD, text) ? `number ${ODD[text]}` : "number" }, text);
}

/** Buttons that save the shown slice as CSV, and the tensor as a NumPy file. */
function exports({ table, number, tensor, signal }, layout, matrix) {
  const status = h("span", { role: "status" });
  const file = table.tensors[number].name.replace(/[^\w.-]+/g, "_").slice(-LONGEST_FILE) || "tensor";
  const saving = (ending, make) => async () => {
    status.textContent = "Reading…";
    try {
      download(`${file}.${ending}`, await make());
      status.textContent = "Saved.";
    } catch (error) {
      if (!isAbort(error)) status.replaceChildren(card(error));
    }
  };
  const onProgress = (part) => (status.textContent = `Reading, ${share(Math.round(100 * part), 100)}`);
  const csv = async () => {
    const all = { row: 0, rows: matrix.down, column: 0, columns: matrix.across };
    const lines = await run("values", { tensor, layout, ...all }, { signal });
    return new Blob(lines.map((line) => `${line.join(",")}\n`));
  };
  const npy = () => run("npy", { tensor }, { signal, onProgress });
  const values = tensor.shape.reduce((product, dim) => product * dim, 1);
  return [
    matrix.down * matrix.across <= MOST_CSV ? button("Save this slice as CSV", saving("csv", csv)) : null,
    hasStatistics(tensor.dtype) && Math.max(4 * values, tensor.nbytes) <= MOST_NPY
      ? button("Save the tensor as .npy", saving("npy", npy))
      : null,
    status,
  ].filter(Boolean);
}

function code({ table, number }) {
  const { name, nbytes: size } = table.tensors[number];
  const file = table.files[table.file[number]];
  const isUrl = /^(https?|hf|s3|gs|az):/.test(table.label);
  const path = table.isServed || isUrl ? table.label : file.source.name ?? table.label;
  // For folders and files read through Python, the page does not know the path of a file.
  const hasRange = !table.isRemote && table.files.length === 1 && size > 0 && /\.(safetensors|bt)$/.test(path);
  const texts = codeFor({ name, path, position: table.position(number), nbytes: size, isUrl, hasRange });
  return h(
    "section",
    {},
    texts.map(([kind, text]) =>
      h("section", {}, h("h3", {}, kind, " ", copying(() => text)), h("pre", { tabindex: "0" }, text))
    ),
  );
}
