//! The tests of the public behaviour, one file for each subject, in one program.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking, also in the functions it calls"
)]

mod distance;
mod hash;
mod in_memory;
mod statistics;
