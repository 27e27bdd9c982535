//! Carrying out a plan: one way for every source, every plan and every destination.

use std::num::NonZeroUsize;
use std::thread;

use ingot_format::{to_u64, to_usize};

use crate::block::Block;
use crate::dest::Dest;
use crate::failure::{Failure, InFile, read_exactly};
use crate::plan::Plan;
use crate::source::Source;
use crate::watch::Watch;
use crate::workers::share;

/// How tensors are read.
#[derive(Clone, Copy, Debug, Default)]
pub struct ReadOptions {
    /// How many threads read at once; what suits the machine and the source by default.
    pub threads: Option<NonZeroUsize>,
}

/// Bytes that one thread reads at once: large enough that the call does not matter, small enough that all
/// threads finish together and an interruption is noticed soon. A whole number of huge pages.
const CHUNK_NBYTES: usize = 8 << 20;

/// Where reads wait, chunks may be as small as this, so that all threads have some: a read takes so long that it does
/// not pay to make them smaller.
const WAITING_CHUNK_NBYTES: usize = 1 << 20;

/// Below this, starting a thread takes longer than reading.
const ALONE_NBYTES: u64 = 4 << 20;

/// More threads than this have not been seen to make copying from the page cache faster.
const MAX_THREADS: usize = 16;

/// Reads that are under way at once where each of them waits: whoever waits needs no core.
const WAITING_THREADS: usize = 16;

/// How a number of bytes is read: on how many threads, and how much at once.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reading {
    pub(crate) threads: usize,
    pub(crate) chunk_nbytes: usize,
}

impl Reading {
    /// What suits `nbytes` bytes of `source`.
    pub(crate) fn of(nbytes: u64, source: &dyn Source, options: &ReadOptions) -> Reading {
        let threads = options.threads.map(NonZeroUsize::get);
        if !source.waits() {
            let cores = || {
                thread::available_parallelism()
                    .map_or(1, usize::from)
                    .min(MAX_THREADS)
            };
            let suits = || if nbytes <= ALONE_NBYTES { 1 } else { cores() };
            return Reading {
                threads: threads.unwrap_or_else(suits),
                chunk_nbytes: CHUNK_NBYTES,
            };
        }
        let threads = threads.unwrap_or(WAITING_THREADS);
        let each = to_usize(nbytes).unwrap_or(usize::MAX) / threads;
        Reading {
            threads,
            chunk_nbytes: each
                .clamp(WAITING_CHUNK_NBYTES, CHUNK_NBYTES)
                .next_multiple_of(WAITING_CHUNK_NBYTES),
        }
    }
}

/// Some bytes still to be read, and their place in memory.
struct Chunk<'m> {
    file: usize,
    position: u64,
    dest: Dest<'m>,
}

/// The one of `sources` that decides how all are read: one that waits, if any does.
pub(crate) fn slowest<'s>(sources: &[&'s dyn Source]) -> Option<&'s dyn Source> {
    let waiting = sources.iter().find(|source| source.waits());
    waiting.or(sources.first()).copied()
}

/// Reads all that `plan` says from `sources`, one for each of its files, into `dests`: one for each of its blocks, of
/// that size.
pub(crate) fn execute(
    plan: &Plan,
    sources: &[&dyn Source],
    dests: Vec<Dest<'_>>,
    options: &ReadOptions,
    watch: &dyn Watch,
) -> Result<(), InFile> {
    let Some(slowest) = slowest(sources) else {
        return Ok(());
    };
    let reading = Reading::of(plan.nbytes(), slowest, options);
    let chunks = split(plan, dests, reading.chunk_nbytes);
    share(
        reading.threads,
        chunks,
        plan.nbytes(),
        |chunk| {
            let file = chunk.file;
            read(sources[file], chunk).map_err(|failure| InFile {
                file: Some(file),
                failure,
            })
        },
        watch,
    )
}

/// As [`execute`], into fresh memory.
pub(crate) fn execute_owned(
    plan: &Plan,
    sources: &[&dyn Source],
    options: &ReadOptions,
    watch: &dyn Watch,
) -> Result<Vec<Block>, InFile> {
    let mut blocks = plan
        .blocks()
        .iter()
        .map(|&nbytes| Block::allocate(nbytes))
        .collect::<Result<Vec<_>, _>>()?;
    let dests = blocks.iter_mut().map(Block::dest).collect();
    execute(plan, sources, dests, options, watch)?;
    Ok(blocks)
}

/// Cuts the plan into chunks, in the order of the files.
fn split<'m>(plan: &Plan, dests: Vec<Dest<'m>>, chunk_nbytes: usize) -> Vec<Chunk<'m>> {
    let mut chunks = Vec::new();
    let mut reads = plan.reads().iter().peekable();
    for (number, dest) in dests.into_iter().enumerate() {
        let mut rest = dest;
        let mut at = 0;
        while let Some(read) = reads.next_if(|read| read.block == number) {
            let (_, from_read) = rest.split_at(read.at - at);
            let (dest, after) = from_read.split_at(read.nbytes);
            cut(read.file, read.position, dest, chunk_nbytes, &mut chunks);
            rest = after;
            at = read.at + read.nbytes;
        }
    }
    chunks.sort_by_key(|chunk| (chunk.file, chunk.position));
    chunks
}

fn cut<'m>(
    file: usize,
    mut position: u64,
    mut dest: Dest<'m>,
    chunk_nbytes: usize,
    chunks: &mut Vec<Chunk<'m>>,
) {
    while dest.len() > chunk_nbytes {
        let (chunk, rest) = dest.split_at(chunk_nbytes);
        chunks.push(Chunk {
            file,
            position,
            dest: chunk,
        });
        position += to_u64(chunk_nbytes);
        dest = rest;
    }
    chunks.push(Chunk { file, position, dest });
}

fn read(source: &dyn Source, chunk: Chunk<'_>) -> Result<usize, Failure> {
    let Chunk {
        position, mut dest, ..
    } = chunk;
    dest.populate();
    dest.fill(|bytes| read_exactly(source, position, bytes))?;
    Ok(dest.len())
}
