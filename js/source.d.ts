import type { Bytes, ReadOptions } from "./safetensors.js";

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

export interface OpenOptions
  extends Pick<
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
