// Reads the headers at URLs that come in as JSON, and says of each what its metadata holds, or why it was refused.

import { readHeader } from "../../../js/index.js";

async function verdict(url) {
  try {
    const header = await readHeader(url, { retries: 0, timeout: 20_000 });
    return [...new Set(header.metadata.get("k"))].join("");
  } catch (error) {
    return { code: error.code ?? String(error.stack) };
  }
}

let text = "";
for await (const part of process.stdin) text += part;
const verdicts = [];
for (const url of JSON.parse(text)) verdicts.push(await verdict(url));
console.log(JSON.stringify(verdicts));
