import type { Bytes, Dtype } from "./safetensors.js";

export interface NewTensor {
  /** Optional for a typed array, whose elements have one: `Float32Array` is `F32`, `Uint8Array` is `U8`. */
  dtype?: Dtype;
  shape: readonly number[];
  /** The elements as the file stores them, little-endian and packed. */
  data: Bytes | Blob | AsyncIterable<Uint8Array>;
}

/**
 * Returns the bytes of a `.safetensors` file as a stream: byte for byte the file that ingot writes in Python. One piece
 * of the data is in memory at a time. What no reader accepts throws a `SafetensorError` before the first byte; the
 * stream fails if a `Blob` or a stream of data has another length than its dtype and shape need.
 *
 * Entries of `metadata` that describe the tensors of another file, such as digests, are left out.
 */
export declare function writeSafetensors(
  tensors: ReadonlyMap<string, NewTensor> | Iterable<readonly [string, NewTensor]> | Readonly<Record<string, NewTensor>>,
  metadata?:
    | ReadonlyMap<string, string>
    | Iterable<readonly [string, string]>
    | Readonly<Record<string, string>>
    | null,
): ReadableStream<Uint8Array>;
