// All that programs import, by one name.

export * from "./decode.js";
export * from "./safetensors.js";
export { openSource, readRange, streamRange } from "./source.js";
export * from "./write.js";
