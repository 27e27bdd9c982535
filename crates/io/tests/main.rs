//! Tests of the public API: a file for each subject, in one program, since each program takes seconds to build.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking, also in the functions it calls"
)]

mod checkpoint;
#[cfg(feature = "remote")]
mod download;
mod drop_in;
mod edit;
mod hash;
mod parts;
mod save;
mod serialize_to_file;
mod sources;
