// Work on bytes outside the page's thread: several jobs may run at once, and each can be cancelled.

import { streamRange } from "../src/source.js";
import { Bins, counterOf, hasStatistics } from "./count.js";
import { distances } from "./distance.js";
import { reopened } from "./doors.js";
import { asTexts, Matrix, readLines } from "./lines.js";
import { Numbers } from "./numbers.js";
import { npyOf, npyOfRows } from "./npy.js";
import { picture } from "./picture.js";
import { readMeant } from "./unpack.js";

/**
 * Bytes of a piece: the size of a reused buffer, and the interval at which cancellation is noticed. It is less than a
 * browser buffers of an unread answer, so that the network continues while a piece is counted.
 */
const PIECE = 3 << 16;
/** Milliseconds between two progress reports. */
const TELLS = 33;
/** A sample is read in runs of this many bytes. */
const RUN = 1 << 18;

/** A matrix in the order of its memory. */
const AS_STORED = { down: 0, across: 1 };

const opened = new Map();

/** The file of a wire, opened once. */
function sourceOf({ wire }, signal) {
  if (wire.blob || wire.report) return reopened(wire, signal);
  const key = `${wire.url} ${wire.known?.version}`;
  if (!opened.has(key)) {
    opened.set(key, reopened(wire));
    opened.get(key).catch(() => opened.delete(key));
  }
  return opened.get(key);
}

/** Runs of a tensor to read: all of it, or a sample of at most `most` bytes, spread evenly. */
function runsOf({ nbytes, position }, most) {
  if (nbytes <= most) return [[position, position + nbytes]];
  const runs = Math.max(1, Math.floor(most / RUN));
  // Multiples of 24 bytes are whole elements of every dtype.
  const at = (n) => Math.floor((n * (nbytes - RUN)) / Math.max(1, runs - 1) / 24) * 24;
  const length = Math.floor(RUN / 24) * 24;
  return Array.from({ length: runs }, (_, n) => [position + at(n), position + Math.min(nbytes, at(n) + length)]);
}

/** How rows of a tensor are read: as they are stored, or decoded from several tensors. */
async function reading(tensor, signal) {
  if (tensor.scheme) return (_, rows, columns, take) => readMeant(sourceOf, tensor, rows, columns, take, signal);
  const source = await sourceOf(tensor, signal);
  return (matrix, rows, columns, take) => readLines(source, tensor, matrix, rows, columns, take, signal);
}

const JOBS = {
  /** Statistics of the values. `most` bytes are read; `exact` counts a histogram in a second pass if one is needed. */
  async statistics({ tensor, bins, most, exact }, onProgress, signal) {
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
          onProgress((done += piece.length) / (read * passes));
        }
      }
    };
    await pass((piece) => counter.add(piece));
    const found = { ...counter.result(), read, isSample: read < tensor.nbytes, isExact: true };
    if (found.min === null) return { ...found, bins: [] };
    if (passes === 1) return { ...found, bins: counter.bins(bins, found), isExact: counter.isExact };
    const [counted, numbers] = [new Bins(found.min, found.max, bins), new Numbers(tensor.dtype)];
    await pass((piece) => counted.addAll(numbers.of(piece)));
    return { ...found, bins: counted.counts };
  },

  /** Statistics of many tensors, without histograms; null for dtypes that have none. */
  async health({ tensors }, onProgress, signal) {
    const total = tensors.reduce((sum, { nbytes }) => sum + nbytes, 0);
    const found = [];
    let done = 0;
    for (const tensor of tensors) {
      const onPart = (part) => onProgress((done + part * tensor.nbytes) / total);
      found.push(await JOBS.statistics({ tensor, bins: 1, most: Infinity, exact: false }, onPart, signal));
      done += tensor.nbytes;
    }
    return found;
  },

  /** The index of the first value that is `nan` or `infinite`, in the order of the file; null if all are finite. */
  async first({ tensor, what }, onProgress, signal) {
    const isSought = what === "nan" ? Number.isNaN : (value) => value === Infinity || value === -Infinity;
    const { nbytes, position, dtype } = tensor;
    const numbers = new Numbers(dtype);
    const places = dtype === "C64" ? 2 : 1;
    let [done, read] = [0, 0];
    const source = await sourceOf(tensor, signal);
    for await (const piece of streamRange(source, position, position + nbytes, { signal, pieceBytes: PIECE })) {
      const values = numbers.of(piece);
      const at = values.findIndex(isSought);
      if (at >= 0) return Math.floor((done + at) / places);
      done += values.length;
      onProgress((read += piece.length) / nbytes);
    }
    return null;
  },

  /** A NumPy file of all values, as a blob. */
  async npy({ tensor }, onProgress, signal) {
    if (tensor.scheme) {
      return npyOfRows(await reading(tensor, signal), tensor, new Matrix(tensor.shape, AS_STORED), onProgress);
    }
    return npyOf(await sourceOf(tensor, signal), tensor, PIECE, onProgress, signal);
  },

  async picture({ tensor, layout, window, cells, kind }, onProgress, signal) {
    return picture(await reading(tensor, signal), tensor, { layout, window, cells, kind }, onProgress);
  },

  /** Values as text: `rows` by `columns` of them from a given corner. */
  async values({ tensor, layout, row, rows, column, columns }, onProgress, signal) {
    // Rows across the memory order are read as columns.
    if (layout.down > layout.across) {
      const turned = { ...layout, down: layout.across, across: layout.down };
      const lines = await JOBS.values(
        { tensor, layout: turned, row: column, rows: columns, column: row, columns: rows },
        onProgress,
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

  /** Returns for each name whether it matches all of these regular expressions, as 0 or 1. */
  async matching({ names, patterns }) {
    const expressions = patterns.map((pattern) => new RegExp(pattern, "u"));
    return Uint8Array.from(names, (name) => expressions.every((expression) => expression.test(name)));
  },

  /** Compares pairs of tensors in order; `onProgress` is called with the new results, as pairs of place and result. */
  async distances({ pairs }, onProgress, signal) {
    const found = [];
    let [news, last] = [[], 0];
    const take = (place, one) => {
      news.push([place, found[place] = one]);
      if (performance.now() - last < TELLS) return;
      onProgress(news);
      [news, last] = [[], performance.now()];
    };
    await distances(pairs, (tensor) => sourceOf(tensor, signal), take, signal);
    return found;
  },
};

const running = new Map();

async function run({ number, job, input }) {
  const controller = new AbortController();
  running.set(number, controller);
  let last = 0;
  // Pictures and results are always reported, numbers only now and then.
  const onProgress = (progress) => {
    const now = performance.now();
    if (typeof progress === "number" && now - last < TELLS) return;
    last = now;
    postMessage({ number, progress });
  };
  try {
    postMessage({ number, result: await JOBS[job](input, onProgress, controller.signal) });
  } catch (error) {
    postMessage({
      number,
      error: { name: error?.name, message: String(error?.message ?? error), code: error?.code ?? null },
    });
  }
  running.delete(number);
}

/** Listens for jobs: `{number, job, input}`, or `{number}` to cancel one. */
export function listen() {
  addEventListener("message", ({ data }) => (data.job ? run(data) : running.get(data.number)?.abort()));
}
