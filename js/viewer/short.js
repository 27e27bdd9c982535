// Names that are wider than their rows: words are left out, an ellipsis marks each gap, and no two rows look alike.

import { firstDifference } from "./tree.js";

/** Pixels that no character of a name exceeds. */
const WIDEST = 20;
const MOST_WIDTHS = 4096;
/** The parts of a name that are kept or left out: words with the sign after them, or else characters and numbers. */
const PARTS = [/[^._/-]*[._/-]|[^._/-]+/g, /\d+|\D/gu];

const pens = new Map();
const widths = new Map();

/** Pixels that a text takes in a row. */
export function widthOf(text, isBold) {
  const key = `${isBold}${text}`;
  if (widths.has(key)) return widths.get(key);
  if (!pens.has(isBold)) {
    const pen = document.createElement("canvas").getContext("2d");
    // As in the style sheet. Asking the browser for it would compute all styles.
    pen.font = `${isBold ? "600 " : ""}13px system-ui, "DejaVu Sans", sans-serif`;
    pens.set(isBold, pen);
  }
  if (widths.size >= MOST_WIDTHS) widths.clear();
  widths.set(key, pens.get(isBold).measureText(text).width);
  return widths.get(key);
}

/** Rows with a `name` and `room` for it in pixels, and what of the names is `shown`. */
export function shortened(rows) {
  const wide = rows.filter(({ name, room, isBold }) => name.length * WIDEST > room && widthOf(name, isBold) > room);
  if (wide.length === 0) return rows;
  /** Places in the names at which they differ from other rows. */
  const places = new Map(wide.map((row) => [row, new Set()]));
  let before = -1;
  for (let known = 0; known > before; known = sizeOf(places)) {
    before = known;
    for (const row of wide) row.shown = fitting(row, places.get(row));
    for (const alike of groupsOf(rows)) tellApart(alike, places);
  }
  return rows;
}

function sizeOf(places) {
  return [...places.values()].reduce((sum, { size }) => sum + size, 0);
}

/** Rows that look alike. */
function groupsOf(rows) {
  const groups = new Map();
  for (const row of rows) groups.set(row.shown, [...(groups.get(row.shown) ?? []), row]);
  return [...groups.values()].filter((group) => group.length > 1);
}

function tellApart(rows, places) {
  for (const one of rows) {
    for (const other of rows) {
      if (one.name === other.name) continue;
      places.get(one)?.add(Math.min(firstDifference(one.name, other.name), one.name.length - 1));
    }
  }
}

/** A name with the parts that hold `places`, and as much of its end as there is room for. */
function fitting({ name, room, isBold }, places) {
  let shown = name;
  for (const expression of PARTS) {
    const parts = name.match(expression) ?? [];
    const kept = holding(parts, places);
    shown = joined(parts, kept);
    if (widthOf(shown, isBold) > room) continue;
    for (let at = parts.length - 1; at >= 0; at--) {
      if (kept.has(at)) continue;
      kept.add(at);
      const more = joined(parts, kept);
      if (widthOf(more, isBold) > room) break;
      shown = more;
    }
    if (shown !== "…") return shown;
  }
  return shown;
}

function holding(parts, places) {
  const kept = new Set();
  let end = 0;
  parts.forEach((part, at) => {
    const begin = end;
    end += part.length;
    for (const place of places) if (place >= begin && place < end) kept.add(at);
  });
  return kept;
}

function joined(parts, kept) {
  return parts.reduce((text, part, at) => (kept.has(at) ? text + part : text.endsWith("…") ? text : `${text}…`), "");
}
