// Tensors by module path, in columns and not in objects: a model may have 500,000 of them. Node 0 is the root. Every node
// comes after its parent, so that subtotals are one pass backwards.

import { compareNames } from "../src/errors.js";
import { DTYPE_NAMES } from "./table.js";

/** Deeper paths are treated as names that contain dots. */
const DEEPEST = 16;
/** Up to this many children of a module are searched one by one; above, there is a map. Most modules have few, and maps
 * are large. */
const FEW = 8;
/** A longer first part of a name is a path of its own, such as `lora_unet_down_blocks_0_attentions_0_proj_in`. */
const LONG_PART = 24;
const NONE = -1;
const isDigit = (unit) => unit >= 48 && unit <= 57;

/** Natural order of names: `layers.2` before `layers.10`. */
export function natural(a, b) {
  for (let [i, j] = [0, 0]; i < a.length && j < b.length;) {
    const [x, y] = [a.charCodeAt(i), b.charCodeAt(j)];
    if (isDigit(x) && isDigit(y)) {
      const [one, two] = [digits(a, i), digits(b, j)];
      // Without leading zeros the longer number is the larger one.
      const order = one.text.length - two.text.length || (one.text < two.text ? -1 : one.text > two.text ? 1 : 0);
      if (order !== 0) return order;
      [i, j] = [one.end, two.end];
    } else if (x !== y) return compareNames(a.slice(i), b.slice(j));
    else [i, j] = [i + 1, j + 1];
  }
  return compareNames(a, b);
}

function digits(text, from) {
  let end = from;
  while (isDigit(text.charCodeAt(end))) end++;
  while (from < end - 1 && text.charCodeAt(from) === 48) from++;
  return { text: text.slice(from, end), end };
}

/** Returns a name whose long first part is split at its numbers: each number becomes a module of the tree. */
function pathed(name) {
  const dot = name.indexOf(".");
  const length = dot < 0 ? name.length : dot;
  if (length <= LONG_PART || !/_\d+_/.test(name)) return name;
  const split = (text) => text.replace(/_(\d+)_/g, ".$1.");
  // Twice, since two numbers share the underscore between them.
  return split(split(name.slice(0, length))) + name.slice(length);
}

/** The place from which on two texts differ. */
export function firstDifference(one, two) {
  const length = Math.min(one.length, two.length);
  let at = 0;
  while (at < length && one.charCodeAt(at) === two.charCodeAt(at)) at++;
  return at;
}

export const SORTS = { name: "Name", parameters: "Params", bytes: "Size", dtype: "Dtype", shape: "Shape" };

export class Tree {
  #maps = new Map();
  #dtypeTexts = new Map();
  #ordered = [];
  #leaves = null;
  #byName = null;

  constructor(table) {
    this.table = table;
    this.size = 1;
    this.labels = [""];
    const room = 2 * table.tensors.length + 16;
    this.parent = new Int32Array(room);
    this.tensor = new Int32Array(room);
    this.next = new Int32Array(room);
    this.first = new Int32Array(room);
    this.tensor[0] =
      this.next[0] =
      this.first[0] =
      this.parent[0] =
        NONE;
    this.#insertAll(table.tensors);
    this.#maps.clear();
    // The columns are made now, since columns that exist while nodes are added are copied each time they grow.
    this.count = new Float64Array(this.parent.length);
    this.parameters = new Float64Array(this.parent.length);
    this.bytes = new Float64Array(this.parent.length);
    this.dtypes = new Uint32Array(this.parent.length);
    this.#total();
    /** Nodes from here on represent several modules: `members` lists them. They are made when they are shown. */
    this.ownSize = this.size;
    this.members = new Map();
    this.expanded = new Set();
    this.sort = "name";
  }

  #add(parent, label, tensor) {
    const node = this.size++;
    if (node === this.parent.length) this.#grow();
    this.labels.push(label);
    this.parent[node] = parent;
    this.tensor[node] = tensor;
    this.first[node] = NONE;
    this.next[node] = this.first[parent];
    this.first[parent] = node;
    return node;
  }

  #grow() {
    for (const [name, column] of Object.entries(this)) {
      if (!ArrayBuffer.isView(column)) continue;
      const { constructor, length } = /** @type {any} */ (column);
      this[name] = new constructor(2 * length);
      this[name].set(column);
    }
  }

  #insertAll(tensors) {
    // The modules of the last name, and the ends of their parts in it: the next name usually begins with the same
    // modules, which are then not looked up again.
    const [path, ends] = [[0], []];
    let before = "";
    for (let number = 0; number < tensors.length; number++) {
      const name = pathed(tensors[number].name);
      const common = firstDifference(name, before);
      let depth = ends.length;
      while (depth > 0 && ends[depth - 1] >= common) depth--;
      ends.length = depth;
      let at = depth > 0 ? ends[depth - 1] + 1 : 0;
      for (let dot = name.indexOf(".", at); dot >= 0 && depth < DEEPEST; dot = name.indexOf(".", at)) {
        ends.push(dot);
        path[depth + 1] = this.#module(path[depth], name.slice(at, dot));
        [at, depth] = [dot + 1, depth + 1];
      }
      this.#add(path[depth], name.slice(at), number);
      before = name;
    }
  }

  #module(parent, label) {
    const map = this.#maps.get(parent);
    if (map) {
      if (!map.has(label)) map.set(label, this.#add(parent, label, NONE));
      return map.get(label);
    }
    let children = 0;
    for (let child = this.first[parent]; child !== NONE; child = this.next[child], children++) {
      if (this.tensor[child] === NONE && this.labels[child] === label) return child;
    }
    if (children >= FEW) this.#map(parent);
    return children >= FEW ? this.#module(parent, label) : this.#add(parent, label, NONE);
  }

  #map(parent) {
    const map = new Map();
    for (let child = this.first[parent]; child !== NONE; child = this.next[child]) {
      if (this.tensor[child] === NONE) map.set(this.labels[child], child);
    }
    this.#maps.set(parent, map);
  }

  #total() {
    const { table } = this;
    for (let node = this.size - 1; node > 0; node--) {
      const tensor = this.tensor[node];
      if (tensor !== NONE) {
        this.count[node] = 1;
        this.parameters[node] = table.elements[tensor];
        this.bytes[node] = table.tensors[tensor].nbytes;
        this.dtypes[node] = 1 << table.dtype[tensor];
      }
      this.#addTo(this.parent[node], node);
    }
  }

  #addTo(above, node) {
    this.count[above] += this.count[node];
    this.parameters[above] += this.parameters[node];
    this.bytes[above] += this.bytes[node];
    this.dtypes[above] |= this.dtypes[node];
  }

  dtypeText(node) {
    const dtypes = this.dtypes[node];
    let text = this.#dtypeTexts.get(dtypes);
    if (text === undefined) {
      text = DTYPE_NAMES.filter((_, number) => dtypes & (1 << number)).join(", ");
      this.#dtypeTexts.set(dtypes, text);
    }
    return text;
  }

  isModule(node) {
    return this.tensor[node] === NONE;
  }

  /** The children of a node in the chosen order. Similar neighbours are merged. */
  children(node) {
    return (this.#ordered[node] ??= this.members.get(node) ?? this.#grouped(node, this.#sorted(node)));
  }

  orderBy(sort) {
    this.sort = sort;
    this.#ordered = [];
    this.members = new Map();
    this.expanded.forEach((node) => node >= this.ownSize && this.expanded.delete(node));
  }

  #sorted(node) {
    const found = [];
    for (let child = this.first[node]; child !== NONE; child = this.next[child]) found.push(child);
    return found.sort((a, b) => this.compare(a, b));
  }

  compare(a, b) {
    const { sort } = this;
    if (sort === "parameters" || sort === "bytes") {
      return this[sort][b] - this[sort][a] || natural(this.labels[a], this.labels[b]);
    }
    if (sort === "dtype") {
      return natural(this.dtypeText(a), this.dtypeText(b)) || natural(this.labels[a], this.labels[b]);
    }
    if (sort === "shape") {
      return natural(String(this.shapeOf(a)), String(this.shapeOf(b))) || natural(this.labels[a], this.labels[b]);
    }
    return natural(this.labels[a], this.labels[b]);
  }

  shapeOf(node) {
    return this.isModule(node) ? "" : this.table.tensors[this.tensor[node]].shape;
  }

  /** Merges similar modules with consecutive numbers as names into one node: `0–31`. */
  #grouped(parent, children) {
    if (this.sort !== "name") return children;
    const isNumbered = (node) => this.isModule(node) && /^\d+$/.test(this.labels[node]);
    const follows = (node, before) => Number(this.labels[node]) === Number(this.labels[before]) + 1;
    const result = [];
    for (let at = 0; at < children.length;) {
      let upto = at + 1;
      if (isNumbered(children[at])) {
        while (
          upto < children.length && isNumbered(children[upto]) && follows(children[upto], children[upto - 1]) &&
          this.#areAlike(children[at], children[upto])
        ) upto++;
      }
      result.push(upto - at > 1 ? this.#group(parent, children.slice(at, upto)) : children[at]);
      at = upto;
    }
    return result;
  }

  #group(parent, members) {
    const label = `${this.labels[members[0]]}–${this.labels[members.at(-1)]}`;
    const node = this.#add(parent, label, NONE);
    // It is in no list of children: only `members` contains it.
    this.first[parent] = this.next[node];
    this.next[node] = NONE;
    for (const member of members) this.#addTo(node, member);
    this.members.set(node, members);
    return node;
  }

  /** Whether two nodes have the same names, dtypes and shapes below them. */
  #areAlike(one, two) {
    if (this.isModule(one) !== this.isModule(two)) return false;
    if (!this.isModule(one)) return this.#areAlikeTensors(this.tensor[one], this.tensor[two]);
    if (this.count[one] !== this.count[two] || this.bytes[one] !== this.bytes[two]) return false;
    let [ours, theirs] = [this.first[one], this.first[two]];
    // Most layers list their tensors in one order.
    for (; ours !== NONE && theirs !== NONE; [ours, theirs] = [this.next[ours], this.next[theirs]]) {
      const isSame = this.labels[ours] === this.labels[theirs] && this.isModule(ours) === this.isModule(theirs);
      if (!isSame) return this.#areAlikeInOrder(one, two);
      if (!this.#areAlike(ours, theirs)) return false;
    }
    return ours === theirs;
  }

  #areAlikeTensors(one, two) {
    const { tensors, dtype } = this.table;
    const [ours, theirs] = [tensors[one].shape, tensors[two].shape];
    return dtype[one] === dtype[two] && ours.length === theirs.length && ours.every((dim, at) => dim === theirs[at]);
  }

  #areAlikeInOrder(one, two) {
    const [ours, theirs] = [one, two].map((node) => {
      const found = [];
      for (let child = this.first[node]; child !== NONE; child = this.next[child]) found.push(child);
      // A tensor may have the name of a module.
      const order = (a, b) => compareNames(this.labels[a], this.labels[b]) || this.tensor[a] - this.tensor[b];
      return found.sort(order);
    });
    return ours.length === theirs.length &&
      ours.every((node, at) => this.labels[node] === this.labels[theirs[at]] && this.#areAlike(node, theirs[at]));
  }

  /** Opens modules from the root while there are few rows. */
  openFirst(most) {
    let [rows, level] = [this.children(0).length, this.children(0)];
    while (level.length > 0) {
      const below = [];
      for (const node of level) {
        if (!this.isModule(node) || this.members.has(node)) continue;
        const children = this.children(node);
        if (rows + children.length > most) return;
        rows += children.length;
        this.expanded.add(node);
        below.push(...children);
      }
      level = below;
    }
  }

  /** Opens all modules that contain a tensor, and returns its node. */
  reveal(tensor) {
    let node = this.#leafOf(tensor);
    const leaf = node;
    for (node = this.parent[node]; node > 0; node = this.parent[node]) {
      this.expanded.add(node);
      for (const [group, members] of this.members) if (members.includes(node)) this.expanded.add(group);
    }
    return leaf;
  }

  #leafOf(tensor) {
    if (this.#leaves === null) {
      this.#leaves = new Int32Array(this.table.tensors.length);
      for (let node = 1; node < this.ownSize; node++) if (!this.isModule(node)) this.#leaves[this.tensor[node]] = node;
    }
    return this.#leaves[tensor];
  }

  /** The visible nodes, from the top, each with its indent. */
  visible(filter) {
    if (filter) return this.#matching(filter);
    const [nodes, indents, waiting] = [[], [], this.children(0).map((node) => [node, 0]).reverse()];
    while (waiting.length > 0) {
      const [node, indent] = waiting.pop();
      nodes.push(node);
      indents.push(indent);
      if (!this.expanded.has(node)) continue;
      const children = this.children(node);
      for (let at = children.length - 1; at >= 0; at--) waiting.push([children[at], indent + 1]);
    }
    return { nodes, indents };
  }

  #matching(filter) {
    const { tensors } = this.table;
    // Sorted once, and not for each letter of a filter.
    this.#byName ??= Uint32Array.from(tensors.keys()).sort((a, b) => natural(tensors[a].name, tensors[b].name));
    const nodes = [];
    for (const number of this.#byName) if (filter(tensors[number], number)) nodes.push(this.#leafOf(number));
    if (this.sort !== "name") nodes.sort((a, b) => this.compare(a, b));
    return { nodes, indents: new Uint8Array(nodes.length) };
  }
}

const UNITS = { "": 1, B: 1, KB: 1e3, MB: 1e6, GB: 1e9, KIB: 1024, MIB: 1024 ** 2, GIB: 1024 ** 3 };

/**
 * Return the conditions of a filter: `test` of a tensor, and `patterns`, which are regular expressions for its name. All must
 * hold. A pattern may take any time, so no pattern may run in the thread of the page. The words are `dtype:BF16`,
 * `size:>10MB`, `shape:2,3`, `/regular expression/`, the name with `*` for any text, or a part of it. Null if there is no word.
 *
 * @throws {SyntaxError} For an invalid regular expression or size.
 */
export function filterOf(text) {
  const words = (text ?? "").trim().split(/\s+/).filter(Boolean);
  if (words.length === 0) return null;
  const tests = words.filter((word) => !isPattern(word)).map(testOf);
  const patterns = words.filter(isPattern).map((word) => new RegExp(expressionOf(word), "u").source);
  return { test: (tensor) => tests.every((test) => test(tensor)), patterns };
}

function isPattern(word) {
  return isRegular(word) || word.includes("*");
}

function isRegular(word) {
  return word.length > 2 && word.startsWith("/") && word.endsWith("/");
}

function expressionOf(word) {
  if (isRegular(word)) return word.slice(1, -1);
  return `^${word.split(/\*+/).map((part) => part.replace(/[\\^$.+?()[\]{}|/]/g, "\\$&")).join(".*")}$`;
}

function testOf(word) {
  const [, key, said] = /^(dtype|size|shape):(.*)$/i.exec(word) ?? [];
  if (key?.toLowerCase() === "dtype") return (tensor) => tensor.dtype.startsWith(said.toUpperCase());
  if (key?.toLowerCase() === "shape") return (tensor) => tensor.shape.join(",") === said.replace(/[[\]]/g, "");
  if (key?.toLowerCase() === "size") return sizeTest(said);
  const part = word.toLowerCase();
  return (tensor) => tensor.name.toLowerCase().includes(part);
}

function sizeTest(said) {
  const [, sign = "", number, unit = ""] = /^([<>]?)(\d+(?:\.\d+)?)([a-z]*)$/i.exec(said) ?? [];
  const size = Number(number) * UNITS[unit.toUpperCase()];
  if (!(size >= 0)) throw new SyntaxError(`size:${said}: expected a size such as size:>10MB`);
  return ({ nbytes }) => (sign === ">" ? nbytes > size : sign === "<" ? nbytes < size : nbytes === size);
}
