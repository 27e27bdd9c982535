//! Tests of the public API, one file for each subject, in one program, since each program takes seconds to build.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test fails by panicking, also in the functions it calls"
)]

mod answers;
mod files;
mod of_hyper;
mod server;
mod words;
