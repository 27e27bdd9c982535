import type { Bytes, Dtype } from "./safetensors.js";

/** What holds the elements of each dtype. Floats below 32 bits are exact in `Float32Array`; `C64` takes two places. */
export interface Decoded {
  BOOL: Uint8Array;
  F4: Float32Array;
  F6_E2M3: Float32Array;
  F6_E3M2: Float32Array;
  U8: Uint8Array;
  I8: Int8Array;
  F8_E5M2: Float32Array;
  F8_E4M3: Float32Array;
  F8_E8M0: Float32Array;
  F8_E4M3FNUZ: Float32Array;
  F8_E5M2FNUZ: Float32Array;
  I16: Int16Array;
  U16: Uint16Array;
  F16: Float32Array;
  BF16: Float32Array;
  I32: Int32Array;
  U32: Uint32Array;
  F32: Float32Array;
  C64: Float32Array;
  F64: Float64Array;
  I64: BigInt64Array;
  U64: BigUint64Array;
}

/** The class of each array in `Decoded`. */
export declare const DECODED: ReadonlyMap<Dtype, new (places: number) => Decoded[Dtype]>;

/** The dtypes of which a table holds the value of every bit pattern. */
export type TableDtype = Extract<Dtype, `F4` | `F6_${string}` | `F8_${string}` | "F16" | "BF16">;

/**
 * The value of each bit pattern: `valuesOf("F8_E4M3")[0x38]` is 1. Made once, and not to be written to. Any other dtype
 * throws a `RangeError`.
 */
export declare function valuesOf(dtype: TableDtype): Float32Array;

export interface DecodeOptions<Name extends Dtype> {
  /** The first element that is decoded. 0. */
  first?: number;
  /** Elements from one to the next, 1 or more. 1. */
  step?: number;
  /** How many elements; as many as there are. */
  count?: number;
  /** An array with `count` places or more (`C64`: twice as many), which is filled from its start and given back. */
  into?: Decoded[Name];
}

/**
 * The elements in `bytes`, which are whole ones as they lie in a file, at any address; or every `step`-th of them. What
 * comes back shares no memory with `bytes`. Bytes that end inside an element, elements that are not there and unknown
 * dtypes throw a `RangeError`.
 */
export declare function decode<Name extends Dtype>(
  dtype: Name,
  bytes: Bytes,
  options?: DecodeOptions<Name>,
): Decoded[Name];
