//! Loading cache lines before they are used. A processor waits for a few lines at once if a loop writes to one place after
//! another, and for many if all are requested first.
#![allow(unsafe_code)]

/// Request the cache line with this byte, and do not wait for it.
#[cfg(all(target_arch = "x86_64", not(miri)))]
pub(crate) fn load_line(byte: &u8) {
    use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
    // SAFETY: `_mm_prefetch` requires SSE, which each processor of this architecture has. It accepts any address: it changes
    // no memory and causes no fault.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(byte).cast()) }
}

/// Request the cache line with this byte. A processor executes later instructions while a load waits.
#[cfg(not(all(target_arch = "x86_64", not(miri))))]
pub(crate) fn load_line(byte: &u8) {
    std::hint::black_box(*byte);
}
