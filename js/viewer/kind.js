// What the tensors of a file show: a LoRA and its rank, a language model and its size, a quantisation. The rules are in
// js/src/kinds.json; python/ingot/_read/kind.py applies them too.

import { escapeName } from "../src/errors.js";
import rules from "../src/kinds.json" with { type: "json" };

const MOST_FORMS = 5000;
const NUMBER = /(?<![^._])[0-9]+(?![^._])/g;
const MAIN_SHARE = 0.9;

/**
 * Returns what a file is: `kind`, `base`, `rank`, `alpha`, `packing` and `dtype`, null where the tensors do not show them, and
 * `text`, all of it in one line. `metadata` is an object; `beside` has the contents of `config.json` and
 * `adapter_config.json`, as far as they exist.
 */
export function kindOf(tensors, metadata, beside) {
  const names = new Names(tensors);
  const texts = { ...beside, metadata };
  const early = rules.kinds.filter(({ kind }) => rules.beforeAdapters.includes(kind));
  const special = firstOf(early, names);
  const adapter = special ? null : adapterOf(names);
  if (adapter) return describedAdapter(adapter, tensors, names, texts);
  const { packing, implied } = unpacked(names, tensors);
  const found = special ?? firstOf(rules.kinds, implied);
  const { base, shown, notes } = supported(found, texts, "model");
  const kind = found ? variantOf(found.kind, implied) : null;
  const dtype = packing === null ? mainDtype(tensors) : null;
  const named = base !== null && rules.silent.includes(kind) ? null : kind;
  const text = joined([
    named,
    shown,
    ...(found ? detailsOf(found, implied) : []),
    packing,
    ...notes,
  ], dtype);
  return { kind, base, rank: null, alpha: null, packing, dtype, text };
}

/** What the model of a table is. The configuration of its folder may be for another file. */
export function kindOfTable(table) {
  const ownsConfig = table.model.index !== null ||
    new RegExp(rules.ownsConfig).test(table.files[0].name);
  const beside = ownsConfig ? { "config.json": table.model.config, "adapter_config.json": table.adapterConfig } : {};
  const found = kindOf(table.tensors, Object.fromEntries(table.metadata()), beside);
  return { ...found, text: escapeName(found.text) };
}

function joined(parts, dtype) {
  const said = parts.filter(Boolean);
  return (said.length > 0 && dtype ? [...said, dtype] : said).join(", ");
}

/** The names of tensors, searched by the patterns of the rules. */
class Names {
  #text;
  #matches = new Map();

  constructor(tensors) {
    this.forms = new Map();
    for (const tensor of tensors) {
      const form = tensor.name.replace(NUMBER, "#").replaceAll("\n", " ");
      const group = this.forms.get(form);
      if (group) group.push(tensor);
      else this.forms.set(form, [tensor]);
    }
    this.count = tensors.length;
    this.#text = this.forms.size <= MOST_FORMS ? `\n${[...this.forms.keys()].join("\n")}\n` : "";
  }

  matching(pattern) {
    let found = this.#matches.get(pattern);
    if (!found) this.#matches.set(pattern, found = this.#found(pattern));
    return found;
  }

  #found(pattern) {
    if (this.#text === "") return [];
    const form = pattern.replace(NUMBER, "#");
    if (form === pattern) {
      // Most patterns match nothing, and their words are found faster than an expression is compiled.
      if (!mayMatch(pattern, this.#text)) return [];
      const forms = this.#text.match(
        new RegExp(`(?<=\n)(?:${expression(pattern, "#")})(?=\n)`, "g"),
      ) ?? [];
      return forms.flatMap((one) => this.forms.get(one));
    }
    const exact = exactly(pattern);
    return this.matching(form).filter(({ name }) => exact.test(name));
  }

  ending(suffix) {
    const found = this.#formsEnding(suffix).flatMap((form) => this.forms.get(form));
    return /[0-9]/.test(suffix) ? found.filter(({ name }) => name.endsWith(suffix)) : found;
  }

  /** Whether tensors may have such an end, as far as the forms of their names show it. */
  mayEnd(suffix) {
    return this.#formsEnding(suffix).length > 0;
  }

  #formsEnding(suffix) {
    const end = suffix.replace(NUMBER, "#");
    // Most ends match nothing.
    if (this.#text !== "" && !this.#text.includes(`${end}\n`)) return [];
    return [...this.forms.keys()].filter((form) => form.endsWith(end));
  }

  satisfies(condition) {
    const [pattern, ...more] = condition.split(" ");
    let found = this.matching(pattern);
    for (const one of more) {
      if (one.startsWith("[")) {
        found = found.filter(({ shape }) => hasShape(shape, one));
      } else found = found.filter(({ name }) => (numberIn(pattern, name, 0) ?? 0) >= Number.parseInt(one, 10));
    }
    return found.length > 0;
  }

  /** How many numbers the names have at a `#` of a pattern, or null if one from 0 on is missing. */
  numbers(pattern, place) {
    const found = new Set(this.matching(pattern).map(({ name }) => numberIn(pattern, name, place)));
    const isWhole = [...found.keys()].every((one) => one !== null && one < found.size);
    return found.size > 0 && isWhole ? found.size : null;
  }

  length(pattern, axis) {
    const found = new Set(
      this.matching(pattern).map(({ shape }) => shape[axis] ?? null),
    );
    return found.size === 1 ? [...found][0] : null;
  }
}

const SIGNS = { "*": "[^\n]*", ".": "[._]", "|": "|" };

function expression(pattern, number) {
  return [...pattern].map((one) => one === "#" ? number : SIGNS[one] ?? (/\w/.test(one) ? one : `\\${one}`)).join("");
}

/** Whether a text has all words of an alternative of a pattern. */
function mayMatch(pattern, text) {
  return pattern.split("|").some((one) => one.split(/[*.#]/).every((word) => text.includes(word)));
}

const exacts = new Map();

function exactly(pattern) {
  if (!exacts.has(pattern)) {
    exacts.set(pattern, new RegExp(`^(?:${expression(pattern, "([0-9]+)")})$`));
  }
  return exacts.get(pattern);
}

function numberIn(pattern, name, place) {
  const numbers = (exactly(pattern).exec(name) ?? []).slice(1).filter((one) => one !== undefined);
  return place < numbers.length ? Number(numbers[place]) : null;
}

function hasShape(shape, wanted) {
  return wanted.split("]|[").some((one) => {
    const lengths = one.replace(/[[\]]/g, "").split(",");
    return lengths.length === shape.length &&
      lengths.every((text, axis) => text === "?" || text.split("|").includes(String(shape[axis])));
  });
}

function firstOf(kinds, names) {
  return kinds.find((rule) =>
    applies(rule, names) &&
    (!rule.same || applies(rules.same[rule.same], names))
  ) ?? null;
}

function applies(rule, names) {
  if (
    !rule.all.every((one) => any(one, names)) ||
    (rule.none ?? []).some((one) => names.satisfies(one))
  ) return false;
  return !rule.only ||
    new Set(rule.only.flatMap((one) => names.matching(one))).size ===
      names.count;
}

function any(condition, names) {
  return [condition].flat().some((one) => names.satisfies(one));
}

function variantOf(kind, names) {
  return rules.variants.find((rule) => rule.of === kind && applies(rule, names))
    ?.kind ?? kind;
}

function detailsOf(rule, names) {
  const say = typeof rule.say === "string" ? rules[rule.say] : rule.say ?? [];
  return say.map(([text, fact]) => {
    const value = valueOf(fact, names);
    return value === null ? null : (String(value) === "1" ? text.replace(/s$/, "") : text).replace("{}", value);
  });
}

const FACTS = {
  if: (given, names) => any(given, names) ? "" : null,
  unless: (given, names) => any(given, names) ? null : "",
  count: (given, names) => {
    const [pattern, place = 0] = [given].flat();
    return names.numbers(pattern, place);
  },
  length: (given, names) => names.length(...given),
  ratio: ([part, whole], names) => {
    const [one, all] = [names.length(part, 0), names.length(whole, 0)];
    if (!one || !all || all % one !== 0 || one === all) return null;
    return rules.ratios[all / one] ?? `1/${all / one}`;
  },
};

function valueOf(fact, names) {
  const values = Object.keys(fact).map((word) => FACTS[word](fact[word], names));
  return values.includes(null) ? null : values.at(-1) ?? "";
}

function adapterOf(names) {
  for (const rule of rules.adapters) {
    const [implied, ranks] = [[], []];
    let isConvolutional = false;
    for (const [module, parts] of groupsOf(rule.parts, names)) {
      const shape = rule.shape.map((one) => computed(one, parts));
      if (shape.includes(null) || !areEqual(rule, parts)) continue;
      implied.push({ name: `${module}.weight`, dtype: "", shape });
      const rank = computed(rule.rank, parts);
      if (rank !== null) ranks.push(rank);
      isConvolutional ||= (computed(rule.kernel, parts) ?? 1) > 1;
    }
    if (implied.length === 0) continue;
    const kind = variantOf(rule.kind, names);
    return {
      kind: isConvolutional ? rules.convolutional[kind] ?? kind : kind,
      ranks,
      implied: new Names([...implied, ...[...names.forms.values()].flat()]),
    };
  }
  return null;
}

function describedAdapter({ kind, ranks, implied }, tensors, names, texts) {
  const { base, shown, notes } = supported(
    firstOf(rules.bases, implied),
    texts,
    "adapter",
  );
  // Not by spreading: an adapter of many modules would exceed the arguments of a call.
  const [least, most] = [
    ranks.reduce((a, b) => Math.min(a, b), Infinity),
    ranks.reduce((a, b) => Math.max(a, b), 0),
  ];
  const rank = ranks.length > 0 ? [least, most] : null;
  const rankText = rank &&
    (least === most ? `rank ${least}` : `rank ${least} to ${most}`);
  const dtype = mainDtype(tensors);
  const [alpha, alphaText] = alphaOf(names, texts);
  const text = joined([
    kind,
    rankText,
    shown ?? "base unknown",
    alphaText,
    ...notes,
  ], dtype);
  return { kind, base, rank, alpha, packing: null, dtype, text };
}

function alphaOf(names, texts) {
  for (const [file, key] of rules.alpha) {
    const value = texts[file]?.[key];
    if (
      ["string", "number"].includes(typeof value) &&
      /^[0-9]+(\.[0-9]+)?$/.test(String(value))
    ) {
      return [Number(value), `alpha ${value} (${file === "metadata" ? key : file})`];
    }
  }
  return any(rules.alphas, names) ? ["stored", "alpha stored"] : [null, "alpha not stored"];
}

function unpacked(names, tensors) {
  for (const rule of rules.packings) {
    const [implied, bits] = [[], new Set()];
    const mayExist = (suffixes) => [suffixes].flat().some((suffix) => names.mayEnd(suffix.split(" ")[0]));
    if (!Object.values(rule.parts).every(mayExist)) continue;
    for (const [module, parts] of groupsOf(rule.parts, names)) {
      if (
        parts.size < Object.keys(rule.parts).length || !areEqual(rule, parts)
      ) continue;
      const shape = rule.shape.map((one) => one === null ? null : computed(one, parts));
      implied.push({ name: `${module}.weight`, dtype: "", shape });
      bits.add(computed(rule.bits, parts));
    }
    if (implied.length === 0 || (rule.bits && bits.has(null))) continue;
    const stated = new Set(implied.map(({ name }) => name));
    const rest = tensors.filter(({ name }) => !stated.has(name));
    return {
      packing: withBits(rule.say, bits),
      implied: new Names([...implied, ...rest]),
    };
  }
  return { packing: null, implied: names };
}

function withBits(text, bits) {
  const known = [...bits].filter((one) => one !== null).sort((a, b) => a - b);
  if (known.length === 0) return text;
  return text.replace(
    "{}",
    known.length === 1 ? String(known[0]) : `${known[0]} to ${known.at(-1)}`,
  );
}

function areEqual(rule, parts) {
  return !rule.equal ||
    new Set(rule.equal.map((one) => computed(one, parts))).size === 1;
}

/** The tensors of each module, by the names of their parts. */
function groupsOf(parts, names) {
  const found = new Map();
  for (const [part, suffixes] of Object.entries(parts)) {
    for (const suffix of [suffixes].flat()) {
      const [ending, dtypes] = suffix.split(" ");
      for (const tensor of names.ending(ending)) {
        if (dtypes && !dtypes.split("|").includes(tensor.dtype)) continue;
        const module = tensor.name.slice(0, tensor.name.length - ending.length);
        if (!found.has(module)) found.set(module, new Map());
        found.get(module).set(part, tensor);
      }
    }
  }
  return found;
}

/** The value of an expression such as `zeros.1 * 32 / scales.1`, from left to right. */
function computed(text, parts) {
  if (!text) return null;
  const [first, ...rest] = text.split(" ");
  let value = operand(first, parts);
  for (let at = 0; at < rest.length; at += 2) {
    const other = operand(rest[at + 1], parts);
    const divides = rest[at] === "/";
    if (
      value === null || other === null ||
      (divides && (other === 0 || value % other !== 0))
    ) return null;
    value = divides ? value / other : value * other;
  }
  return value;
}

function operand(text, parts) {
  if (/^[0-9]+$/.test(text)) return Number(text);
  for (const one of text.split("|")) {
    const [part, axis] = one.split(".");
    const length = parts.get(part)?.shape[axis];
    if (length !== undefined) return length;
  }
  return null;
}

/** The base, its text with the source, and what sources say beside it. */
function supported(found, texts, role) {
  let base = found?.base ?? null;
  let shown = base;
  let candidates = base === null ? ["*"] : found.candidates ?? [];
  const notes = [];
  for (const source of rules.sources) {
    const value = texts[source.file]?.[source.key];
    if (
      (source.for ?? role) !== role || typeof value !== "string" || value === ""
    ) continue;
    const where = source.file === "metadata" ? source.key : source.file;
    const { stated, isKnown } = statedBy(source, value);
    if (
      stated === null ||
      (found === null && !isKnown && source.bases && !texts["config.json"])
    ) continue;
    if (candidates[0] === "*" || candidates.includes(stated)) {
      [base, shown, candidates] = [stated, `${source.bases ? "" : "base model: "}${stated} (${where})`, []];
    } else if (!source.bases) notes.push(`trained on ${stated} (${where})`);
    else if (!agree(base, stated)) {
      notes.push(`${where} says ${value}`);
    }
  }
  return { base, shown, notes };
}

function statedBy(source, value) {
  if (!source.bases) return { stated: value, isKnown: true };
  for (const [pattern, base] of Object.entries(source.bases)) {
    if (exactly(pattern).test(value)) {
      return { stated: base || value, isKnown: base !== "" };
    }
  }
  return { stated: null, isKnown: false };
}

/** Whether one name begins with the other: `qwen2_5_vl` is "Qwen 2.5 VL". */
function agree(base, stated) {
  const [one, other] = [base ?? "", stated].map((name) => name.toLowerCase().replace(/[^a-z0-9]/g, ""));
  return base !== null && (one.startsWith(other) || other.startsWith(one));
}

function mainDtype(tensors) {
  const sizes = new Map();
  for (const { dtype, shape } of tensors) {
    sizes.set(
      dtype,
      (sizes.get(dtype) ?? 0) +
        shape.reduce((size, length) => size * length, 1),
    );
  }
  const whole = [...sizes.values()].reduce((sum, size) => sum + size, 0);
  return [...sizes].find(([, size]) => whole > 0 && size >= MAIN_SHARE * whole)
    ?.[0] ?? null;
}
