//! Carrying out a plan: one way for every source, every plan and every destination.

use std::num::NonZeroUsize;
use std::ops::Range;
use std::thread;

use ingot_format::{to_u64, to_usize};

use crate::block::{Block, HUGE_PAGE_NBYTES};
use crate::dest::Dest;
use crate::error::Error;
use crate::failure::{Failure, InFile, read_exactly};
use crate::read::plan::Plan;
use crate::source::Source;
use crate::stream::Stream;
use crate::watch::Watch;
use crate::workers::share;

/// How tensors are read.
#[derive(Clone, Copy, Debug, Default)]
pub struct ReadOptions {
    /// How many threads read at once; by default what [`THREADS_VARIABLE`] says, else what suits the machine and the
    /// source.
    pub threads: Option<NonZeroUsize>,
}

/// How many threads read at once, for a whole process, where nothing else is asked for.
pub const THREADS_VARIABLE: &str = "INGOT_THREADS";

/// What [`THREADS_VARIABLE`] says.
pub(crate) fn threads_of_environment() -> Result<Option<NonZeroUsize>, Error> {
    match std::env::var(THREADS_VARIABLE) {
        Ok(found) if !found.is_empty() => found
            .parse()
            .map(Some)
            .map_err(|_| Error::InvalidThreads { found }),
        _ => Ok(None),
    }
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

/// Reads that are under way at once where each of them comes from a local disk: enough to keep it busy.
const COLD_THREADS: usize = 8;

/// How a number of bytes is read: on how many threads, and how much at once.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reading {
    pub(crate) threads: usize,
    pub(crate) chunk_nbytes: usize,
    /// Whether each read waits for something other than this machine.
    pub(crate) waits: bool,
}

impl Reading {
    /// On so many threads, none of which waits.
    pub(crate) fn on(threads: usize) -> Reading {
        Reading {
            threads,
            chunk_nbytes: CHUNK_NBYTES,
            waits: false,
        }
    }

    /// So many at once, each of which waits for something other than this machine.
    #[cfg(feature = "remote")]
    pub(crate) fn waiting(threads: usize) -> Reading {
        Reading {
            waits: true,
            ..Reading::on(threads)
        }
    }

    /// What suits `nbytes` bytes of some sources, all of them in these spans. The slowest decides.
    pub(crate) fn of(nbytes: u64, spans: &[(&dyn Source, Range<u64>)], options: &ReadOptions) -> Reading {
        // Whether it is a number was asked when the file was opened.
        let threads = options
            .threads
            .or_else(|| threads_of_environment().ok().flatten())
            .map(NonZeroUsize::get);
        let waiting = spans.iter().filter(|(source, _)| source.waits());
        // Whoever waits needs no core.
        let Some(at_once) = waiting.map(|(source, _)| source.reads_at_once()).min() else {
            let cores = || {
                thread::available_parallelism()
                    .map_or(1, usize::from)
                    .min(MAX_THREADS)
            };
            let suits = || match nbytes {
                0..=ALONE_NBYTES => 1,
                _ if spans.iter().any(|(source, span)| source.is_cold(span)) => COLD_THREADS,
                _ => cores(),
            };
            return Reading::on(threads.unwrap_or_else(suits));
        };
        let threads = threads.unwrap_or(at_once);
        let each = to_usize(nbytes).unwrap_or(usize::MAX) / threads;
        Reading {
            threads,
            chunk_nbytes: each
                .clamp(WAITING_CHUNK_NBYTES, CHUNK_NBYTES)
                .next_multiple_of(WAITING_CHUNK_NBYTES),
            waits: true,
        }
    }
}

/// Some bytes still to be read, and their place in memory.
struct Chunk<'m> {
    file: usize,
    position: u64,
    dest: Dest<'m>,
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
    let spans: Vec<_> = sources.iter().copied().zip(plan.spans(sources.len())).collect();
    let reading = Reading::of(plan.nbytes(), &spans, options);
    let chunks = split(plan, dests, reading.chunk_nbytes);
    let spans = join(chunks, sources, reading.chunk_nbytes);
    share(reading, spans, plan.nbytes(), |span| read(sources, span), watch)
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

/// Chunks end at the border of a huge page, so that no two threads find memory for one, or of a smaller piece.
fn cut<'m>(
    file: usize,
    mut position: u64,
    mut dest: Dest<'m>,
    chunk_nbytes: usize,
    chunks: &mut Vec<Chunk<'m>>,
) {
    let border = chunk_nbytes.min(HUGE_PAGE_NBYTES);
    while dest.len() > chunk_nbytes {
        let first = chunk_nbytes - dest.addr() % border;
        let (chunk, rest) = dest.split_at(first);
        let nbytes = to_u64(chunk.len());
        chunks.push(Chunk {
            file,
            position,
            dest: chunk,
        });
        position += nbytes;
        dest = rest;
    }
    chunks.push(Chunk { file, position, dest });
}

/// Puts chunks together that are read at once: neighbours in a file with no more bytes between them than its source gives
/// for fewer reads. They take `most` bytes at most.
fn join<'m>(chunks: Vec<Chunk<'m>>, sources: &[&dyn Source], most: usize) -> Vec<Vec<Chunk<'m>>> {
    let mut spans: Vec<Vec<Chunk<'_>>> = Vec::with_capacity(chunks.len());
    let (mut file, mut begin, mut end) = (0, 0, 0);
    for chunk in chunks {
        let gap = sources[chunk.file].gap_nbytes();
        let chunk_end = chunk.position + to_u64(chunk.dest.len());
        let joins = gap > 0
            && chunk.file == file
            && chunk.position >= end
            && chunk.position - end <= gap
            && chunk_end - begin <= to_u64(most);
        match spans.last_mut() {
            Some(span) if joins => span.push(chunk),
            _ => {
                (file, begin) = (chunk.file, chunk.position);
                spans.push(vec![chunk]);
            }
        }
        end = chunk_end;
    }
    spans
}

/// Reads chunks of one file that ascend, at once where there are several.
fn read(sources: &[&dyn Source], span: Vec<Chunk<'_>>) -> Result<usize, InFile> {
    let file = span.first().map(|chunk| chunk.file);
    let source = sources[file.unwrap_or(0)];
    read_span(source, span).map_err(|failure| InFile { file, failure })
}

fn read_span(source: &dyn Source, mut span: Vec<Chunk<'_>>) -> Result<usize, Failure> {
    let nbytes = span.iter().map(|chunk| chunk.dest.len()).sum();
    for chunk in &mut span {
        chunk.dest.populate();
    }
    let (begin, end) = match &span[..] {
        [first, .., last] => (first.position, last.position + to_u64(last.dest.len())),
        _ => (0, 0),
    };
    let mut stream = (begin < end).then(|| Stream::new(source, begin..end)).flatten();
    for Chunk { position, dest, .. } in &mut span {
        dest.fill(|bytes| match &mut stream {
            Some(stream) => stream.fill(*position, bytes),
            None => read_exactly(source, *position, bytes),
        })?;
    }
    Ok(nbytes)
}
