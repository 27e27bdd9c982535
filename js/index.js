// Everything that programs import.

export { hubUrl } from "./src/address.js";
export { decode, DECODED, valuesOf } from "./src/decode.js";
export { compareNames, escapeName, quoteName, SafetensorError } from "./src/errors.js";
export { headSize, MAX_HEADER_BYTES, MAX_REMOTE_HEADER_BYTES, parseHeader } from "./src/header.js";
export { readHeader, readIndex, readModel, tensorRange } from "./src/model.js";
export { parameterCount } from "./src/parameters.js";
export { DTYPES } from "./src/raw.js";
export { MAX_INDEX_BYTES, parseIndex } from "./src/shard_index.js";
export { openSource, readRange, streamRange } from "./src/source.js";
export { writeSafetensors } from "./src/write.js";
