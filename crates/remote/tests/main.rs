//! The tests of what callers see, a file for each subject, and one program for all, since each more takes seconds to build.
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
