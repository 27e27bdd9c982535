// Formats numbers and sizes for people, like the command `ingot`.

import { escapeName } from "../src/errors.js";

/** Characters of a name in a table or a sentence. */
const LONGEST_NAME = 120;

function scaled(number, units, step = 1000) {
  let [value, at] = [number, 0];
  while (value >= step * 0.9995 && at < units.length - 1) [value, at] = [value / step, at + 1];
  return at === 0
    ? `${number}${units[0]}`
    : `${value < 10 ? value.toFixed(2) : value < 100 ? value.toFixed(1) : value.toFixed(0)}${units[at]}`;
}

/** A size in bytes: `90.9 MB`. A line breaks neither there nor in a share. */
export function nbytes(number) {
  return scaled(number, ["B", "kB", "MB", "GB", "TB", "PB"].map((unit) => `\u00a0${unit}`));
}

/** A number of parameters: `22.7M`. */
export function count(number) {
  return scaled(number, ["", "K", "M", "B", "T", "Q"]);
}

/** All digits, in groups. */
export function whole(number) {
  // Without Intl, whose data takes a tenth of the time to the first screen.
  return String(number).replace(/\B(?=(?:\d{3})+$)/g, ",");
}

export function shapeText(tensor) {
  return `[${(tensor.exactShape ?? tensor.shape).join(", ")}]`;
}

/** A value with as many digits as a person compares. */
export function real(value, digits = 6) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "bigint" || Number.isInteger(value)) return String(value);
  return Number.isFinite(value) ? String(Number(value.toPrecision(digits))) : String(value);
}

export function share(part, all) {
  if (all === 0) return "–";
  const percent = (100 * part) / all;
  if (percent > 0 && percent < 0.01) return "<\u00a00.01\u00a0%";
  // Nearly all is not all.
  if (percent > 99.99 && percent < 100) return ">\u00a099.99\u00a0%";
  return `${percent > 99 ? Math.floor(percent * 100) / 100 : Number(percent.toPrecision(3))}\u00a0%`;
}

/** `1 tensor has`, `2 tensors have`; `1 value`, `2 values`. */
export function many(number, one, more = `${one}s`) {
  return `${whole(number)} ${number === 1 ? one : more}`;
}

/** The name of a model: the last part of its path. */
export function nameOf(label) {
  return /[^/\\]+(?=[/\\]*$)/.exec(label)?.[0] ?? label;
}

/** A name for a table or a sentence. A long one is cut in the middle: names of one model differ at both ends. */
export function shortName(name) {
  if (name === "") return "(no name)";
  if (name.length <= LONGEST_NAME) return escapeName(name);
  const half = LONGEST_NAME / 2;
  return `${escapeName(name.slice(0, half))}…${escapeName(name.slice(-half))}`;
}
