// Which tensors of a model hold values that are not numbers, or nothing but zeros.

import { button, card, h, named, rest, table as tableOf } from "./dom.js";
import { isAbort, run } from "./jobs.js";
import { many, nbytes, shortName, whole } from "./wording.js";

const MOST_ROWS = 100;

/** A card that reads all values when it is asked to. Its result stays with the model. */
export function health(table, { openTensor, signal }) {
  const place = h("div", { "aria-live": "polite", tabindex: "-1" });
  const show = (found) => place.replaceChildren(...resultOf(table, found, openTensor));
  const kept = table.report?.statistics;
  if (kept && Object.keys(kept).length > 0) table.health ??= table.tensors.map(({ name }) => kept[name] ?? null);
  if (table.health) show(table.health);
  else if (table.report) return null;
  else place.append(button(`Look for NaN and infinities in all values (${nbytes(table.nbytes)})`, () => search()));
  const search = async () => {
    const bar = h("progress", { max: "1", value: "0", "aria-label": "Values read" });
    const controller = new AbortController();
    const cancel = button("Cancel", () => controller.abort(), { class: "cancel", "aria-keyshortcuts": "Escape" });
    place.replaceChildren(h("div", { class: "working" }, bar, cancel));
    place.setAttribute("aria-busy", "true");
    cancel.focus();
    try {
      const tensors = table.tensors.map((_, number) => table.wired(number));
      const onProgress = (part) => (bar.value = part);
      const both = AbortSignal.any([signal, controller.signal]);
      show(table.health = await run("health", { tensors }, { signal: both, onProgress }));
    } catch (error) {
      place.replaceChildren(isAbort(error) ? h("p", {}, "Cancelled.") : card(error));
    }
    place.removeAttribute("aria-busy");
    // The result takes the focus of the button that it replaced.
    if (document.activeElement === document.body) place.focus();
  };
  return h("section", {}, h("h3", {}, "Values"), place);
}

function resultOf(table, found, openTensor) {
  const numbers = [...found.keys()];
  const bad = numbers.filter((number) => found[number]?.nans > 0 || found[number]?.infinities > 0);
  const empty = numbers.filter((number) => found[number]?.count > 0 && found[number].zeros === found[number].count);
  const link = (number) =>
    button(named(shortName(table.tensors[number].name)), () => openTensor(number), { class: "link" });
  const cell = (kind, count) => h("td", { class: `number ${count > 0 ? kind : ""}` }, whole(count));
  const parts = [];
  if (bad.length === 0) parts.push(h("p", {}, "All values are finite."));
  else {
    const text = many(bad.length, "tensor holds", "tensors hold");
    parts.push(
      h("p", { class: "swatch nan" }, `${text} NaN or infinities.`),
      tableOf(
        "Tensors with NaN or infinities",
        ["Name", "NaN", "Infinite"],
        bad.slice(0, MOST_ROWS).map((number) => [
          link(number),
          cell("nan", found[number].nans),
          cell("infinite", found[number].infinities),
        ]),
        [1, 2],
      ),
      rest(bad.length, MOST_ROWS) ?? "",
    );
  }
  if (empty.length > 0) {
    parts.push(
      h("p", { class: "swatch zero" }, `${many(empty.length, "tensor holds", "tensors hold")} only zeros: `, ...[
        ...empty.slice(0, 5).flatMap((number, at) => [at > 0 ? ", " : "", link(number)]),
        empty.length > 5 ? ", …" : "",
      ]),
    );
  }
  return parts;
}
