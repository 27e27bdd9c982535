// Quantised weights as the numbers that they stand for: which tensors belong together, and how a part of them is decoded.
// Only what is shown is read: rows of the packed weights, and of the scales that go with them.

/**
 * Finds the group of a tensor. What it gives for one has `kind`, the `shape` of what is meant, its `parts`, and what
 * `meantLines` needs; null where a tensor is no part of a group that is known.
 */
export function meantOf(table) {
  const config = table.model.config?.quantization_config ?? {};
  const named = (name) => table.numberOf(name);
  const part = (name) => {
    const number = named(name);
    return number === undefined ? null : { name, ...table.wired(number) };
  };
  return (number) => {
    const { name } = table.tensors[number];
    const found = /^(.*?)(qweight|qzeros|scales|g_idx|weight_packed|weight_scale_inv|weight_scale|weight_zero_point|weight_shape|weight|_blocks|_scales)$/s.exec(name);
    if (!found) return null;
    const stem = found[1];
    for (const scheme of SCHEMES) {
      const group = scheme(stem, part, config);
      if (group && group.parts.some((one) => one.name === name)) return { dtype: "F32", nbytes: 1, ...group };
    }
    return null;
  };
}

const isMatrix = (part, dtypes) => part !== null && part.shape.length === 2 && dtypes.includes(part.dtype);

/** Words of 32 bits along the rows; zero points that are one too small; the group of a row by `g_idx`, or by its place. */
function gptq(stem, part, config) {
  const [packed, zeros, scales, groups] = ["qweight", "qzeros", "scales", "g_idx"].map((name) => part(stem + name));
  const bits = config.bits ?? 4;
  const isOurs = (config.quant_method ?? "gptq") === "gptq" && (bits === 4 || bits === 8);
  if (!isOurs || !isMatrix(packed, ["I32"]) || !isMatrix(scales, ["F16", "BF16", "F32"]) || !isMatrix(zeros, ["I32"])) return null;
  const each = 32 / bits;
  const shape = [packed.shape[0] * each, packed.shape[1]];
  if (scales.shape[1] !== shape[1] || zeros.shape[1] * each !== shape[1] || shape[0] % scales.shape[0] !== 0) return null;
  const parts = [packed, zeros, scales, groups].filter(Boolean);
  return { kind: `GPTQ, ${bits} bits`, scheme: "gptq", bits, shape, parts, roles: { packed, zeros, scales, groups }, add: config.checkpoint_format === "gptq_v2" ? 0 : 1 };
}

/** Floats of 8 bits with a scale for each block of a matrix, each row, or all of it. */
function scaled(stem, part, config) {
  const weight = part(`${stem}weight`);
  const scales = part(`${stem}weight_scale_inv`) ?? part(`${stem}weight_scale`);
  if (!isMatrix(weight, ["F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I8"]) || scales === null || !/^(F32|BF16|F16)$/.test(scales.dtype)) return null;
  const grid = scales.shape.length === 2 ? scales.shape : [scales.shape[0] ?? 1, 1];
  if (scales.shape.length > 2 || grid.some((dim) => dim === 0)) return null;
  // The last block may be a part of one.
  const block = grid.map((dim, axis) => {
    const length = weight.shape[axis];
    const likely = [config.weight_block_size?.[axis], 128, length / dim].filter((size) => Number.isInteger(size) && size > 0);
    return dim === 1 ? length : (likely.find((size) => Math.ceil(length / size) === dim) ?? 0);
  });
  if (block.includes(0)) return null;
  return { kind: `${weight.dtype}, scales for blocks of ${block.join(" × ")}`, scheme: "scaled", shape: weight.shape, parts: [weight, scales], roles: { weight, scales }, block, grid };
}

/** compressed-tensors: words of 32 bits along the columns, each number less half of the range. */
function packed(stem, part, config) {
  const [weight, scales, shape] = ["weight_packed", "weight_scale", "weight_shape"].map((name) => part(stem + name));
  if (!isMatrix(weight, ["I32"]) || !isMatrix(scales, ["F16", "BF16", "F32"]) || part(`${stem}weight_zero_point`) !== null) return null;
  const bits = Object.values(config.config_groups ?? {})[0]?.weights?.num_bits ?? 4;
  if (bits !== 4 && bits !== 8) return null;
  const meant = [weight.shape[0], (weight.shape[1] * 32) / bits];
  if (scales.shape[0] !== meant[0] || meant[1] % scales.shape[1] !== 0) return null;
  return { kind: `pack-quantized, ${bits} bits`, scheme: "packed", bits, shape: meant, parts: [weight, scales, shape].filter(Boolean), roles: { weight, scales } };
}

/** MXFP4: blocks of 32 numbers in 16 bytes, the lower half of each byte first, with a power of two for each block. */
function blocks(stem, part) {
  const [weight, scales] = ["_blocks", "_scales"].map((name) => part(stem + name));
  if (!weight || !scales || weight.dtype !== "U8" || scales.dtype !== "U8" || weight.shape.length < 3 || weight.shape.at(-1) !== 16) return null;
  if (String(scales.shape) !== String(weight.shape.slice(0, -1))) return null;
  const shape = [weight.shape.slice(0, -2).reduce((product, dim) => product * dim, 1), scales.shape.at(-1) * 32];
  return { kind: "MXFP4", scheme: "blocks", shape, parts: [weight, scales], roles: { weight, scales } };
}

const SCHEMES = [gptq, packed, scaled, blocks];
