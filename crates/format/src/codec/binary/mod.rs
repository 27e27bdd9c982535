//! The binary header of the `.bt` format.

mod parse;
mod render;
mod varint;

pub(crate) use parse::{parse, salvage};
pub(crate) use render::render;
