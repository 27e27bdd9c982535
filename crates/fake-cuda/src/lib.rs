//! A simulated GPU driver: the C functions of CUDA's driver API that copies need, implemented with host memory.
//!
//! It does everything as late as the real driver may. So code that forgets to wait fails in nearly every run, instead
//! of one run in a thousand:
//!
//! - A copy fills its destination with poison at once, and reads its source when it runs. Work runs only when a thread
//!   waits or queues more; then a seeded scheduler takes some steps of some streams. Only the order within a stream and
//!   the order of events are guaranteed.
//! - The processor cannot access device memory. Pinned memory that was freed is overwritten.
//! - Mistakes that the real driver accepts are counted: calls without a context, in a child after a fork or during a
//!   capture, and copies from memory that is not pinned, that overlap, or that touch unallocated memory.
//! - In another mode, copies take the time of a link and move no bytes.
//! - Any call, by number, can be made to fail with any code.
//!
//! `control` has the functions with which tests control the simulator and read its counters.

pub mod abi;
mod codes;
pub mod control;
pub mod counters;
mod link;
mod memory;
mod pages;
mod simulator;
mod streams;
