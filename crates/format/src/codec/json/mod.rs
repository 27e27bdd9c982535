//! The JSON header of the `.safetensors` format.

mod parse;
mod render;
mod salvage;
mod value;

#[cfg(feature = "fuzzing")]
pub(crate) use parse::compare;
pub(crate) use parse::{Compact, parse, plain_nbytes};
pub(crate) use render::{data_rank, render, render_metadata, string};
pub(crate) use salvage::salvage;
