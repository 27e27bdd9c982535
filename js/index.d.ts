export * from "./decode.js";
export * from "./safetensors.js";
export * from "./source.js";
export * from "./write.js";
