//! A driver of GPUs that are not there: the C functions of CUDA's driver API that copies need, over memory of the host.
//!
//! It does as late as the real one may what the real one does at any time, so that code which forgets to wait is wrong in
//! nearly every run, and not in one of a thousand:
//!
//! - A copy fills its destination with poison at once, and reads its source when it is carried out. Nothing is carried out
//!   before somebody waits or queues more; then a seeded scheduler takes some steps of some streams. A stream keeps its order,
//!   and what events order; nothing else does.
//! - Memory of the device cannot be touched by the processor. Pinned memory that was freed keeps other bytes.
//! - What the real driver lets pass is counted: calls without a context, from the child of a fork or during a capture, copies
//!   from memory that is not pinned, that overlap, or that reach memory which is not allocated.
//! - The call of any number can be made to fail with any code.
//!
//! `control` has the functions by which tests say what happens, and ask what did.

pub mod abi;
mod codes;
pub mod control;
pub mod counters;
mod memory;
mod pages;
mod simulator;
mod streams;
