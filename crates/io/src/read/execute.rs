//! Carrying out a plan: one way for every source, every plan and every destination.
//!
//! Pieces are cut into chunks, the chunks of all pieces put in the order of the files, and those that lie close together
//! made one task. Threads share the tasks.

use ingot_format::{Selection, to_u64, to_usize};
use ingot_remote::StopFlag;

use super::gather::{Chunk, Destination, Stages};
use super::input::Witness;
use super::plan::{Piece, Plan, widths};
use super::relay;
use super::runs::Runs;
use crate::error::InFile;
use crate::memory::HUGE_PAGE_NBYTES;
use crate::options::ReadOptions;
use crate::source::Source;
use crate::watch::Watch;
use crate::workers::{Reading, each, share};

/// What a run costs at least, in bytes of a long one: so that no chunk has so many short ones that an interruption waits.
const RUN_NBYTES: u64 = 128;

/// What suits `plan`, which reads from these sources.
pub(crate) fn reading(plan: &Plan<'_>, sources: &[&dyn Source], options: &ReadOptions) -> Reading {
    let spans: Vec<_> = sources.iter().copied().zip(plan.spans(sources.len())).collect();
    let reading = Reading::of(plan.nbytes(), &spans, options);
    let chunk_nbytes = match reading.waits {
        true => reading.chunk_nbytes,
        // Several for each thread, so that all end together.
        false => each(plan.nbytes(), 4 * reading.threads, HUGE_PAGE_NBYTES),
    };
    Reading {
        chunk_nbytes,
        ..reading
    }
}

/// Reads all that `plan` says from `sources`, one for each of its files, into `dests`: one for each of its blocks, of
/// that size. There may be a witness for each file as well.
pub(crate) fn execute<'d>(
    plan: &Plan<'_>,
    sources: &[&dyn Source],
    witnesses: &[&dyn Witness],
    dests: impl IntoIterator<Item = Destination<'d>>,
    reading: Reading,
    watch: &dyn Watch,
) -> Result<(), InFile> {
    let mut chunks = split(plan, dests, sources, reading.chunk_nbytes);
    chunks.sort_by_key(|chunk| (chunk.file, chunk.span.start));
    let tasks = join(chunks, sources, reading.chunk_nbytes);
    let stages = Stages::default();
    let read = |task: Vec<Chunk<'_, '_>>, stop: StopFlag<'_>| {
        let file = task.first().map_or(0, |chunk| chunk.file);
        let witness = witnesses.get(file).copied();
        let outcome = stages.lend(|stage| relay::read(sources[file], witness, task, stage, stop));
        outcome.map_err(|failure| {
            witness.inspect(|witness| witness.end());
            let file = Some(file);
            InFile { file, failure }
        })
    };
    share(reading, tasks, plan.nbytes(), read, watch)
}

/// Cuts the plan into chunks.
fn split<'p, 'd>(
    plan: &Plan<'p>,
    dests: impl IntoIterator<Item = Destination<'d>>,
    sources: &[&dyn Source],
    chunk_nbytes: usize,
) -> Vec<Chunk<'p, 'd>> {
    let mut chunks = Vec::with_capacity(plan.pieces().len());
    let mut pieces = plan.pieces().iter().peekable();
    for (number, dest) in dests.into_iter().enumerate() {
        let mut rest = dest;
        let mut at = 0;
        while let Some(piece) = pieces.next_if(|piece| piece.place.block == number) {
            let (_, from_piece) = rest.split_at(piece.place.at - at);
            let (dest, after) = from_piece.split_at(piece.place.nbytes);
            let gap = sources[piece.file].gap_nbytes();
            cut(piece, dest, gap, chunk_nbytes, &mut chunks);
            rest = after;
            at = piece.place.at + piece.place.nbytes;
        }
    }
    chunks
}

/// Cuts a piece into chunks of at most so many bytes, in the file and in memory. They end at the border of a huge page, so
/// that no two threads find memory for one, or of a smaller part of it. Where a read goes on over a `gap` of so many
/// bytes, they end also where more lies between two runs: that is another read, for another thread.
fn cut<'p, 'd>(
    piece: &Piece<'p>,
    dest: Destination<'d>,
    gap: u64,
    chunk_nbytes: usize,
    chunks: &mut Vec<Chunk<'p, 'd>>,
) {
    let (stored, wanted) = widths(piece.converted);
    // What each byte costs, where runs are so short that their number counts.
    let blocks = piece.gathered.map_or(1, Selection::block_count);
    let run_nbytes = to_u64(piece.stored_nbytes()) / blocks.max(1);
    let cost = to_usize(RUN_NBYTES / run_nbytes.max(1)).map_or(1, |cost| cost.max(1));
    let most = (chunk_nbytes / cost / stored.max(wanted)).max(1) * wanted;
    let border = most.min(HUGE_PAGE_NBYTES);
    let mut runs = Runs::of(piece);
    let mut rest = dest;
    while rest.len() > 0 {
        let first = match &rest {
            Destination::Together(dest) if dest.len() > most => {
                let first = most - dest.addr() % border;
                (first - first % wanted).max(wanted)
            }
            _ => most.min(rest.len()),
        };
        let here = runs.clone();
        let span = runs.pass(first / wanted * stored, gap, to_u64(chunk_nbytes));
        let (dest, after) = rest.split_at(span.nbytes / stored * wanted);
        chunks.push(Chunk {
            file: piece.file,
            cost: dest.len().saturating_mul(cost),
            span: span.range,
            runs: here,
            converted: piece.converted,
            dest,
        });
        rest = after;
    }
}

/// Puts chunks together that one thread reads one after the other. From a source where it is beginning a read that costs
/// they are one read: neighbours with no more bytes between them than it gives for fewer reads, `most` from the first to
/// the last. From others they are any that follow, `most` bytes in all, or fewer where runs are short.
fn join<'p, 'd>(
    mut chunks: Vec<Chunk<'p, 'd>>,
    sources: &[&dyn Source],
    most: usize,
) -> Vec<Vec<Chunk<'p, 'd>>> {
    let mut begins = Vec::new();
    let (mut file, mut span, mut cost) = (0, 0..0, 0);
    for (rank, chunk) in chunks.iter().enumerate() {
        let goes_on = || match sources[chunk.file].gap_nbytes() {
            0 => cost + chunk.cost <= most,
            gap => {
                chunk.span.start >= span.end
                    && chunk.span.start - span.end <= gap
                    && chunk.span.end - span.start <= to_u64(most)
            }
        };
        if rank > 0 && chunk.file == file && goes_on() {
            cost += chunk.cost;
            span.end = chunk.span.end;
        } else {
            (file, span, cost) = (chunk.file, chunk.span.clone(), chunk.cost);
            begins.push(rank);
        }
    }
    // From the end, so that what is left is the first task: of many small tensors that is nearly all, which does not move.
    let later = begins.iter().skip(1).rev();
    let mut tasks: Vec<_> = later.map(|&begin| chunks.split_off(begin)).collect();
    tasks.extend((!chunks.is_empty()).then_some(chunks));
    tasks.reverse();
    tasks
}
