// The tensors of a model as columns, by number, over the proven headers.

import { parameterCount } from "../src/parameters.js";
import { DTYPES } from "../src/raw.js";

export const DTYPE_NAMES = [...DTYPES.keys()];
export const DTYPE_NUMBERS = new Map(DTYPE_NAMES.map((dtype, number) => [dtype, number]));

export class Table {
  /**
   * `format` is the original format of files that were converted for the page. Byte positions in the original are
   * unknown.
   */
  constructor(model, sources, label, { format = null, isServed = false, adapterConfig = null, warnings = [] } = {}) {
    this.model = model;
    this.label = label;
    this.isServed = isServed;
    /** The contents of `adapter_config.json` beside the files, if there is one. */
    this.adapterConfig = adapterConfig;
    this.isRemote = format !== null;
    /** Files by their names in the model. */
    this.files = [...model.shards].map(([name, header]) => ({ name, header, source: sourceOf(sources, name, model) }));
    /** Oddities: a code, and a description. */
    this.warnings = [...warnings, ...model.warnings.map((text) => ["total-size", text])];
    this.format = format ?? this.files[0].header.format;
    this.tensors = this.files.flatMap(({ header }) => header.tensors);
    const { length } = this.tensors;
    this.file = new Uint32Array(length);
    this.elements = new Float64Array(length);
    this.dtype = new Uint8Array(length);
    this.#numbers = null;
    let at = 0;
    for (const [number, { header }] of this.files.entries()) {
      for (const { dtype, shape, nbytes } of header.tensors) {
        this.file[at] = number;
        this.elements[at] = nbytes === 0 ? 0 : shape.reduce((product, dim) => product * dim, 1);
        this.dtype[at++] = DTYPE_NUMBERS.get(dtype);
      }
    }
  }

  #numbers;

  /** The number of the tensor with this name; undefined if the model lacks it. */
  numberOf(name) {
    this.#numbers ??= new Map(this.tensors.map((tensor, number) => [tensor.name, number]));
    return this.#numbers.get(name);
  }

  /** First byte of a tensor, counted from the start of its file. */
  position(number) {
    return this.files[this.file[number]].header.dataStart + this.tensors[number].begin;
  }

  /** The data from which a worker can read a tensor. */
  wired(number) {
    const { dtype, shape, nbytes } = this.tensors[number];
    return { wire: this.files[this.file[number]].source.wire, dtype, shape, nbytes, position: this.position(number) };
  }

  get nbytes() {
    return this.files.reduce((total, { header }) => total + header.fileSize, 0);
  }

  /**
   * Parameters as they are stored, which are all elements, and before quantisation. The second count leaves scalars
   * out, which makes no difference by itself.
   */
  counts() {
    const stored = this.elements.reduce((sum, one) => sum + one, 0);
    const { parameterTotal } = parameterCount(this.model);
    const scalars = this.tensors.filter(({ shape }) => shape.length === 0).length;
    return { stored, logical: parameterTotal + scalars === stored ? stored : parameterTotal };
  }

  /** The metadata of the only file, or of the index and all files together. */
  metadata() {
    const found = new Map();
    for (const { header } of this.files) for (const [key, value] of header.metadata ?? []) found.set(key, value);
    for (const [key, value] of Object.entries(this.model.index?.metadata ?? {})) {
      found.set(key, typeof value === "string" ? value : JSON.stringify(value));
    }
    return found;
  }
}

function sourceOf(sources, name, model) {
  const base = (model.path ?? "").replace(/[^/]*$/, "");
  const pathOf = (source) => source.webkitRelativePath || source.name;
  return sources.find((source) => pathOf(source) === base + name) ??
    sources.find((source) => pathOf(source) === name) ?? sources[0];
}
