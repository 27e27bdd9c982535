// Counts the parameters of a model.

import { isObject, Model } from "./model.js";

/**
 * Returns the number of parameters by dtype and in total, as huggingface.js counts them: the parameters of the model
 * before quantisation, without the scales and zero points that quantisation adds. `count: "stored"` counts the elements
 * in the file instead.
 */
export function parameterCount(source, options = {}) {
  const { count = "logical" } = options;
  if (count !== "logical" && count !== "stored") throw new TypeError('count must be "logical" or "stored"');
  const headers = source instanceof Model ? [...source.shards.values()] : [source];
  if (count === "stored") return totalled(storedCount(headers), undefined);
  const config = options.config ?? (source instanceof Model ? source.config : null);
  const said = source instanceof Model && source.index !== null ? source.index.metadata : headers[0].metadata;
  const declared = said instanceof Map ? said.get("total_parameters") : said?.total_parameters;
  return totalled(logicalCount(headers, config), declared);
}

function totalled(counts, declared) {
  const computed = [...counts.values()].reduce((total, count) => total + count, 0);
  const parameterTotal = Math.min(declaredTotal(declared) ?? Infinity, computed);
  return { parameterCount: Object.fromEntries(counts), parameterTotal };
}

/** The value of `total_parameters`, if it is a number. Some writers store it as text. */
function declaredTotal(declared) {
  if (!declared || (typeof declared !== "string" && typeof declared !== "number")) return null;
  // As huggingface.js parses it: the leading digits, so that "1e9" is 1.
  const total = typeof declared === "string" ? parseInt(declared, 10) : Math.floor(declared);
  return total >= 0 ? total : null;
}

/**
 * Returns the number of elements of a tensor. The product is exact as a double: a file whose size is a safe integer has
 * more than 2^53 elements only if they are packed, and the count of packed elements is even.
 */
function elements(tensor) {
  return tensor.nbytes === 0 ? 0 : tensor.shape.reduce((product, dim) => product * dim, 1);
}

function storedCount(headers) {
  const counts = new Map();
  for (const header of headers) {
    for (const tensor of header.tensors) add(counts, tensor.dtype, elements(tensor));
  }
  return counts;
}

function logicalCount(headers, config) {
  const scheme = quantisation(config, headers);
  const counts = new Map();
  for (const header of headers) {
    for (const tensor of header.tensors) {
      // Scales of the microscaling formats are not parameters, and neither are scalars.
      if (tensor.dtype === "F8_E8M0" || scheme.isAuxiliary(tensor) || tensor.shape.length === 0) continue;
      add(counts, tensor.dtype, unpacked(elements(tensor), scheme.packing(tensor)));
    }
  }
  return counts;
}

function add(counts, dtype, count) {
  counts.set(dtype, (counts.get(dtype) ?? 0) + count);
}

/** Returns the parameters in `count` elements that hold `container / bits` parameters each, rounded. */
function unpacked(count, { container, bits }) {
  if (container === bits) return count;
  const numerator = 2n * BigInt(count) * BigInt(container) + BigInt(bits);
  return Number(numerator / (2n * BigInt(bits)));
}

const UNPACKED = { container: 1, bits: 1 };

const CONTAINER_BITS = new Map(Object.entries({ U8: 8, I8: 8, U16: 16, I16: 16, U32: 32, I32: 32 }));

/** Describes elements of an integer dtype that hold several parameters of `bits` each. */
function packed(dtype, bits) {
  const container = CONTAINER_BITS.get(dtype);
  const isPacked = container !== undefined && Number.isSafeInteger(bits) && bits > 0 && bits < container;
  return isPacked ? { container, bits } : UNPACKED;
}

function times(factor) {
  return { container: factor, bits: 1 };
}

/** Splits a name at its last dot, and returns both parts. */
function suffixOf(name) {
  return name.slice(name.lastIndexOf(".") + 1);
}

function moduleOf(name) {
  return name.slice(0, Math.max(0, name.lastIndexOf(".")));
}

const AUXILIARY = new Set([
  "weight_scale",
  "weight_scale_inv",
  "weight_scale_2",
  "weight_global_scale",
  "weight_zero_point",
  "input_scale",
  "input_global_scale",
  "input_zero_point",
  "zero_point",
  "weight_shape",
  "weight_g_idx",
]);

const NOT_QUANTISED = { isAuxiliary: () => false, packing: () => UNPACKED };

/** Returns the quantisation of a model according to `config.json`: auxiliary tensors, and how weights are packed. */
function quantisation(config, headers) {
  const settings = quantisationConfig(config);
  if (settings === null) return NOT_QUANTISED;
  const method = (METHODS[settings.quant_method] ?? METHODS.other)(settings, config, headers);
  const isQuantised = quantisedNames(settings);
  return {
    isAuxiliary: (tensor) => AUXILIARY.has(suffixOf(tensor.name)) || method.isAuxiliary(tensor, isQuantised),
    packing: (tensor) => (isQuantised(tensor.name) ? method.packing(tensor) : UNPACKED),
  };
}

function quantisationConfig(config) {
  for (const place of [config, config?.text_config]) {
    if (!isObject(place)) continue;
    const found = mlxConfig(place) ?? (isObject(place.quantization_config) ? place.quantization_config : null);
    if (found !== null) return found;
  }
  return null;
}

/** mlx writes `quantization`, without a method, and a copy under the usual name. */
function mlxConfig(place) {
  for (const settings of [place.quantization, place.quantization_config]) {
    if (!isObject(settings) || settings.quant_method !== undefined) continue;
    if ("group_size" in settings && "bits" in settings) return { ...settings, quant_method: "mlx" };
  }
  return null;
}

/** Whether a module is quantised: it is unless a list in the configuration excludes it. */
function quantisedNames(settings) {
  const ignored = strings(settings.ignore).map(targetMatcher);
  const kept = strings(settings.modules_to_not_convert);
  return (name) => {
    const weight = name.lastIndexOf(".weight");
    const module = weight < 0 ? name : name.slice(0, weight);
    if (ignored.some((matches) => matches(module))) return false;
    return !kept.some((pattern) => matchesGlob(`*${pattern}*`, name));
  };
}

function strings(list) {
  return Array.isArray(list) ? list.filter((item) => typeof item === "string") : [];
}

/** Matches a target of compressed-tensors: a name, or `re:` and a pattern. Only common patterns are supported. */
function targetMatcher(target) {
  if (!target.startsWith("re:")) return (module) => module === target;
  const glob = globOf(target.slice(3));
  return glob === null ? () => false : (module) => matchesGlob(glob, module);
}

/** Returns the glob equal to a regular expression, or null. The expression is untrusted, so it is never run. */
function globOf(pattern) {
  const isAnchored = pattern.endsWith("$");
  const body = pattern.replace(/^\^/, "").replace(/\$$/, "") + (isAnchored ? "" : ".*");
  let glob = "";
  for (let at = 0; at < body.length;) {
    if (body.startsWith(".*", at)) {
      glob += "*";
      at += 2;
    } else if (body.startsWith("\\.", at)) {
      glob += ".";
      at += 2;
    } else if (/[\\^$.*+?()[\]{}|]/.test(body[at])) {
      return null;
    } else {
      glob += body[at++];
    }
  }
  return glob;
}

/** Whether all of `text` matches `glob`, in which `*` is any text. Takes time up to the product of their lengths. */
function matchesGlob(glob, text) {
  let [at, place, star, resume] = [0, 0, -1, 0];
  while (at < text.length) {
    if (glob[place] === "*") {
      star = place++;
      resume = at;
    } else if (place < glob.length && glob[place] === text[at]) {
      place++;
      at++;
    } else if (star >= 0) {
      // The last star takes one more character.
      place = star + 1;
      at = ++resume;
    } else {
      return false;
    }
  }
  return /^\**$/.test(glob.slice(place));
}

/** By `quant_method`: further tensors that are not parameters, and how the other tensors are packed. */
const METHODS = {
  __proto__: null,

  mxfp4: () => ({
    isAuxiliary: ({ dtype, name }) => dtype === "U8" && suffixOf(name).endsWith("_scales"),
    packing: ({ dtype, name }) => (dtype === "U8" && name.includes("_blocks") ? times(2) : UNPACKED),
  }),

  gptq: packedInWords,
  awq: packedInWords,

  "compressed-tensors": (settings) => {
    const groupOf = targetGroups(settings);
    return {
      isAuxiliary: () => false,
      packing: ({ dtype, name }) => {
        const { format, bits } = groupOf(moduleOf(name));
        return format.endsWith("pack-quantized") ? packed(dtype, bits) : UNPACKED;
      },
    };
  },

  fp8: (settings, config) => {
    const bits = expertBits(settings, config);
    const isExpert = (name) => name.includes(".experts.") && !name.includes("shared_experts");
    return {
      isAuxiliary: () => false,
      packing: ({ dtype, name }) => (isExpert(name) ? packed(dtype, bits) : UNPACKED),
    };
  },

  bitsandbytes: (settings) => ({
    isAuxiliary: ({ name }) => {
      const suffix = suffixOf(name);
      return BITSANDBYTES_STATE.has(suffix) || suffix.startsWith("bitsandbytes__");
    },
    packing: ({ dtype }) => (settings.load_in_4bit && dtype === "U8" ? times(2) : UNPACKED),
  }),

  mlx: (settings, _, headers) => mlxMethod(settings, headers),

  other: (settings) => ({
    isAuxiliary: () => false,
    packing: ({ dtype }) => {
      const isFourBits = settings.load_in_4bit || settings.bits === 4;
      return isFourBits && dtype === "U8" ? times(2) : UNPACKED;
    },
  }),
};

const BITSANDBYTES_STATE = new Set(["absmax", "quant_map", "nested_absmax", "nested_quant_map"]);

/** gptq and awq: as many parameters as fit in a word of 32 bits. */
function packedInWords({ bits = 4 }) {
  const state = new Set(["qzeros", "g_idx", "scales"]);
  return {
    isAuxiliary: ({ name }, isQuantised) => state.has(suffixOf(name)) && isQuantised(name),
    packing: ({ dtype, name }) => {
      if (suffixOf(name) === "qweight") return times(bits > 0 ? Math.max(1, Math.floor(32 / bits)) : 1);
      return dtype === "U8" && (bits === 4 || bits === 2) ? times(8 / bits) : UNPACKED;
    },
  };
}

/** Returns, for a module, the format of its compressed-tensors group, and the bits of its weights. */
function targetGroups(settings) {
  const groups = (isObject(settings.config_groups) ? Object.values(settings.config_groups) : [])
    .filter(isObject)
    .map((group) => ({ ...group, matchers: strings(group.targets).map(targetMatcher) }));
  return (module) => {
    const group = groups.find(({ matchers }) => matchers.some((matches) => matches(module)));
    const format = String(group?.format ?? settings.format ?? "");
    const bits = group?.weights?.num_bits ?? groups[0]?.weights?.num_bits ?? /\d+/.exec(format)?.[0] ?? 4;
    return { format, bits: Number(bits) };
  };
}

const BITS_BY_NAME = new Map(Object.entries({ nvfp4: 4, mxfp4: 4, fp4: 4, int4: 4, uint4: 4, nf4: 4, int2: 2 }));

function expertBits(settings, config) {
  const ofModel = config?.expert_dtype ?? config?.text_config?.expert_dtype;
  return BITS_BY_NAME.get(settings.expert_dtype ?? ofModel ?? settings.store_dtype);
}

function mlxMethod(settings, headers) {
  // Names of all shards, since a weight and its scales may be in different ones.
  const names = new Set(headers.flatMap((header) => [...header.names()]));
  const quantised = (module) => {
    const override = Object.hasOwn(settings, module) ? settings[module] : null;
    if (override === false) return null;
    const { mode = "affine", bits, group_size: groupSize } = { ...settings, ...(isObject(override) ? override : {}) };
    const isComplete = names.has(`${module}.scales`) && (mode !== "affine" || names.has(`${module}.biases`));
    return isComplete && isMlxBits(mode, bits, groupSize) ? { mode, bits } : null;
  };
  return {
    isAuxiliary: ({ name }) => {
      const suffix = suffixOf(name);
      if (suffix !== "scales" && suffix !== "biases") return false;
      const module = quantised(moduleOf(name));
      return module !== null && (suffix === "scales" || module.mode === "affine");
    },
    packing: ({ dtype, name }) => {
      const module = dtype === "U32" && suffixOf(name) === "weight" ? quantised(moduleOf(name)) : null;
      return module === null ? UNPACKED : packed(dtype, module.bits);
    },
  };
}

function isMlxBits(mode, bits, groupSize) {
  if (mode === "affine") return [2, 3, 4, 5, 6, 8].includes(bits) && [32, 64, 128].includes(groupSize);
  return Number.isSafeInteger(bits) && bits > 0 && bits <= 32;
}
