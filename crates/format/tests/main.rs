//! The tests of what callers see, a file for each subject, and one program for all, since each more takes seconds to build.
//! `memory.rs` has its own, with an allocator that counts.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking, also in the functions it calls"
)]

mod against_upstream;
mod binary_header;
mod heads;
mod index_vectors;
mod round_trip;
mod salvage;
mod vectors;
