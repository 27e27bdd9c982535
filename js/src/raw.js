// Shared by both formats: element types, and parsed headers that are not yet checked against their files.

import { Fault, leastName, quoteName } from "./errors.js";

// --- Element types ---

/** [bits, number in `.bt`] of each dtype, in the order of FORMAT.md. */
const DTYPE_TABLE = {
  BOOL: [8, 0],
  F4: [4, null],
  F6_E2M3: [6, null],
  F6_E3M2: [6, null],
  U8: [8, 1],
  I8: [8, 2],
  F8_E5M2: [8, 3],
  F8_E4M3: [8, 4],
  F8_E8M0: [8, null],
  F8_E4M3FNUZ: [8, null],
  F8_E5M2FNUZ: [8, null],
  I16: [16, 5],
  U16: [16, 6],
  F16: [16, 7],
  BF16: [16, 8],
  I32: [32, 9],
  U32: [32, 10],
  F32: [32, 11],
  C64: [64, null],
  F64: [64, 12],
  I64: [64, 13],
  U64: [64, 14],
};

/**
 * Bits per element, by dtype.
 *
 * @type {ReadonlyMap<any, number>}
 */
export const DTYPES = new Map(Object.entries(DTYPE_TABLE).map(([dtype, [bits]]) => [dtype, bits]));

export const DTYPE_OF_BINTENSORS = new Map(Object.entries(DTYPE_TABLE).map(([dtype, [, number]]) => [number, dtype]));

// --- Headers ---

export const PREFIX_NBYTES = 8;

export const METADATA_KEY = "__metadata__";

/** The claims of a header, not yet checked against the file: rules F4 to F8. */
export class RawHeader {
  constructor(format) {
    this.format = format;
    this.tensors = [];
    /** Pairs; null if there is no metadata, which differs from empty metadata. */
    this.metadata = null;
  }

  add(name, dtype, shape, begin, end) {
    this.tensors.push({ name, dtype, shape, begin, end, nbytes: 0 });
  }
}

/** F7 for metadata. Keys are not stored in a second list: there may be millions. */
export class MetadataBuilder {
  constructor() {
    this.map = new Map();
    this.repeated = [];
  }

  add(key, value) {
    if (this.map.has(key)) this.repeated.push(key);
    this.map.set(key, value);
  }

  finish() {
    if (this.repeated.length > 0) throw duplicateMetadataKey(leastName(this.repeated), "F7");
    return this.map;
  }
}

export function duplicateMetadataKey(key, rule) {
  return new Fault("duplicate-metadata-key", rule, `metadata key ${quoteName(key)}: it occurs twice`);
}

export function unknownDtype(tensor, dtype) {
  return new Fault("unknown-dtype", "F8", `unknown dtype ${quoteName(dtype)}`, { tensor });
}

export function headerTooLarge(found, limit) {
  const reason = `header too large: expected at most ${limit} bytes, found ${found}`;
  return new Fault("header-too-large", "F2", reason, { expected: limit, found });
}
