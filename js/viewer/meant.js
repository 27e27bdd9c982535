// Dequantises weights: which tensors belong together, and how a part of them is decoded. Only the visible part is read:
// rows of the packed weights, and of their scales.

import { readRange } from "../src/source.js";

/**
 * Finds the group of a tensor. A group has `kind`, the `shape` of the decoded values, its `parts`, and the settings
 * that `readMeant` needs; null if the tensor belongs to no known group. A promise is returned, once, for a group whose shape
 * is in the data of a tensor.
 */
export function meantOf(table) {
  const config = table.model.config?.quantization_config ?? {};
  const named = (name) => table.numberOf(name);
  const part = (name) => {
    const number = named(name);
    return number === undefined ? null : { name, ...table.wired(number) };
  };
  /** Groups by their stems: what their data says, null if it does not fit, a promise until it is read. */
  const settled = new Map();
  const settle = (stem, { settle: read, ...group }) => {
    const number = named(group.roles.state.name);
    const position = table.position(number);
    const { source } = table.files[table.file[number]];
    const settling = readRange(source, position, position + table.tensors[number].nbytes).then(read).catch(() => null)
      .then((more) => settled.set(stem, more && { dtype: "F32", nbytes: 1, ...group, ...more }));
    settled.set(stem, settling);
    return settling;
  };
  return (number) => {
    const { name } = table.tensors[number];
    // A weight whose name is the beginning of the names of its scales has no end of its own.
    const stem = ENDS.exec(name)?.[1] ?? `${name}_`;
    if (settled.has(stem)) return settled.get(stem);
    for (const scheme of SCHEMES) {
      /** @type {any} */
      const group = scheme(stem, part, config);
      if (group && group.parts.some((one) => one.name === name)) {
        return group.settle ? settle(stem, group) : { dtype: "F32", nbytes: 1, ...group };
      }
    }
    return null;
  };
}

const ENDS =
  /^(.*?)(?:qweight|qzeros|scales|g_idx|weight_packed|weight_scale_inv|weight_scale_2|weight_scale|weight_global_scale|weight_zero_point|weight_g_idx|weight_shape|weight\.(?:nested_)?absmax|weight\.(?:nested_)?quant_map|weight\.quant_state\.bitsandbytes__(?:nf4|fp4)|SCB|weight|_blocks|_scales)$/s;
const FLOATS = ["F16", "BF16", "F32"];
const NVFP4_BLOCK = 16;
const isMatrix = (part, dtypes) => part !== null && part.shape.length === 2 && dtypes.includes(part.dtype);
const hasShape = (part, shape) => String(part.shape) === String(shape);

/** Words of 32 bits along the rows; zero points reduced by one; a row's group is given by `g_idx`, or by its position.
 */
function gptq(stem, part, config) {
  const [packed, zeros, scales, groups] = ["qweight", "qzeros", "scales", "g_idx"].map((name) => part(stem + name));
  const bits = config.bits ?? 4;
  const isOurs = (config.quant_method ?? "gptq") === "gptq" && (bits === 4 || bits === 8);
  if (!isOurs || !isMatrix(packed, ["I32"]) || !isMatrix(scales, FLOATS) || !isMatrix(zeros, ["I32"])) return null;
  const each = 32 / bits;
  const shape = [packed.shape[0] * each, packed.shape[1]];
  if (scales.shape[1] !== shape[1] || zeros.shape[1] * each !== shape[1] || shape[0] % scales.shape[0] !== 0) {
    return null;
  }
  const parts = [packed, zeros, scales, groups].filter(Boolean);
  return {
    kind: `GPTQ, ${bits} bits`,
    scheme: "gptq",
    bits,
    shape,
    parts,
    roles: { packed, zeros, scales, groups },
    add: config.checkpoint_format === "gptq_v2" ? 0 : 1,
  };
}

/** Words of 32 bits along the columns, in the order of AutoAWQ's "gemm"; zero points unchanged. */
function awq(stem, part, config) {
  const [packed, zeros, scales] = ["qweight", "qzeros", "scales"].map((name) => part(stem + name));
  const isOurs = (config.quant_method ?? "awq") === "awq" && (config.bits ?? 4) === 4 &&
    /^gemm$/i.test(config.version ?? "gemm");
  if (!isOurs || !isMatrix(packed, ["I32"]) || !isMatrix(scales, FLOATS) || !isMatrix(zeros, ["I32"])) return null;
  const shape = [packed.shape[0], packed.shape[1] * 8];
  const groups = scales.shape[0];
  if (!hasShape(scales, [groups, shape[1]]) || !hasShape(zeros, [groups, packed.shape[1]]) || shape[0] % groups !== 0) {
    return null;
  }
  return {
    kind: "AWQ, 4 bits",
    scheme: "awq",
    shape,
    parts: [packed, zeros, scales],
    roles: { packed, zeros, scales },
  };
}

/** Floats of 8 bits with a scale for each block of a matrix, each row, or all of it; or integers, optionally with zero
 * points. */
function scaled(stem, part, config) {
  const weight = part(`${stem}weight`);
  const scales = part(`${stem}weight_scale_inv`) ?? part(`${stem}weight_scale`);
  const zeros = part(`${stem}weight_zero_point`);
  if (
    !isMatrix(weight, ["F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I8"]) || scales === null ||
    !FLOATS.includes(scales.dtype)
  ) return null;
  if (zeros !== null && (zeros.dtype !== "I8" || !hasShape(zeros, scales.shape))) return null;
  const grid = scales.shape.length === 2 ? scales.shape : [scales.shape[0] ?? 1, 1];
  if (scales.shape.length > 2 || grid.some((dim) => dim === 0)) return null;
  // The last block may be incomplete.
  const block = grid.map((dim, axis) => {
    const length = weight.shape[axis];
    const likely = [config.weight_block_size?.[axis], 128, length / dim].filter((size) =>
      Number.isInteger(size) && size > 0
    );
    return dim === 1 ? length : (likely.find((size) => Math.ceil(length / size) === dim) ?? 0);
  });
  if (block.includes(0)) return null;
  return {
    kind: `${weight.dtype}, scales for blocks of ${block.join(" × ")}`,
    scheme: "scaled",
    shape: weight.shape,
    parts: [weight, scales, zeros].filter(Boolean),
    roles: { weight, scales, zeros },
    block,
    grid,
  };
}

/**
 * compressed-tensors: words of 32 bits along the columns. Zero points are packed along the rows; without them, half of
 * the range is used. A column's group is given by `weight_g_idx`, or by its position.
 */
function packed(stem, part, config) {
  const names = ["weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape"];
  const parts = names.map((name) => part(stem + name));
  const [weight, scales, zeros, groups] = parts;
  if (!isMatrix(weight, ["I32"]) || !isMatrix(scales, FLOATS)) return null;
  const found = packingOf(config, weight, scales);
  if (found === null) return null;
  const { bits, shape } = found;
  if (
    zeros !== null && !(zeros.dtype === "I32" && hasShape(zeros, [Math.ceil((shape[0] * bits) / 32), scales.shape[1]]))
  ) return null;
  if (groups !== null && !hasShape(groups, [shape[1]])) return null;
  return {
    kind: `pack-quantized, ${bits} bits`,
    scheme: "packed",
    bits,
    shape,
    parts: parts.filter(Boolean),
    roles: { weight, scales, zeros, groups },
  };
}

/** Bits per number, and the shape, from the first group of the configuration that fits; null if none does. */
function packingOf({ config_groups: groups }, weight, scales) {
  for (const group of Object.values(groups ?? {})) {
    const { num_bits: bits = 4, group_size: size } = group?.weights ?? {};
    if (bits !== 4 && bits !== 8) continue;
    const room = (weight.shape[1] * 32) / bits;
    const columns = size > 0 ? scales.shape[1] * size : room;
    // The last word of a row may be filled only partly.
    const isFull = columns <= room && columns > room - 32 / bits && columns % scales.shape[1] === 0;
    if (isFull && scales.shape[0] === weight.shape[0]) return { bits, shape: [weight.shape[0], columns] };
  }
  return null;
}

/** MXFP4: blocks of 32 numbers in 16 bytes, the lower half of each byte first, with a power of two for each block. */
function blocks(stem, part) {
  const [weight, scales] = ["_blocks", "_scales"].map((name) => part(stem + name));
  if (
    !weight || !scales || weight.dtype !== "U8" || scales.dtype !== "U8" || weight.shape.length < 3 ||
    weight.shape.at(-1) !== 16
  ) return null;
  if (String(scales.shape) !== String(weight.shape.slice(0, -1))) return null;
  const shape = [weight.shape.slice(0, -2).reduce((product, dim) => product * dim, 1), scales.shape.at(-1) * 32];
  return { kind: "MXFP4", scheme: "blocks", shape, parts: [weight, scales], roles: { weight, scales } };
}

/**
 * NVFP4: two numbers in a byte, the lower half first, with a scale for each 16 of them. The scales of compressed-tensors are
 * divided by a number for the whole matrix, and ModelOpt's scales are multiplied by it. The experts of a layer may be one
 * tensor, whose name has no end; ModelOpt packs those along the rows.
 */
function nvfp4(stem, part) {
  const weight = part(`${stem}weight_packed`) ?? part(`${stem}weight`) ?? part(stem.replace(/_$/, ""));
  const scales = part(`${stem}weight_scale`);
  const divisor = part(`${stem}weight_global_scale`);
  const whole = divisor ?? part(`${stem}weight_scale_2`);
  if (weight?.dtype !== "U8" || scales?.dtype !== "F8_E4M3" || whole?.dtype !== "F32") return null;
  const { shape: packed } = weight;
  if (packed.length !== 2 && packed.length !== 3) return null;
  const [experts, down, across] = packed.length === 2 ? [1, ...packed] : packed;
  const ofBlocks = (rows, columns) => [...packed.slice(0, -2), rows, columns];
  const each = NVFP4_BLOCK / 2;
  const isAcross = hasShape(scales, ofBlocks(down, across / each));
  if (!isAcross && (packed.length === 2 || !hasShape(scales, ofBlocks(down / each, across)))) return null;
  if (whole.nbytes !== 4 && whole.nbytes !== 4 * experts) return null;
  return {
    kind: isAcross ? "NVFP4" : "NVFP4, packed along the rows",
    scheme: "nvfp4",
    shape: isAcross ? [experts * down, across * 2] : [experts * down * 2, across],
    parts: [weight, scales, whole],
    roles: { weight, scales, whole },
    experts,
    isAcross,
    isDivided: divisor !== null,
  };
}

/**
 * bitsandbytes, 4 bits: two numbers in a byte, the upper half first, as indices of a table, with a scale for each block. The
 * scales may be quantised too. The shape is in a JSON text, which is the data of a tensor.
 */
function bits4(stem, part) {
  const names = ["absmax", "quant_map", "nested_absmax", "nested_quant_map"];
  const weight = part(`${stem}weight`);
  const [absmax, map, nestedAbsmax, nestedMap] = names.map((name) => part(`${stem}weight.${name}`));
  const states = ["nf4", "fp4"].map((kind) => part(`${stem}weight.quant_state.bitsandbytes__${kind}`));
  const state = states.find((one) => one !== null);
  if (weight?.dtype !== "U8" || !state || map?.dtype !== "F32" || !hasShape(map, [16]) || absmax?.shape.length !== 1) {
    return null;
  }
  const isNested = absmax.dtype === "U8";
  if (isNested ? nestedMap?.nbytes !== 1024 || nestedAbsmax?.dtype !== "F32" : absmax.dtype !== "F32") return null;
  const settle = (bytes) => {
    const { shape, blocksize, nested_blocksize: nested, nested_offset: offset } = JSON.parse(
      new TextDecoder().decode(bytes),
    );
    const isMatrixOf = shape?.length === 2 && shape[1] % 2 === 0 && shape[0] * shape[1] === 2 * weight.nbytes;
    const isWhole = (size) => Number.isSafeInteger(size) && size > 0;
    if (!isMatrixOf || !isWhole(blocksize) || absmax.shape[0] !== Math.ceil((2 * weight.nbytes) / blocksize)) {
      return null;
    }
    if (!isNested) return { shape, blocksize };
    const fits = isWhole(nested) && nestedAbsmax.shape[0] === Math.ceil(absmax.shape[0] / nested);
    return fits && Number.isFinite(offset) ? { shape, blocksize, nested, offset } : null;
  };
  return {
    kind: `bitsandbytes, ${state === states[0] ? "NF4" : "FP4"}${isNested ? ", scales quantised" : ""}`,
    scheme: "bits4",
    parts: [weight, absmax, map, nestedAbsmax, nestedMap, state].filter(Boolean),
    roles: { weight, absmax, map, nestedAbsmax, nestedMap, state },
    settle,
  };
}

/** bitsandbytes, 8 bits: integers with the largest magnitude of each row. */
function bits8(stem, part) {
  const [weight, scales] = [part(`${stem}weight`), part(`${stem}SCB`)];
  if (!isMatrix(weight, ["I8"]) || scales?.dtype !== "F32" || !hasShape(scales, [weight.shape[0]])) return null;
  const { shape } = weight;
  return { kind: "bitsandbytes, 8 bits", scheme: "bits8", shape, parts: [weight, scales], roles: { weight, scales } };
}

const SCHEMES = [gptq, awq, packed, scaled, blocks, nvfp4, bits4, bits8];
