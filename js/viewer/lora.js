// What a LoRA changes: the weights of the base model that its tensors belong to, and their ranks.

import { button, h, named, rest, table as tableOf } from "./dom.js";
import { many, shortName, whole } from "./wording.js";

/** The ends of names that kohya's scripts, PEFT and diffusers write, for the factor with a row for each rank. */
const FACTORS = [
  /\.lora_down\.weight$/,
  /\.lora_A(?:\.\w+)?\.weight$/,
  /\.lora\.down\.weight$/,
  /\.lora_linear_layer\.down\.weight$/,
];
const MOST_ROWS = 60;

/** Of a range in a name. A line may end after a longer dash. */
const DASH = "-";
/** A number between signs: of a layer, usually. */
const NUMBER = /(?<=[._])\d+(?=[._]|$)/g;

/**
 * The changed weights of a LoRA: those whose names differ in numbers are one row, which leads to their tensors by
 * `find(filter)`; null for another file.
 */
export function changes(table, find) {
  const kinds = new Map();
  let total = 0;
  for (const { name, shape } of table.tensors) {
    const factor = FACTORS.find((end) => end.test(name));
    if (!factor || shape.length < 2) continue;
    total++;
    const stem = name.replace(factor, "");
    const parts = stem.split(NUMBER);
    const kind = parts.join("*");
    const found = kinds.get(kind) ??
      { parts, weights: 0, ranks: new Set(), inputs: new Set(), numbers: parts.slice(1).map(() => new Set()) };
    found.weights++;
    found.ranks.add(shape[0]);
    found.inputs.add(shape.slice(1).join(" × "));
    (stem.match(NUMBER) ?? []).forEach((number, place) => found.numbers[place].add(Number(number)));
    kinds.set(kind, found);
  }
  if (total === 0) return null;
  const rows = [...kinds.values()].slice(0, MOST_ROWS).map(({ parts, weights, ranks, inputs, numbers }) => [
    button(named(shortName(labelOf(parts, numbers))), () => find(filterFor(parts)), { class: "link" }),
    countOf(weights, numbers),
    rangeOf(ranks, " to "),
    [...inputs].join(", "),
  ]);
  return h(
    "section",
    {},
    h("h3", {}, `Changes ${many(total, "weight")} of the base model`),
    h("p", {}, "Numbers in brackets are those of the layers. A name shows its tensors in the tree."),
    tableOf("Changed weights", ["Weights", "Number", "Rank", "Input size"], rows, [1, 2]),
    rest(kinds.size, MOST_ROWS),
  );
}

/** How many weights there are, of those that the label describes. */
function countOf(weights, numbers) {
  const all = numbers.reduce((product, { size }) => product * size, 1);
  return weights === all ? whole(weights) : `${whole(weights)} of ${whole(all)}`;
}

function labelOf(parts, numbers) {
  return parts.reduce((text, part, at) => {
    const found = numbers[at - 1];
    return `${text}${found.size > 1 ? `[${rangeOf(found, DASH)}]` : [...found][0]}${part}`;
  });
}

/** Numbers as a range, or as a list if some are missing between. */
function rangeOf(numbers, dash) {
  const sorted = [...numbers].sort((a, b) => a - b);
  const [first, last] = [sorted[0], sorted.at(-1)];
  if (first === last) return whole(first);
  const isList = dash === DASH && last - first >= sorted.length;
  return isList ? sorted.join(",") : `${whole(first)}${dash}${whole(last)}`;
}

/** A filter of the tree for the tensors with these parts of names between any numbers. */
function filterFor(parts) {
  return `${parts.join("*").replace(/[\s*]+/g, "*")}.*`;
}
