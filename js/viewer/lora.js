// What a LoRA changes: the weights of the base model that its tensors belong to, and their ranks.

import { h, named, table as tableOf } from "./dom.js";
import { many, shortName, whole } from "./wording.js";

/** The ends of names that kohya's scripts, PEFT and diffusers write, for the factor with a row for each rank. */
const FACTORS = [
  /\.lora_down\.weight$/,
  /\.lora_A(?:\.\w+)?\.weight$/,
  /\.lora\.down\.weight$/,
  /\.lora_linear_layer\.down\.weight$/,
];
const MOST_ROWS = 60;

/** The changed weights of a LoRA, each kind once with the number of its layers; null for another file. */
export function changes(table) {
  const kinds = new Map();
  let total = 0;
  for (const { name, shape } of table.tensors) {
    const factor = FACTORS.find((end) => end.test(name));
    if (!factor || shape.length < 2) continue;
    total++;
    const kind = name.replace(factor, "").replace(/(?<=[._])\d+(?=[._]|$)/g, "*");
    const found = kinds.get(kind) ?? { layers: 0, ranks: new Set(), inputs: new Set() };
    found.layers++;
    found.ranks.add(shape[0]);
    found.inputs.add(shape.slice(1).join(" × "));
    kinds.set(kind, found);
  }
  if (total === 0) return null;
  const range = (numbers) => {
    const sorted = [...numbers].sort((a, b) => a - b);
    return sorted.length === 1 ? whole(sorted[0]) : `${whole(sorted[0])} to ${whole(sorted.at(-1))}`;
  };
  const rows = [...kinds].slice(0, MOST_ROWS).map(([kind, { layers, ranks, inputs }]) => [
    h("span", { class: "long" }, named(shortName(kind))),
    whole(layers),
    range(ranks),
    [...inputs].slice(0, 3).join(", "),
  ]);
  const more = kinds.size - MOST_ROWS;
  return h(
    "section",
    {},
    h("h3", {}, `Changes ${many(total, "weight", "weights")} of the base model`),
    h("p", {}, "A star stands for the number of a layer."),
    tableOf("Changed weights", ["Weight", "Layers", "Rank", "Inputs"], rows, [1, 2]),
    more > 0 ? h("p", {}, `… and ${whole(more)} more kinds.`) : null,
  );
}
