/** Any memory: a buffer, or a view of a part of one. */
export type Bytes = ArrayBuffer | SharedArrayBuffer | ArrayBufferView;

export type Format = "safetensors" | "bintensors";

export type Dtype =
  | "BOOL"
  | "F4"
  | "F6_E2M3"
  | "F6_E3M2"
  | "U8"
  | "I8"
  | "F8_E5M2"
  | "F8_E4M3"
  | "F8_E8M0"
  | "F8_E4M3FNUZ"
  | "F8_E5M2FNUZ"
  | "I16"
  | "U16"
  | "F16"
  | "BF16"
  | "I32"
  | "U32"
  | "F32"
  | "C64"
  | "F64"
  | "I64"
  | "U64";

/** The header's entry of one tensor. A plain object, which can be cloned and sent to a worker. */
export interface Tensor {
  /** Any text, unescaped: see `escapeName`. */
  readonly name: string;
  readonly dtype: Dtype;
  /**
   * Elements along each dimension, outermost first; empty for a scalar. Exact if the tensor has elements. In an empty
   * tensor, a dimension of 2^53 or more is rounded to the nearest double.
   */
  readonly shape: readonly number[];
  /** The exact dimensions of an empty tensor whose `shape` is rounded. Absent for all other tensors. */
  readonly exactShape?: readonly bigint[];
  /** First byte, counted from the start of the data section. */
  readonly begin: number;
  /** Byte after the last, counted from the start of the data section. */
  readonly end: number;
  /** `end - begin`. */
  readonly nbytes: number;
}

/**
 * The proven header of one file: the tensors cover the data section exactly, without holes or overlaps, every size is
 * shape times dtype, and names are unique.
 */
export interface Header extends Iterable<Tensor> {
  readonly format: Format;
  /** In the order of the file; null if the file has no metadata, which differs from empty metadata. */
  readonly metadata: ReadonlyMap<string, string> | null;
  /** The tensors in data order. */
  readonly tensors: readonly Tensor[];
  /** The start of the data section, in bytes from the start of the file. */
  readonly dataStart: number;
  /** The size of the file in bytes. */
  readonly fileSize: number;
  /** The number of tensors. */
  readonly size: number;
  get(name: string): Tensor | undefined;
  has(name: string): boolean;
  /** In data order. `[...header.names()].sort(compareNames)` returns Python's order. */
  names(): IterableIterator<string>;
}

/** The index of a sharded checkpoint. */
export interface ShardIndex {
  /** The file of each tensor, in the order of the index. */
  readonly weightMap: ReadonlyMap<string, string>;
  /** The files in the order of their names: relative paths that stay below the index. */
  readonly shards: readonly string[];
  /** All other fields of the index, with values of any type. */
  readonly metadata: Readonly<Record<string, unknown>> | null;
  /** The same in the spelling of the file. */
  readonly metadataText: string | null;
  /** The size of all tensors in bytes according to the index. It is not checked. */
  readonly totalSize: number | null;
}

/** The headers of a model of one or many files. */
export interface Model extends Iterable<{ readonly shard: string; readonly tensor: Tensor }> {
  /** The source: the address without its query, or the name of the file; null for a Blob without a name. */
  readonly path: string | null;
  /** The index; null if the model is one file. */
  readonly index: ShardIndex | null;
  /** The header of each file, by the file's name in the index. */
  readonly shards: ReadonlyMap<string, Header>;
  /** The contents of `config.json`, if it was requested and exists. */
  readonly config: Readonly<Record<string, unknown>> | null;
  /** Harmless oddities of the model. */
  readonly warnings: readonly string[];
  /** The number of tensors. */
  readonly size: number;
  get(name: string): { readonly shard: string; readonly tensor: Tensor } | undefined;
  has(name: string): boolean;
  /**
   * Reads a tensor, or its rows `begin` to before `end`, as numbers. Only their bytes are read. Besides the values, one
   * piece of 3 MiB is in memory. An unknown name throws a `SafetensorError` with the nearest name. Rows outside the
   * tensor throw a `RangeError`.
   */
  readTensor(
    name: string,
    options?: { rows?: readonly [begin: number, end: number]; signal?: AbortSignal },
  ): Promise<ReadTensor>;
}

/** The values of a tensor, or of rows of it. */
export interface ReadTensor<Name extends Dtype = Dtype> {
  readonly name: string;
  readonly dtype: Name;
  /** The shape of the values. */
  readonly shape: readonly number[];
  /** The values in C order, in the type of array that `decode` returns for the dtype. */
  readonly values: Decoded[Name];
}

export interface HeaderOptions {
  /** The longest accepted header in bytes: by default 100,000,000 from memory and files, and 25,000,000 from a URL. */
  maxHeaderBytes?: number;
  /** Reject unambiguous headers that are not in the form for writers, with the code `not-strict`. */
  strict?: boolean;
}

export interface ParseOptions extends HeaderOptions {
  /** The size of the whole file. By default, the size of the given bytes. */
  fileSize?: number;
  /** The name of the file in errors. */
  path?: string;
}

export interface ReadOptions extends HeaderOptions {
  /**
   * The function to use instead of the global `fetch`. It must support `headers`, `signal` and `redirect: "manual"`.
   */
  fetch?: typeof globalThis.fetch;
  /**
   * Headers for the host of the URL. Other hosts after a redirect do not get them. Browsers follow redirects themselves
   * and remove only `Authorization`, so a redirect with other headers throws `redirect-refused` there.
   */
  headers?: HeadersInit;
  /**
   * Whether redirects to other hosts in private networks are followed. `false`. Only the host in the URL is checked:
   * names that resolve to a private address are not detected, because `fetch` hides the resolution.
   */
  allowPrivateRedirects?: boolean;
  /** Ends the reading; the promise is then rejected with `signal.reason`. */
  signal?: AbortSignal;
  /** The size of the first request in bytes. A second request follows only if the header is longer. 131,072. */
  firstBytes?: number;
  /**
   * The timeout of a request in milliseconds. 60,000. For a range of `readRange` and `streamRange` it limits each wait
   * for the next bytes; all waits together may take longer by the time that the bytes need at 1 KiB a second.
   */
  timeout?: number;
  /** The number of retries after a failure of the network or an answer 408, 429, 500, 502, 503 or 504. 2. */
  retries?: number;
  /** The host for `hf://`. `https://huggingface.co`. */
  hub?: string;
}

export interface ModelOptions extends ReadOptions {
  /** The number of headers that are fetched in parallel. 20. */
  concurrency?: number;
  /** Whether to read `config.json`, which is needed to count parameters; or its contents. */
  config?: boolean | object;
  /** Returns the address of a shard that is not beside the index, such as a signed address. */
  shardUrl?: (shard: string, indexUrl: URL) => string | URL;
}

/**
 * A fault of a file, or of reading it. Arguments of the wrong type throw a `TypeError`, and an aborted signal throws
 * its own reason.
 */
export declare class SafetensorError extends Error {
  readonly name: "SafetensorError";
  /**
   * A stable word: that of the rule in FORMAT.md, or `invalid-url`, `network`, `timeout`, `http-status`,
   * `redirect-refused`, `range-ignored`, `wrong-range`, `content-encoded`, `malformed-response`, `short-read`,
   * `changed`, `read`,
   * `no-checkpoint`, `ambiguous-checkpoint`, `missing-shards`, `missing-tensor`, `extra-tensor`,
   * `tensor-in-two-shards`, `unknown-tensor`, `invalid-config`, `config-too-large`.
   */
  readonly code: string | null;
  /** The number of the rule in FORMAT.md that is broken, such as `F9`. */
  readonly rule: string | null;
  /** The name of the file, or its address without secret parts. */
  readonly path: string | null;
  /** The tensor, not escaped. */
  readonly tensor: string | null;
  readonly expected: number | bigint | null;
  readonly found: number | bigint | null;
  /** The bytes in question, counted from the start of the data section. */
  readonly begin: number | bigint | null;
  readonly end: number | bigint | null;
  /** The server's answer, if it is the fault. */
  readonly status: number | null;
  constructor(message: string, fields?: Partial<Omit<SafetensorError, keyof Error>> & { cause?: unknown });
}

export declare const MAX_HEADER_BYTES: 100_000_000;
export declare const MAX_REMOTE_HEADER_BYTES: 25_000_000;
export declare const MAX_INDEX_BYTES: 250_000_000;

/** Bits per element, by dtype. */
export declare const DTYPES: ReadonlyMap<Dtype, number>;

/** The number of bytes at the start of a file that `parseHeader` needs. `start` has at least the first 8 of them. */
export declare function headSize(start: Bytes, options: ParseOptions & { fileSize: number }): number;

/** Parses the header at the start of a file. `start` is the whole file, or at least its first `headSize` bytes. */
export declare function parseHeader(start: Bytes, options?: ParseOptions): Header;

/** Parses the index in `bytes`, which must be the whole file. */
export declare function parseIndex(bytes: Bytes, options?: { path?: string }): ShardIndex;

/**
 * Reads the header of a file in memory, of a `File` or `Blob`, or at a URL. Text is a URL, or an address of the Hub
 * such as `hf://owner/name/model.safetensors`. Only the header is read, by one request, or by two if it is longer than
 * `firstBytes`. In Node, text without a scheme is a path. A source of `openSource` keeps its own options.
 */
export declare function readHeader(
  source: Bytes | Blob | Source | URL | string,
  options?: ReadOptions,
): Promise<Header>;

/** Reads the index of a sharded checkpoint, from the same sources. */
export declare function readIndex(
  source: Bytes | Blob | Source | URL | string,
  options?: ReadOptions,
): Promise<ShardIndex>;

/**
 * Reads the headers of a model. `source` is the address of a file, an index, a directory (with a slash at the end) or a
 * repository of the Hub; in Node also the path of a file, an index or a directory; or a `File`, or all files of a
 * folder; or one or several results of `openSource`. The shards are compared with the index.
 */
export declare function readModel(
  source: URL | string | Blob | Source | Iterable<File | Source>,
  options?: ModelOptions,
): Promise<Model>;

export interface ParameterCount {
  /** The number of parameters by dtype, in the order of first use. */
  readonly parameterCount: Readonly<Partial<Record<Dtype, number>>>;
  /** The total of all dtypes, or `total_parameters` of the metadata if that is less. */
  readonly parameterTotal: number;
}

export interface CountOptions {
  /**
   * `logical` (the default) counts the parameters before quantisation, as huggingface.js 2.17.5 does. `stored` counts
   * the elements in the files.
   */
  count?: "logical" | "stored";
  /** The contents of `config.json`, in place of the model's. Without any, nothing counts as quantised. */
  config?: object | null;
}

export declare function parameterCount(source: Header | Model, options?: CountOptions): ParameterCount;

export interface TensorRange {
  /** The file in the model; null for a header. */
  readonly shard: string | null;
  /** First byte, counted from the start of the file. */
  readonly position: number;
  readonly nbytes: number;
}

/** Returns the position of a tensor's bytes: `readRange(source, position, position + nbytes)` reads them. */
export declare function tensorRange(source: Header | Model, name: string): TensorRange;

/** Returns the URL of `hf://[models/|datasets/|spaces/]owner/name[@revision][/path]`. */
export declare function hubUrl(address: string, options?: { hub?: string }): URL;

/**
 * Escapes every character of a text from a file that could control a terminal, or reorder or hide text. This is not
 * HTML escaping: set `textContent`.
 */
export declare function escapeName(text: string): string;

/** Returns the escaped text between backticks, cut after 200 characters. */
export declare function quoteName(name: string): string;

/** Compares names by the bytes of their UTF-8, the order of names everywhere in ingot. For `Array.prototype.sort`. */
export declare function compareNames(a: string, b: string): number;

/** An object to read ranges from. `openSource` returns one, and any object with these three properties is one. */
export interface Source {
  /** The name in errors: the name of the file, or the address without secret parts. */
  readonly name: string | null;
  /** The size of the file in bytes. */
  readonly size: number;
  /** For a URL, the version that every answer must have; null if the server sent the whole file. */
  readonly version?: string | null;
  /** Reads the bytes from `begin` to before `end`, counted from the start of the file. */
  read(begin: number, end: number, signal?: AbortSignal): Promise<Uint8Array>;
}

export interface OpenOptions extends
  Pick<
    ReadOptions,
    "fetch" | "headers" | "allowPrivateRedirects" | "firstBytes" | "timeout" | "retries" | "hub"
  > {
  /** Ends the opening. Later reads have signals of their own. */
  signal?: AbortSignal;
  /** The name of the file in errors, in place of its address. */
  name?: string;
  /** The `version` of a source of the same file. Opening fails if the file has another version. */
  version?: string | null;
}

/**
 * Opens a file. In Node, text without a scheme and `file:` URLs are paths: `openSource("m.safetensors")`. Each read
 * opens the file, so there is nothing to close. Other text is an address, which takes one request: the answer has the
 * size and the version of the file. Later reads return the same version, or throw a `SafetensorError` with the code
 * `changed`. The first bytes are kept, so that `readHeader` needs no other request if they hold the header. Memory is
 * not copied and must not change.
 */
export declare function openSource(source: Bytes | Blob | URL | string, options?: OpenOptions): Promise<Source>;

export interface RangeOptions {
  /** Ends the reading; the promise is then rejected with `signal.reason`. */
  signal?: AbortSignal;
}

/**
 * Reads all bytes from `begin` to before `end`, counted from the start of the file. `into` is a buffer of `end - begin`
 * bytes, which is filled and returned without another allocation of that size. After an error it may hold a part of the
 * range.
 *
 * A range outside the file, or `into` of another length, throws a `RangeError`. An address throws a `TypeError`: open
 * it first, so that all ranges are of one version.
 */
export declare function readRange(
  source: Source | Blob | Bytes,
  begin: number,
  end: number,
  options?: RangeOptions,
): Promise<Uint8Array>;
export declare function readRange<Into extends Uint8Array>(
  source: Source | Blob | Bytes,
  begin: number,
  end: number,
  options: RangeOptions & { into: Into },
): Promise<Into>;

/**
 * Reads the same bytes in pieces of `pieceBytes` (3,145,728, a whole number of elements of every dtype). Only one piece
 * is in memory at a time: the next piece overwrites it, unless its buffer was transferred. Leaving the loop ends the
 * request.
 */
export declare function streamRange(
  source: Source | Blob | Bytes,
  begin: number,
  end: number,
  options?: RangeOptions & { pieceBytes?: number },
): AsyncGenerator<Uint8Array, void, void>;

/**
 * The array type for the elements of each dtype. Floats below 32 bits are exact in `Float32Array`. An element of `C64`
 * takes two places.
 */
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

/** The dtypes with a table of the values of all bit patterns. */
export type TableDtype = Extract<Dtype, `F4` | `F6_${string}` | `F8_${string}` | "F16" | "BF16">;

/**
 * Returns the value of each bit pattern: `valuesOf("F8_E4M3")[0x38]` is 1. Created once: do not write to it. Any other
 * dtype throws a `RangeError`.
 */
export declare function valuesOf(dtype: TableDtype): Float32Array;

export interface DecodeOptions<Name extends Dtype> {
  /** The first element to decode. 0. */
  first?: number;
  /** The distance from one element to the next, 1 or more. 1. */
  step?: number;
  /** The number of elements. By default all. */
  count?: number;
  /** An array with at least `count` places (`C64`: twice as many), which is filled from its start and returned. */
  into?: Decoded[Name];
}

/**
 * Decodes the elements in `bytes`, or every `step`-th of them. `bytes` holds whole elements as stored in a file, with
 * any alignment. The result shares no memory with `bytes`. Bytes that end inside an element, elements out of range and
 * unknown dtypes throw a `RangeError`.
 */
export declare function decode<Name extends Dtype>(
  dtype: Name,
  bytes: Bytes,
  options?: DecodeOptions<Name>,
): Decoded[Name];

export interface NewTensor {
  /** Optional for a typed array, whose type implies it: `Float32Array` is `F32`, `Uint8Array` is `U8`. */
  dtype?: Dtype;
  shape: readonly number[];
  /** The elements as the file stores them, little-endian and packed. */
  data: Bytes | Blob | AsyncIterable<Uint8Array>;
}

/**
 * Returns the bytes of a `.safetensors` file as a stream: byte for byte the file that ingot writes in Python. Only one
 * piece of the data is in memory at a time. A file that readers would reject throws a `SafetensorError` before the
 * first byte. The stream fails if the length of a `Blob` or a stream of data does not match its dtype and shape.
 *
 * Entries of `metadata` that describe the tensors of another file, such as digests, are left out.
 */
export declare function writeSafetensors(
  tensors:
    | ReadonlyMap<string, NewTensor>
    | Iterable<readonly [string, NewTensor]>
    | Readonly<Record<string, NewTensor>>,
  metadata?:
    | ReadonlyMap<string, string>
    | Iterable<readonly [string, string]>
    | Readonly<Record<string, string>>
    | null,
): ReadableStream<Uint8Array>;
