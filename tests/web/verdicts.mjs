// Prints the verdict of the reader in JavaScript on each file: one line of JSON for each line of standard input.

import { createInterface } from "node:readline";

import { parseHeader, parseIndex, SafetensorError } from "../../js/index.js";
import { bytes, pairs, rows } from "./oracle.mjs";

function read({ kind, file, strict }) {
  if (kind === "index") {
    const { weightMap, metadataText } = parseIndex(bytes(file));
    return { weightMap: [...weightMap], metadata: metadataText };
  }
  const header = parseHeader(bytes(file), { strict });
  return { format: header.format, tensors: rows(header), metadata: pairs(header.metadata) };
}

function refusal({ code, message, tensor, expected, found, begin, end }) {
  const numbers = [expected, found, begin, end].map((number) => (number === null ? null : String(number)));
  return { code, message, tensor, numbers };
}

function verdict(line) {
  try {
    return read(JSON.parse(line));
  } catch (error) {
    if (error instanceof SafetensorError) return refusal(error);
    throw error;
  }
}

for await (const line of createInterface({ input: process.stdin, crlfDelay: Infinity })) {
  process.stdout.write(`${JSON.stringify(verdict(line))}\n`);
}
