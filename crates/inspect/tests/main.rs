//! The tests of what callers see, a file for each subject, and one program for all.
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
