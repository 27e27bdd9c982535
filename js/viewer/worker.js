// Work on bytes outside the page's thread: several jobs may run at once, and each can be cancelled.

import { streamRange } from "../src/source.js";
import { Bins, counterOf, hasStatistics } from "./count.js";
import { difference } from "./difference.js";
import { distances } from "./distance.js";
import { reopened } from "./doors.js";
import { asTexts, Matrix, readLines } from "./lines.js";
import { Numbers } from "./numbers.js";
import { npyOf, npyOfRows } from "./npy.js";
import { picture } from "./picture.js";
import { readMeant } from "./unpack.js";

/**
 * Bytes of a piece: the size of a reused buffer, and the interval at which cancellation is noticed.
 * Browsers buffer more than this of an unread response, so the download continues while a piece is
 * counted.
 */
const PIECE = 3 << 16;
/** Milliseconds between two progress reports. */
const TELLS = 33;
/** A sample is read in runs of this many bytes. */
const RUN = 1 << 18;

/** A matrix in the order of its memory. */
const AS_STORED = { down: 0, across: 1 };

const opened = new Map();

/** Opens the file that a message describes, once. */
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

/** The passes over the values of a tensor: `most` bytes are read. */
class Scan {
  #runs;
  #done = 0;

  constructor(tensor, { most, exact }, onProgress, signal) {
    this.tensor = tensor;
    this.counter = counterOf(tensor.dtype);
    this.passes = exact && !this.counter.isExact ? 2 : 1;
    this.#runs = runsOf(tensor, most);
    this.read = this.#runs.reduce((total, [begin, end]) => total + end - begin, 0);
    this.onProgress = onProgress;
    this.signal = signal;
  }

  async #pass(take) {
    const source = await sourceOf(this.tensor, this.signal);
    for (const [begin, end] of this.#runs) {
      for await (const piece of streamRange(source, begin, end, { signal: this.signal, pieceBytes: PIECE })) {
        take(piece);
        this.onProgress((this.#done += piece.length) / (this.read * this.passes));
      }
    }
  }

  async count() {
    await this.#pass((piece) => this.counter.add(piece));
    return { ...this.counter.result(), read: this.read, isSample: this.read < this.tensor.nbytes };
  }

  /** The bins of a histogram over `range`. */
  async bins(length, range) {
    if (this.passes === 1) return { bins: this.counter.bins(length, range), isExact: this.counter.isExact };
    const [counted, numbers] = [new Bins(range.min, range.max, length), new Numbers(this.tensor.dtype)];
    await this.#pass((piece) => counted.addAll(numbers.of(piece)));
    return { bins: counted.counts, isExact: true };
  }
}

/** The range of the finite values of several tensors; null without any. */
function rangeOf(found) {
  const finite = found.filter((one) => one && one.min !== null);
  if (finite.length === 0) return null;
  return {
    min: Math.min(...finite.map(({ min }) => Number(min))),
    max: Math.max(...finite.map(({ max }) => Number(max))),
  };
}

const JOBS = {
  /** Statistics of the values. `most` bytes are read; `exact` counts a histogram in a second pass if one is needed. */
  async statistics({ tensor, bins, most, exact }, onProgress, signal) {
    return (await JOBS.histograms({ tensors: [tensor], bins, most, exact }, onProgress, signal))[0];
  },

  /** Statistics of several tensors, with histograms over one range. */
  async histograms({ tensors, bins, most, exact }, onProgress, signal) {
    const scans = tensors.map((tensor, place) => {
      const onPart = (part) => onProgress((place + part) / tensors.length);
      return hasStatistics(tensor.dtype) ? new Scan(tensor, { most, exact }, onPart, signal) : null;
    });
    const found = [];
    for (const scan of scans) found.push(scan && await scan.count());
    const range = rangeOf(found);
    for (const [place, one] of found.entries()) {
      if (one === null) continue;
      const counted = one.min === null ? { bins: [], isExact: true } : await scans[place].bins(bins, range);
      found[place] = { ...one, ...counted, range };
    }
    return found;
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

  /** A picture of the difference of two tensors of one shape, and its largest value. */
  async difference({ tensors, cells }, _, signal) {
    return difference(await Promise.all(tensors.map((tensor) => reading(tensor, signal))), tensors, cells);
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
