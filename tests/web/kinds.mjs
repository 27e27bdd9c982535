// Reads JSON of `[tensors, metadata, beside]` for each file, and prints what js/viewer/kind.js says of each.

import { readFileSync } from "node:fs";

import { kindOf } from "../../js/viewer/kind.js";

const cases = JSON.parse(readFileSync(0, "utf8"));
const said = cases.map(([tensors, metadata, beside]) => {
  const rows = tensors.map(([name, dtype, shape]) => ({ name, dtype, shape }));
  return kindOf(rows, metadata, beside);
});
process.stdout.write(JSON.stringify(said));
