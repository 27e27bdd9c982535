// Elements, made from text only: names and metadata come from files, and none of them becomes markup.

import { whole } from "./wording.js";

/** An element with attributes, listeners (`onclick`), and children. Strings become text, and null children are left
 * out. */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const name in attributes) {
    const value = attributes[name];
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

/** Calls `work` when the next frame is on the screen: the frame after it begins then. */
export function afterPaint(work) {
  requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(work)));
}

/** A name that may break after a dot, an underscore or a slash, and never in the middle of a word. */
export function named(text) {
  return text.split(/(?<=[._/\\])/).flatMap((
    part,
    at,
  ) => (at === 0 ? [part] : [h("wbr"), part]));
}

export function button(text, onclick, attributes = {}) {
  return h("button", { type: "button", onclick, ...attributes }, text);
}

/** A choice of one of `options`, which are texts, or pairs of value and text. */
export function select(label, options, value, onchange) {
  const choices = options.map((option) => {
    const [key, text] = [option].flat();
    return h("option", { value: key, selected: String(key) === String(value) }, text ?? key);
  });
  return h("label", {}, `${label} `, h("select", { onchange: (event) => onchange(event.target.value) }, choices));
}

/** Facts as a list of pairs of name and value. Pairs with a null value are left out. Null without a pair.
 */
export function facts(pairs) {
  const shown = pairs.filter(([, value]) => value !== null && value !== undefined);
  if (shown.length === 0) return null;
  return h("dl", {}, shown.map(([term, value]) => [h("dt", {}, term), h("dd", {}, value)]).flat());
}

/** A table of rows of cells, which are contents, or cells themselves; `right` lists the indices of columns with numbers.
 */
export function table(caption, head, rows, right = []) {
  return h(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    h(
      "table",
      {},
      h("caption", {}, caption),
      h("thead", {}, h("tr", {}, head.map(cellOf("th", { scope: "col" }, right)))),
      h("tbody", {}, rows.map((row) => rowOf(row, right))),
    ),
  );
}

/** A row of such a table. */
export function rowOf(cells, right = []) {
  return h("tr", {}, cells.map(cellOf("td", {}, right)));
}

function cellOf(tag, attributes, right) {
  return (value, column) =>
    /^T[DH]$/.test(value?.tagName)
      ? value
      : h(tag, { ...attributes, class: right.includes(column) ? "number" : null }, value);
}

/** How many of `total` items are left out after the first `most`; null if all are there. */
export function rest(total, most) {
  return total > most ? h("p", {}, `… and ${whole(total - most)} more.`) : null;
}

/** An error with its code, as a card. */
export function card(error) {
  const code = error?.code ?? error?.name ?? "error";
  return h(
    "section",
    { class: "card fault", role: "alert" },
    h("h2", {}, "This cannot be shown"),
    h("p", {}, String(error?.message ?? error)),
    h("p", {}, h("code", {}, String(code))),
  );
}

/** Saves a file, as a click on a link to it does. */
export function download(name, blob) {
  const link = h("a", { download: name, href: URL.createObjectURL(blob) });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

/** A button that copies text to the clipboard and confirms it. */
export function copying(text, label = "Copy") {
  return button(label, async (event) => {
    const pressed = event.currentTarget;
    try {
      await navigator.clipboard.writeText(text());
      pressed.textContent = "Copied";
    } catch {
      pressed.textContent = "Not allowed";
    }
  });
}
