// What is done with bytes, off the page's thread: one job after the other, or several at once; each can be cancelled.

import { streamRange } from "../src/source.js";
import { Bins, counterOf, hasStatistics } from "./count.js";
import { distances } from "./distance.js";
import { reopened } from "./doors.js";
import { asTexts, Matrix, readLines } from "./lines.js";
import { Numbers } from "./numbers.js";
import { picture } from "./picture.js";
import { readMeant } from "./unpack.js";

/**
 * Bytes of a piece: memory that goes round, and a chance to hear of a cancelled job. Less than a browser holds of an answer that
 * nobody reads, so that it is read on while a piece is counted.
 */
const PIECE = 3 << 16;
/** Milliseconds between two words of how far a job is. */
const TELLS = 33;
/** A sample is read in runs of this many bytes. */
const RUN = 1 << 18;

const opened = new Map();

/** The file behind a wire, opened once. */
function sourceOf({ wire }, signal) {
  if (wire.blob || wire.report) return reopened(wire, signal);
  const key = `${wire.url} ${wire.known?.version}`;
  if (!opened.has(key)) {
    opened.set(key, reopened(wire));
    opened.get(key).catch(() => opened.delete(key));
  }
  return opened.get(key);
}

/** Runs of a tensor that are read: all of it, or a sample of at most `most` bytes, spread evenly. */
function runsOf({ nbytes, position }, most) {
  if (nbytes <= most) return [[position, position + nbytes]];
  const runs = Math.max(1, Math.floor(most / RUN));
  // Multiples of 24 bytes are whole elements of every dtype.
  const at = (n) => Math.floor((n * (nbytes - RUN)) / Math.max(1, runs - 1) / 24) * 24;
  const length = Math.floor(RUN / 24) * 24;
  return Array.from({ length: runs }, (_, n) => [position + at(n), position + Math.min(nbytes, at(n) + length)]);
}

/** How rows of a tensor are read: as they are stored, or as what is meant by several tensors. */
async function reading(tensor, signal) {
  if (tensor.scheme) return (_, rows, columns, take) => readMeant(sourceOf, tensor, rows, columns, take, signal);
  const source = await sourceOf(tensor, signal);
  return (matrix, rows, columns, take) => readLines(source, tensor, matrix, rows, columns, take, signal);
}

const JOBS = {
  /** What the values are. `most` bytes are read; `exact` counts a histogram in a second pass where one is needed. */
  async statistics({ tensor, bins, most, exact }, tell, signal) {
    if (!hasStatistics(tensor.dtype)) return null;
    const source = await sourceOf(tensor, signal);
    const runs = runsOf(tensor, most);
    const read = runs.reduce((total, [begin, end]) => total + end - begin, 0);
    const counter = counterOf(tensor.dtype);
    const passes = exact && !counter.isExact ? 2 : 1;
    let done = 0;
    const pass = async (take) => {
      for (const [begin, end] of runs) {
        for await (const piece of streamRange(source, begin, end, { signal, pieceBytes: PIECE })) {
          take(piece);
          tell((done += piece.length) / (read * passes));
        }
      }
    };
    await pass((piece) => counter.add(piece));
    const found = { ...counter.told(), read, isSample: read < tensor.nbytes, isExact: true };
    if (found.min === null) return { ...found, bins: [] };
    if (passes === 1) return { ...found, bins: counter.bins(bins, found), isExact: counter.isExact };
    const [counted, numbers] = [new Bins(found.min, found.max, bins), new Numbers(tensor.dtype)];
    await pass((piece) => counted.addAll(numbers.of(piece)));
    return { ...found, bins: counted.counts };
  },

  async picture({ tensor, layout, window, cells, kind }, tell, signal) {
    return picture(await reading(tensor, signal), tensor, { layout, window, cells, kind }, tell);
  },

  /** Values as text: `rows` by `columns` of them from a corner on. */
  async values({ tensor, layout, row, rows, column, columns }, tell, signal) {
    // Rows that lie across the memory are read as columns.
    if (layout.down > layout.across) {
      const turned = { ...layout, down: layout.across, across: layout.down };
      const lines = await JOBS.values(
        { tensor, layout: turned, row: column, rows: columns, column: row, columns: rows },
        tell,
        signal,
      );
      return (lines[0] ?? []).map((_, at) => lines.map((line) => line[at]));
    }
    const matrix = new Matrix(tensor.shape, layout);
    const numbers = Array.from({ length: Math.max(0, Math.min(rows, matrix.down - row)) }, (_, n) => row + n);
    const texts = [];
    const count = Math.max(0, Math.min(columns, matrix.across - column));
    const take = (number, values) => (texts[number] = asTexts(tensor.dtype, values));
    await (await reading(tensor, signal))(matrix, numbers, { first: column, count }, take);
    return texts;
  },

  /** Which of these names match all of these regular expressions, as 0 or 1. */
  async matching({ names, patterns }) {
    const expressions = patterns.map((pattern) => new RegExp(pattern, "u"));
    return Uint8Array.from(names, (name) => expressions.every((expression) => expression.test(name)));
  },

  /** Of pairs of tensors, in their order; `tell` is given those that were found since, as pairs of place and what was found. */
  async distances({ pairs }, tell, signal) {
    const found = [];
    let [news, last] = [[], 0];
    const take = (place, one) => {
      news.push([place, found[place] = one]);
      if (performance.now() - last < TELLS) return;
      tell(news);
      [news, last] = [[], performance.now()];
    };
    await distances(pairs, (tensor) => sourceOf(tensor, signal), take, signal);
    return found;
  },
};

const running = new Map();

async function run({ number, job, given }) {
  const controller = new AbortController();
  running.set(number, controller);
  let last = 0;
  // Pictures are told of each time, and what was found.
  const tell = (progress) => {
    const now = performance.now();
    if (typeof progress === "number" && now - last < TELLS) return;
    last = now;
    postMessage({ number, progress });
  };
  try {
    postMessage({ number, result: await JOBS[job](given, tell, controller.signal) });
  } catch (error) {
    postMessage({
      number,
      error: { name: error?.name, message: String(error?.message ?? error), code: error?.code ?? null },
    });
  }
  running.delete(number);
}

/** Listens for jobs: `{number, job, given}`, or `{number}` to cancel one. */
export function listen() {
  addEventListener("message", ({ data }) => (data.job ? run(data) : running.get(data.number)?.abort()));
}
