//! Carrying out a plan: one loop for every source and every plan.

use std::io;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, Thread};
use std::time::Duration;

use ingot_format::to_u64;
use memmap2::MmapMut;

use crate::hash::Digests;
use crate::plan::Plan;
use crate::source::{Source, read_full};
use crate::watch::Watch;

/// Why a plan was not carried out.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The system refuses the memory.
    OutOfMemory { nbytes: usize, source: io::Error },
    /// Reading failed, or gave fewer bytes than there should be (then there is no `source`).
    Read {
        position: u64,
        expected: usize,
        found: usize,
        source: Option<io::Error>,
    },
    /// The caller wants no more.
    Interrupted,
}

/// Bytes that one thread reads at once: large enough that the call does not matter, small enough that all
/// threads finish together and an interruption is noticed soon.
const CHUNK_NBYTES: usize = 8 << 20;

/// Below this, starting a thread takes longer than reading.
const ALONE_NBYTES: u64 = 4 << 20;

/// More threads than this have not been seen to make copying from the page cache faster.
const MAX_THREADS: usize = 16;

/// How often the calling thread looks whether to stop.
const WATCH_INTERVAL: Duration = Duration::from_millis(50);

/// Some bytes still to be read, and their place in memory.
struct Chunk<'m> {
    position: u64,
    dest: &'m mut [u8],
}

/// Reads all that `plan` says from `source`, and gives its blocks, filled. What is read goes to `digests` as well, while
/// it is in the cache.
pub(crate) fn execute(
    plan: &Plan,
    source: &dyn Source,
    digests: &[&Digests],
    watch: &dyn Watch,
) -> Result<Vec<MmapMut>, Failure> {
    let mut blocks = plan
        .blocks()
        .iter()
        .map(|&nbytes| allocate(nbytes))
        .collect::<Result<Vec<_>, _>>()?;
    let mut chunks = split(plan, &mut blocks);
    let workers = thread::available_parallelism()
        .map_or(1, usize::from)
        .min(MAX_THREADS)
        .min(chunks.len());
    if workers <= 1 || plan.nbytes() <= ALONE_NBYTES {
        for chunk in chunks {
            if watch.interrupted() {
                return Err(Failure::Interrupted);
            }
            read(source, digests, chunk)?;
        }
    } else {
        // Taken from the end, so the first bytes of the file are read first.
        chunks.reverse();
        read_in_parallel(workers, chunks, source, digests, watch)?;
    }
    Ok(blocks)
}

/// Memory for one block, zero until it is written to.
pub(crate) fn allocate(nbytes: usize) -> Result<MmapMut, Failure> {
    // A mapping has at least one byte.
    let block = MmapMut::map_anon(nbytes.max(1)).map_err(|source| Failure::OutOfMemory { nbytes, source })?;
    #[cfg(target_os = "linux")]
    if nbytes >= HUGE_PAGE_NBYTES {
        // Faulting pages in is what owned loads spend their time on; huge pages make 512 of them one. A kernel
        // without them loses nothing, so the answer does not matter.
        let _ = block.advise(memmap2::Advice::HugePage);
    }
    Ok(block)
}

#[cfg(target_os = "linux")]
const HUGE_PAGE_NBYTES: usize = 2 << 20;

/// Cuts the plan into chunks, each with the part of a block that it alone may write to.
fn split<'m>(plan: &Plan, blocks: &'m mut [MmapMut]) -> Vec<Chunk<'m>> {
    let mut chunks = Vec::new();
    let mut reads = plan.reads().iter().peekable();
    for (number, block) in blocks.iter_mut().enumerate() {
        let mut rest: &mut [u8] = block;
        let mut at = 0;
        while let Some(read) = reads.next_if(|read| read.block == number) {
            let (_, from_read) = rest.split_at_mut(read.at - at);
            let (mut dest, after) = from_read.split_at_mut(read.nbytes);
            let mut position = read.position;
            while dest.len() > CHUNK_NBYTES {
                let (chunk, more) = dest.split_at_mut(CHUNK_NBYTES);
                chunks.push(Chunk {
                    position,
                    dest: chunk,
                });
                position += to_u64(CHUNK_NBYTES);
                dest = more;
            }
            chunks.push(Chunk { position, dest });
            rest = after;
            at = read.at + read.nbytes;
        }
    }
    // Digests are taken in the order of the file.
    chunks.sort_by_key(|chunk| chunk.position);
    chunks
}

fn read(source: &dyn Source, digests: &[&Digests], chunk: Chunk<'_>) -> Result<(), Failure> {
    let (position, dest) = (chunk.position, &mut *chunk.dest);
    let outcome = fill(source, position, dest);
    for digests in digests {
        match outcome {
            Ok(()) => digests.feed(position, dest),
            Err(_) => digests.end(),
        }
    }
    outcome
}

fn fill(source: &dyn Source, position: u64, dest: &mut [u8]) -> Result<(), Failure> {
    let expected = dest.len();
    match read_full(source, position, dest) {
        Ok(found) if found == expected => Ok(()),
        Ok(found) => Err(Failure::Read {
            position,
            expected,
            found,
            source: None,
        }),
        Err(fault) => Err(Failure::Read {
            position,
            expected,
            found: 0,
            source: Some(fault),
        }),
    }
}

/// Lets `workers` threads read while this one watches. The threads end before this returns, so nothing of them
/// outlives a call: a fork between two calls meets no threads and no locks.
fn read_in_parallel(
    workers: usize,
    chunks: Vec<Chunk<'_>>,
    source: &dyn Source,
    digests: &[&Digests],
    watch: &dyn Watch,
) -> Result<(), Failure> {
    let chunks = Mutex::new(chunks);
    let first_failure = Mutex::new(None);
    let stop = AtomicBool::new(false);
    let running = AtomicUsize::new(workers);
    let next = || {
        if stop.load(Ordering::Relaxed) {
            None
        } else {
            locked(&chunks).pop()
        }
    };
    let work = || {
        while let Some(chunk) = next() {
            if let Err(failure) = read(source, digests, chunk) {
                locked(&first_failure).get_or_insert(failure);
                stop.store(true, Ordering::Relaxed);
            }
        }
    };
    let caller = thread::current();
    thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                // Dropped, and the caller woken, even if `work` panics.
                let _leave = Leave {
                    running: &running,
                    caller: &caller,
                };
                work();
            });
        }
        while running.load(Ordering::Acquire) > 0 {
            if watch.interrupted() {
                locked(&first_failure).get_or_insert(Failure::Interrupted);
                stop.store(true, Ordering::Relaxed);
            }
            thread::park_timeout(WATCH_INTERVAL);
        }
    });
    locked(&first_failure).take().map_or(Ok(()), Err)
}

/// Says, when dropped, that a thread has ended.
struct Leave<'a> {
    running: &'a AtomicUsize,
    caller: &'a Thread,
}

impl Drop for Leave<'_> {
    fn drop(&mut self) {
        self.running.fetch_sub(1, Ordering::Release);
        self.caller.unpark();
    }
}

/// The contents of a lock. A thread that panicked while holding it is reported by the scope, not here.
fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
