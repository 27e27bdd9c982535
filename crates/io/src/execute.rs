//! Carrying out a plan: one way for every source, every plan and every destination.

use std::num::NonZeroUsize;
use std::thread;

use ingot_format::to_u64;

use crate::block::Block;
use crate::dest::Dest;
use crate::failure::{Failure, read_exactly};
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

/// Below this, starting a thread takes longer than reading.
const ALONE_NBYTES: u64 = 4 << 20;

/// More threads than this have not been seen to make copying from the page cache faster.
const MAX_THREADS: usize = 16;

/// Some bytes still to be read, and their place in memory.
struct Chunk<'m> {
    position: u64,
    dest: Dest<'m>,
}

/// Reads all that `plan` says from `source` into `dests`: one for each of its blocks, of that size.
pub(crate) fn execute(
    plan: &Plan,
    source: &dyn Source,
    dests: Vec<Dest<'_>>,
    options: &ReadOptions,
    watch: &dyn Watch,
) -> Result<(), Failure> {
    let chunks = split(plan, dests);
    let threads = threads(plan.nbytes(), options);
    share(threads, chunks, plan.nbytes(), |chunk| read(source, chunk), watch)
}

/// As [`execute`], into fresh memory.
pub(crate) fn execute_owned(
    plan: &Plan,
    source: &dyn Source,
    options: &ReadOptions,
    watch: &dyn Watch,
) -> Result<Vec<Block>, Failure> {
    let mut blocks = plan
        .blocks()
        .iter()
        .map(|&nbytes| Block::allocate(nbytes))
        .collect::<Result<Vec<_>, _>>()?;
    let dests = blocks.iter_mut().map(Block::dest).collect();
    execute(plan, source, dests, options, watch)?;
    Ok(blocks)
}

/// How many threads read `nbytes` bytes.
pub(crate) fn threads(nbytes: u64, options: &ReadOptions) -> usize {
    match options.threads {
        Some(threads) => threads.get(),
        None if nbytes <= ALONE_NBYTES => 1,
        None => thread::available_parallelism()
            .map_or(1, usize::from)
            .min(MAX_THREADS),
    }
}

/// Cuts the plan into chunks, in the order of the file.
fn split<'m>(plan: &Plan, dests: Vec<Dest<'m>>) -> Vec<Chunk<'m>> {
    let mut chunks = Vec::new();
    let mut reads = plan.reads().iter().peekable();
    for (number, dest) in dests.into_iter().enumerate() {
        let mut rest = dest;
        let mut at = 0;
        while let Some(read) = reads.next_if(|read| read.block == number) {
            let (_, from_read) = rest.split_at(read.at - at);
            let (dest, after) = from_read.split_at(read.nbytes);
            cut(read.position, dest, &mut chunks);
            rest = after;
            at = read.at + read.nbytes;
        }
    }
    chunks.sort_by_key(|chunk| chunk.position);
    chunks
}

fn cut<'m>(mut position: u64, mut dest: Dest<'m>, chunks: &mut Vec<Chunk<'m>>) {
    while dest.len() > CHUNK_NBYTES {
        let (chunk, rest) = dest.split_at(CHUNK_NBYTES);
        chunks.push(Chunk {
            position,
            dest: chunk,
        });
        position += to_u64(CHUNK_NBYTES);
        dest = rest;
    }
    chunks.push(Chunk { position, dest });
}

fn read(source: &dyn Source, chunk: Chunk<'_>) -> Result<usize, Failure> {
    let Chunk { position, mut dest } = chunk;
    dest.populate();
    dest.fill(|bytes| read_exactly(source, position, bytes))?;
    Ok(dest.len())
}
