//! The binary header of `.bt`.

mod parse;
mod render;

pub(crate) use parse::parse;
pub(crate) use render::render;
