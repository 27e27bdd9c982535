//! Pages from `VirtualAlloc`.
//!
//! Anonymous mappings are not used here: processes could share such memory, and on wine it is a file that is written to
//! the disk. And memmap2 also requests executable memory, which a hardened process is refused.
#![allow(unsafe_code)]

use std::io;
use std::ops::Range;
use std::ptr::{self, NonNull};

use windows_sys::Win32::System::Memory::{
    MEM_COMMIT, MEM_RELEASE, MEM_RESERVE, PAGE_READWRITE, VirtualAlloc, VirtualFree,
};

/// Private memory of this process.
#[derive(Debug)]
pub(crate) struct Pages {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: `Send` asks that another thread may use and free the memory: it is of the process, and no thread is noted in it.
unsafe impl Send for Pages {}
// SAFETY: `Sync` asks that threads may share a `&Pages`: through one the memory is only read, and `as_mut_ptr` leaves what
// is done by it to its caller.
unsafe impl Sync for Pages {}

impl Pages {
    /// `nbytes` bytes, one at least, which cost nothing before they are touched.
    pub(crate) fn allocate(nbytes: usize) -> io::Result<Pages> {
        // SAFETY: no preconditions if the system chooses the address.
        let start = unsafe { VirtualAlloc(ptr::null(), nbytes, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE) };
        match NonNull::new(start.cast()) {
            Some(start) => Ok(Pages { start, len: nbytes }),
            None => Err(io::Error::last_os_error()),
        }
    }

    /// The first byte. Readable and writable for [`Pages::len`] bytes as long as `self` lives.
    pub(crate) fn as_mut_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Huge pages need a privilege.
    pub(crate) fn want_huge(&self, _: Range<usize>) {}

    /// There is no `fork`.
    pub(crate) fn keep_from_children(&self) {}

    /// Memory is returned at once.
    pub(crate) fn offered(self) -> Option<Pages> {
        None
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: requires the start of a whole reservation by `VirtualAlloc`, which no code uses any more: `start` is its
        // result, and pointers to it are valid only as long as `self` lives.
        let freed = unsafe { VirtualFree(self.start.as_ptr().cast(), 0, MEM_RELEASE) };
        debug_assert_ne!(freed, 0, "it was reserved");
    }
}

/// The size for which the system allocates memory at once.
const PAGE_NBYTES: usize = 4096;

/// Request pages for fresh memory by writing a zero to each.
///
/// Before a read, wine reads and writes back a byte of each page. For an existing page this costs nothing. For a
/// missing page it costs two faults, and the second flushes the translation caches of all threads' processors.
///
/// # Safety
/// The `nbytes` bytes from `start` on are mapped for writing, their values do not matter, and no other code uses them
/// during the call.
pub(crate) unsafe fn populate(start: *mut u8, nbytes: usize) {
    for at in (0..nbytes).step_by(PAGE_NBYTES) {
        // SAFETY: `write_volatile` requires a byte that may be written: `at` is less than `nbytes`, and the caller promised
        // so many.
        unsafe { start.wrapping_add(at).write_volatile(0) };
    }
}
