//! The JSON header of `.safetensors`.

mod json;
mod parse;
mod render;

pub(crate) use parse::parse;
pub(crate) use render::{data_rank, render};
