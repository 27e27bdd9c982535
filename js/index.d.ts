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

/** What a header says of one tensor. A plain object, which can be cloned and sent to a worker. */
export interface Tensor {
  /** Any text at all: see `escapeName`. */
  readonly name: string;
  readonly dtype: Dtype;
  /**
   * Elements along each dimension, outermost first; empty for a scalar. Exact for every tensor that has elements. In an
   * empty one, a dimension of 2^53 or more is the nearest double.
   */
  readonly shape: readonly number[];
  /** The dimensions of an empty tensor of which `shape` holds one only nearly. Absent everywhere else. */
  readonly exactShape?: readonly bigint[];
  /** First byte, counted from the start of the data section. */
  readonly begin: number;
  /** Byte after the last, counted likewise. */
  readonly end: number;
  /** `end - begin`. */
  readonly nbytes: number;
}

/**
 * The header of one file, proven: the tensors cover the data section exactly, without hole or overlap, every size is
 * shape times dtype, and every name is there once.
 */
export interface Header extends Iterable<Tensor> {
  readonly format: Format;
  /** In the order of the file; null where the file has none, which is not the same as having empty metadata. */
  readonly metadata: ReadonlyMap<string, string> | null;
  /** In the order of their data. */
  readonly tensors: readonly Tensor[];
  /** Where the data section begins, in bytes from the start of the file. */
  readonly dataStart: number;
  /** Bytes in the file. */
  readonly fileSize: number;
  /** How many tensors there are. */
  readonly size: number;
  get(name: string): Tensor | undefined;
  has(name: string): boolean;
  /** In the order of the data. `[...header.names()].sort(compareNames)` gives Python's order. */
  names(): IterableIterator<string>;
}

/** The index of a sharded checkpoint. */
export interface ShardIndex {
  /** The file of each tensor, in the order of the index. */
  readonly weightMap: ReadonlyMap<string, string>;
  /** The files, in the order of their names: relative paths that stay below the index. */
  readonly shards: readonly string[];
  /** What stands beside the weight map; its values are of any kind. */
  readonly metadata: Readonly<Record<string, unknown>> | null;
  /** The same as the file spells it. */
  readonly metadataText: string | null;
  /** Bytes that all tensors take, as the index says. Nobody checked it. */
  readonly totalSize: number | null;
}

/** The headers of a model of one or many files. */
export interface Model extends Iterable<{ readonly shard: string; readonly tensor: Tensor }> {
  /** What was opened: the address without its query, or the name of the file; null where a Blob has none. */
  readonly path: string | null;
  /** Null where the model is one file. */
  readonly index: ShardIndex | null;
  /** The header of each file, by the name that the index has for it. */
  readonly shards: ReadonlyMap<string, Header>;
  /** Of `config.json`, where it was asked for and is there. */
  readonly config: Readonly<Record<string, unknown>> | null;
  /** What is odd and harms nothing. */
  readonly warnings: readonly string[];
  /** How many tensors there are. */
  readonly size: number;
  get(name: string): { readonly shard: string; readonly tensor: Tensor } | undefined;
  has(name: string): boolean;
  /**
   * Reads a tensor, or its rows `begin` to before `end`, as numbers: only their bytes are read, and beside the values one
   * piece of 3 MiB is in memory. An unknown name is a `SafetensorError` with the nearest name; rows outside of the tensor
   * are a `RangeError`.
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
  /** The shape of what was read. */
  readonly shape: readonly number[];
  /** In C order, in the array that `decode` makes of the dtype. */
  readonly values: Decoded[Name];
}

export interface HeaderOptions {
  /** Longest header that is read, in bytes: 100,000,000 from memory and files, 25,000,000 from a URL. */
  maxHeaderBytes?: number;
  /** Refuse what is clear but not as the specification writes it, with the code `not-strict`. */
  strict?: boolean;
}

export interface ParseOptions extends HeaderOptions {
  /** Size of the whole file. Without it, the bytes that are given are all of it. */
  fileSize?: number;
  /** What errors call the file. */
  path?: string;
}

export interface ReadOptions extends HeaderOptions {
  /** In place of the global one. It has to honour `headers`, `signal` and `redirect: "manual"`. */
  fetch?: typeof globalThis.fetch;
  /**
   * Sent to the host of the URL, and to no other that it redirects to. A browser follows redirects by itself and removes
   * `Authorization` only, so with another header a redirect is `redirect-refused` there.
   */
  headers?: HeadersInit;
  /**
   * Follow redirects to other hosts in private networks too. `false`. What is looked at is the host in the URL: a name
   * that stands for a private address is not known as one, because names are resolved behind `fetch`.
   */
  allowPrivateRedirects?: boolean;
  /** Ends the reading; the promise is then rejected with `signal.reason`. */
  signal?: AbortSignal;
  /** Bytes of the first request; another one follows only where the header is longer. 131,072. */
  firstBytes?: number;
  /**
   * Milliseconds that one request may take. 60,000. For a range of `readRange` and `streamRange` it is the longest wait
   * for its next bytes; and all waits together may take as long again as its bytes at 1 KiB a second.
   */
  timeout?: number;
  /** Further tries where the network fails, or the server answers 408, 429, 500, 502, 503 or 504. 2. */
  retries?: number;
  /** What `hf://` stands for. `https://huggingface.co`. */
  hub?: string;
}

export interface ModelOptions extends ReadOptions {
  /** Headers that are fetched at a time. 20. */
  concurrency?: number;
  /** Whether to read `config.json`, which says how parameters are counted; or what it says. */
  config?: boolean | object;
  /** The address of a shard, where it is not beside the index: signed addresses, for example. */
  shardUrl?: (shard: string, indexUrl: URL) => string | URL;
}

/**
 * What is wrong with a file, or with the way to it. Arguments of the wrong type throw a `TypeError`, and an aborted
 * signal its own reason.
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
  /** The file: its name, or its address without what may be secret. */
  readonly path: string | null;
  /** The tensor, not escaped. */
  readonly tensor: string | null;
  readonly expected: number | bigint | null;
  readonly found: number | bigint | null;
  /** The bytes in question, counted from the start of the data section. */
  readonly begin: number | bigint | null;
  readonly end: number | bigint | null;
  /** What the server answered, where that is the fault. */
  readonly status: number | null;
  constructor(message: string, fields?: Partial<Omit<SafetensorError, keyof Error>> & { cause?: unknown });
}

export declare const MAX_HEADER_BYTES: 100_000_000;
export declare const MAX_REMOTE_HEADER_BYTES: 25_000_000;
export declare const MAX_INDEX_BYTES: 250_000_000;

/** Bits that one element takes, by dtype. */
export declare const DTYPES: ReadonlyMap<Dtype, number>;

/** Bytes at the start of a file that `parseHeader` needs. `start` has the first 8 of them, or more. */
export declare function headSize(start: Bytes, options: ParseOptions & { fileSize: number }): number;

/** The header at the start of a file. `start` is all of the file, or its first `headSize` bytes or more. */
export declare function parseHeader(start: Bytes, options?: ParseOptions): Header;

/** The index in `bytes`, which are all of it. */
export declare function parseIndex(bytes: Bytes, options?: { path?: string }): ShardIndex;

/**
 * The header of a file in memory, of a `File` or `Blob`, or at a URL. Text is a URL, or an address of the Hub such as
 * `hf://owner/name/model.safetensors`. Nothing but the header is read: by one request, or by two where it is longer
 * than `firstBytes`. In Node, text without a scheme is a path. A source of `openSource` keeps its own options.
 */
export declare function readHeader(
  source: Bytes | Blob | Source | URL | string,
  options?: ReadOptions,
): Promise<Header>;

/** The index of a sharded checkpoint, from the same sources. */
export declare function readIndex(
  source: Bytes | Blob | Source | URL | string,
  options?: ReadOptions,
): Promise<ShardIndex>;

/**
 * The headers of a model. `source` is the address of a file, of an index, of a directory (with a slash at its end) or
 * of a repository of the Hub; in Node also the path of a file, an index or a directory; or a `File`, or all files of a folder; or what `openSource` gave, one or several. What an
 * index says is checked against its shards.
 */
export declare function readModel(
  source: URL | string | Blob | Source | Iterable<File | Source>,
  options?: ModelOptions,
): Promise<Model>;

export interface ParameterCount {
  /** By dtype, in the order in which the dtypes are met. */
  readonly parameterCount: Readonly<Partial<Record<Dtype, number>>>;
  /** Of all dtypes; what the metadata declares as `total_parameters` where that is less. */
  readonly parameterTotal: number;
}

export interface CountOptions {
  /**
   * `logical`, which is the default: as huggingface.js 2.17.5 counts, the parameters before quantisation. `stored`: the
   * elements that are in the files.
   */
  count?: "logical" | "stored";
  /** What `config.json` says, where it is not that of the model. Without it, nothing counts as quantised. */
  config?: object | null;
}

export declare function parameterCount(source: Header | Model, options?: CountOptions): ParameterCount;

export interface TensorRange {
  /** The file of the model; null for a header. */
  readonly shard: string | null;
  /** First byte, counted from the start of the file. */
  readonly position: number;
  readonly nbytes: number;
}

/** Where the bytes of a tensor lie: `readRange(source, position, position + nbytes)` gives them. */
export declare function tensorRange(source: Header | Model, name: string): TensorRange;

/** The URL of `hf://[models/|datasets/|spaces/]owner/name[@revision][/path]`. */
export declare function hubUrl(address: string, options?: { hub?: string }): URL;

/**
 * Text from a file with every character escaped that could steer a terminal, or reorder or hide text. This is not HTML
 * escaping: set `textContent`.
 */
export declare function escapeName(text: string): string;

/** The same between backticks, and cut after 200 characters. */
export declare function quoteName(name: string): string;

/** The order of names that ingot has everywhere: by the bytes of their UTF-8. For `Array.prototype.sort`. */
export declare function compareNames(a: string, b: string): number;

/** What ranges are read from. `openSource` gives one, and any object with these three is one. */
export interface Source {
  /** What errors call it: the name of the file, or the address without what may be secret. */
  readonly name: string | null;
  /** Bytes in the file. */
  readonly size: number;
  /** Of what is behind a URL: the version that every answer has to be of; null where the file came whole. */
  readonly version?: string | null;
  /** The bytes from `begin` to before `end`, counted from the start of the file. */
  read(begin: number, end: number, signal?: AbortSignal): Promise<Uint8Array>;
}

export interface OpenOptions extends
  Pick<
    ReadOptions,
    "fetch" | "headers" | "allowPrivateRedirects" | "firstBytes" | "timeout" | "retries" | "hub"
  > {
  /** Ends the opening; later reads have signals of their own. */
  signal?: AbortSignal;
  /** What errors call the file, in place of its address. */
  name?: string;
  /** The `version` of a source of the same file, which has to be met again. */
  version?: string | null;
}

/**
 * Opens a file. In Node, text without a scheme and `file:` URLs are paths of this machine: `openSource("m.safetensors")`.
 * The file is opened for each range, so that there is nothing to close. Other text is an address, which is opened by
 * one request; the answer has the size and the version of the file. Every later range is of that version, or a
 * `SafetensorError` with the code `changed`. The first bytes are kept, so that `readHeader` of the source makes no further
 * request if they hold the header. Memory is not copied and must not change.
 */
export declare function openSource(source: Bytes | Blob | URL | string, options?: OpenOptions): Promise<Source>;

export interface RangeOptions {
  /** Ends the reading; the promise is then rejected with `signal.reason`. */
  signal?: AbortSignal;
}

/**
 * The bytes from `begin` to before `end`, all of them, counted from the start of the file. `into` is memory of the
 * caller, `end - begin` bytes long, which is filled and given back: nothing of that size is made besides. After an
 * error it may hold a part of the range.
 *
 * A range outside of the file, or `into` of another length, throws a `RangeError`; an address, a `TypeError`: it has to
 * be opened first, so that all ranges are of one version.
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
 * The same bytes in pieces of `pieceBytes` (3,145,728, a whole number of elements of every dtype), of which one is in
 * memory at a time: it is overwritten when the next one is asked for, unless its buffer was transferred. To leave the
 * loop ends the request.
 */
export declare function streamRange(
  source: Source | Blob | Bytes,
  begin: number,
  end: number,
  options?: RangeOptions & { pieceBytes?: number },
): AsyncGenerator<Uint8Array, void, void>;

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
