//! The tests of the public behaviour, one file for each subject, in one program, since each program takes seconds to
//! build. `memory.rs` is a program of its own, with a counting allocator.
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
