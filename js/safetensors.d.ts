import type { Decoded } from "./decode.js";
import type { Source } from "./source.js";

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
