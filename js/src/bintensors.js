// Parses the header of a `.bt` file: rules B1 to B4 of FORMAT.md.

import { Fault } from "./errors.js";
import { narrow, utf8Text } from "./json.js";
import { DTYPE_OF_BINTENSORS, headerTooLarge, MetadataBuilder, PREFIX_NBYTES, RawHeader, unknownDtype } from "./raw.js";

/**
 * The largest estimated size of the parsed entries, dimensions and metadata pairs of one header, in bytes of the Rust
 * reader. Five bytes of a file are enough for an entry, so the length of the header alone does not bound memory.
 */
const ROOM_NBYTES = 100_000_000;
const ENTRY_NBYTES = 32;
const DIMENSION_NBYTES = 8;
const PAIR_NBYTES = 8;

function checkRoom(entries, dimensions, pairs) {
  const found = entries * ENTRY_NBYTES + dimensions * DIMENSION_NBYTES + pairs * PAIR_NBYTES;
  if (found > ROOM_NBYTES) throw headerTooLarge(found, ROOM_NBYTES);
}

export function parseBinaryHeader(header) {
  return new BinaryHeaderReader(header).read();
}

class BinaryHeaderReader {
  constructor(header) {
    this.header = header;
    this.view = new DataView(header.buffer, header.byteOffset, header.byteLength);
    this.at = 0;
    this.raw = new RawHeader("bintensors");
  }

  read() {
    const option = this.byte("metadata option");
    if (option > 1) {
      throw new Fault("invalid-option", "B1", `first byte of the header: expected 0 or 1, found ${option}`);
    }
    if (option === 1) this.raw.metadata = this.metadata();
    this.entries();
    this.padding();
    return this.raw;
  }

  metadata() {
    // The lengths of key and value take a byte each.
    const count = this.count("metadata count", 2);
    checkRoom(0, 0, count);
    const metadata = new MetadataBuilder();
    for (let number = 0; number < count; number++) {
      metadata.add(this.string("metadata key"), this.string("metadata value"));
    }
    return metadata.finish();
  }

  entries() {
    // The name's length, dtype, rank, begin and end.
    const count = this.count("tensor count", 5);
    const pairs = this.raw.metadata?.size ?? 0;
    checkRoom(count, 0, pairs);
    for (let number = 0, dimensions = 0; number < count; number++) {
      const name = this.string("tensor name");
      const code = this.number("dtype");
      const dtype = DTYPE_OF_BINTENSORS.get(code);
      if (dtype === undefined) throw unknownDtype(name, String(code));
      const rank = this.count("rank", 1);
      dimensions += rank;
      checkRoom(count, dimensions, pairs);
      const shape = [];
      while (shape.length < rank) shape.push(this.number("dimension"));
      this.raw.add(name, dtype, shape, this.number("data range"), this.number("data range"));
    }
  }

  byte(reading) {
    if (this.at >= this.header.length) throw this.pastEnd(this.at, reading);
    return this.header[this.at++];
  }

  /** B2 and B3. */
  number(reading) {
    const begin = this.at;
    const tag = this.byte(reading);
    if (tag <= 250) return tag;
    if (tag > 253) throw this.invalidVarint(begin);
    const nbytes = tag === 251 ? 2 : tag === 252 ? 4 : 8;
    if (this.at + nbytes > this.header.length) throw this.pastEnd(begin, reading);
    const number = nbytes === 2
      ? this.view.getUint16(this.at, true)
      : nbytes === 4
      ? this.view.getUint32(this.at, true)
      : narrow(this.view.getBigUint64(this.at, true));
    const least = nbytes === 2 ? 251 : nbytes === 4 ? 2 ** 16 : 2 ** 32;
    if (number < least) throw this.invalidVarint(begin);
    this.at += nbytes;
    return number;
  }

  /**
   * The number of items that follow, each of at least `least` bytes. B3: they must fit into the rest of the header, so
   * a hostile count allocates nothing.
   */
  count(reading, least) {
    const begin = this.at;
    const count = this.number(reading);
    if (count > Math.floor((this.header.length - this.at) / least)) throw this.pastEnd(begin, reading);
    return count;
  }

  string(reading) {
    const nbytes = this.count(reading, 1);
    const text = utf8Text(this.header.subarray(this.at, this.at + nbytes), this.position(this.at), "F4", "file");
    this.at += nbytes;
    return text;
  }

  /** B4. */
  padding() {
    const { header } = this;
    let end = this.at;
    while (end < header.length && end < this.at + 7 && header[end] === 0x20) end++;
    if (end < header.length) {
      const found = `other bytes at byte ${this.position(end)} of the file`;
      throw new Fault("invalid-padding", "B4", `expected up to 7 spaces after the last entry, found ${found}`);
    }
  }

  position(at) {
    return PREFIX_NBYTES + at;
  }

  pastEnd(at, reading) {
    const reason = `${reading} at byte ${this.position(at)} of the file passes the end of the header`;
    return new Fault("unexpected-end", "B3", reason);
  }

  invalidVarint(at) {
    const reason = `number at byte ${this.position(at)} of the file is not in its shortest form, or too wide`;
    return new Fault("invalid-varint", "B2", reason);
  }
}
