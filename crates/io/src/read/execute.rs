//! Carrying out a plan: one way for every source, every plan and every destination.
//!
//! Pieces are cut into chunks, the chunks of all pieces put in the order of the files, and those that lie close together
//! made one task. Threads share the tasks.

use ingot_format::{Selection, StopFlag, to_u64, to_usize};

use super::gather::{Chunk, Destination, Stages};
use super::input::Witness;
use super::plan::{Piece, Plan, widths};
use super::relay;
use super::runs::Runs;
use crate::error::InFile;
use crate::file::ReadAt;
use crate::memory::HUGE_PAGE_NBYTES;
use crate::options::ReadOptions;
use crate::watch::Watch;
use crate::workers::{Reading, each, share};

/// What a run costs at least, in bytes of a long one: so that no chunk has so many short ones that an interruption waits.
const RUN_NBYTES: u64 = 128;

/// What suits `plan`, which reads from these sources.
pub(crate) fn reading(plan: &Plan<'_>, sources: &[&dyn ReadAt], options: &ReadOptions) -> Reading {
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
    sources: &[&dyn ReadAt],
    witnesses: &[&dyn Witness],
    dests: impl IntoIterator<Item = Destination<'d>>,
    reading: Reading,
    watch: &dyn Watch,
) -> Result<(), InFile> {
    let tasks = tasks(plan, dests, sources, reading.chunk_nbytes);
    carry_out(tasks, sources, witnesses, reading, plan.nbytes(), watch)
}

/// Chunks that one thread reads, one after the other.
pub(super) type Task<'p, 'd> = Vec<Chunk<'p, 'd>>;

/// The tasks of a plan, in the order of the files.
pub(super) fn tasks<'p, 'd>(
    plan: &Plan<'p>,
    dests: impl IntoIterator<Item = Destination<'d>>,
    sources: &[&dyn ReadAt],
    chunk_nbytes: usize,
) -> Vec<Task<'p, 'd>> {
    let mut chunks = split(plan, dests, sources, chunk_nbytes);
    chunks.sort_by_key(|chunk| (chunk.file, chunk.span.start));
    join(chunks, sources, chunk_nbytes)
}

/// Read all bytes of these tasks, `total` in all.
pub(super) fn carry_out<'p, 'd>(
    tasks: impl IntoIterator<Item = Task<'p, 'd>, IntoIter: Send>,
    sources: &[&dyn ReadAt],
    witnesses: &[&dyn Witness],
    reading: Reading,
    total: u64,
    watch: &dyn Watch,
) -> Result<(), InFile> {
    let stages = Stages::default();
    let read = |task: Task<'_, '_>, stop: StopFlag<'_>| {
        let file = task.first().map_or(0, |chunk| chunk.file);
        let mut ending = Ending(witnesses.get(file).copied());
        let outcome = stages.lend(|stage| relay::read(sources[file], ending.0, task, stage, stop));
        if outcome.is_ok() {
            ending.0 = None;
        }
        let file = Some(file);
        outcome.map_err(|failure| InFile { file, failure })
    };
    share(reading, tasks, total, read, watch)
}

/// Tells a witness, when dropped, that bytes will not come: a read failed or panicked, and others wait for its bytes.
struct Ending<'w>(Option<&'w dyn Witness>);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        if let Some(witness) = self.0 {
            witness.end();
        }
    }
}

/// Cuts the plan into chunks.
fn split<'p, 'd>(
    plan: &Plan<'p>,
    dests: impl IntoIterator<Item = Destination<'d>>,
    sources: &[&dyn ReadAt],
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
    if gap == 0 && (1..=most).contains(&dest.len()) {
        // Most of many pieces are one chunk.
        let begin = runs.begin();
        chunks.push(Chunk {
            file: piece.file,
            cost: dest.len().saturating_mul(cost),
            span: begin..begin,
            runs,
            converted: piece.converted,
            dest,
        });
        return;
    }
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
fn join<'p, 'd>(mut chunks: Vec<Chunk<'p, 'd>>, sources: &[&dyn ReadAt], most: usize) -> Vec<Task<'p, 'd>> {
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

#[cfg(test)]
mod tests {
    use super::super::plan::Place;
    use super::*;
    use crate::file::{Given, MemorySource};
    use crate::memory::Block;
    use ingot_format::{Dtype, Index};
    use std::io;
    use std::num::NonZeroUsize;

    const MIB: usize = 1 << 20;

    /// Reads on over gaps of so many bytes.
    #[derive(Debug)]
    struct Gap(u64);

    impl ReadAt for Gap {
        fn nbytes(&self) -> u64 {
            u64::MAX
        }

        fn read_at(&self, _: u64, _: &mut [u8]) -> io::Result<usize> {
            Err(io::ErrorKind::Unsupported.into())
        }

        fn gap_nbytes(&self) -> u64 {
            self.0
        }
    }

    fn run(begin: usize, nbytes: usize) -> Piece<'static> {
        Piece::run(0, to_u64(begin)..to_u64(begin + nbytes)).unwrap()
    }

    /// Bytes and cost of the chunks of a piece, which goes nowhere.
    fn cut_up(piece: &Piece<'_>, chunk_nbytes: usize) -> Vec<(usize, usize)> {
        let mut chunks = Vec::new();
        let dest = Destination::Shown(piece.place.nbytes);
        cut(piece, dest, 0, chunk_nbytes, &mut chunks);
        chunks
            .iter()
            .map(|chunk| (chunk.dest.len(), chunk.cost))
            .collect()
    }

    #[test]
    fn chunks_are_as_many_for_each_thread_that_all_end_together() {
        let (plan, _) = Plan::fresh(&[run(0, 48 * MIB)]);
        let options = ReadOptions {
            threads: NonZeroUsize::new(4),
        };
        let source = Given::new(MemorySource::new(Vec::new()));
        // A sixteenth, in whole huge pages.
        assert_eq!(reading(&plan, &[&source], &options).chunk_nbytes, 4 * MIB);
    }

    #[test]
    fn a_piece_is_cut_into_chunks_of_the_size_asked_for_in_the_file_and_in_memory() {
        let cases = [
            (None, [4 * MIB, 4 * MIB, 2 * MIB].as_slice()),
            (Some((Dtype::F16, Dtype::F32)), &[4 * MIB, 4 * MIB, 2 * MIB]),
            // Twice as many bytes are read.
            (Some((Dtype::F32, Dtype::F16)), &[2 * MIB; 5]),
        ];
        for (converted, expected) in cases {
            let piece = Piece {
                converted,
                ..run(0, 10 * MIB)
            };
            let found = cut_up(&piece, 4 * MIB);
            let expected: Vec<_> = expected.iter().map(|&nbytes| (nbytes, nbytes)).collect();
            assert_eq!(found, expected, "{converted:?}");
        }
    }

    #[test]
    fn a_chunk_of_short_runs_is_as_much_smaller_as_they_cost() {
        for (width, cost) in [(1, 128), (16, 8), (100, 1), (128, 1), (1000, 1)] {
            let rows = 40_000;
            let every = Index::Span {
                start: None,
                stop: None,
                step: None,
            };
            let front = Index::Span {
                start: None,
                stop: Some(width),
                step: None,
            };
            let selection = Selection::new(Dtype::U8, &[rows, 2000], &[every, front]).unwrap();
            let nbytes = to_usize(rows * width.unsigned_abs()).unwrap();
            let piece = Piece {
                gathered: Some(&selection),
                place: Place {
                    nbytes,
                    ..Place::default()
                },
                ..run(0, 0)
            };
            let most = 32 << 10;
            let found = cut_up(&piece, most);
            let (last, whole) = found.split_last().unwrap();
            assert!(whole.iter().all(|chunk| *chunk == (most / cost, most)), "{width}");
            assert!((1..=most / cost).contains(&last.0), "{width}");
            let total: usize = found.iter().map(|chunk| chunk.0).sum();
            assert_eq!(total, nbytes);
        }
    }

    #[test]
    fn chunks_end_at_the_borders_of_huge_pages_and_what_fits_in_one_is_not_cut() {
        let to_f32 = Some((Dtype::F16, Dtype::F32));
        for (converted, width, into_page) in [(None, 1, 0), (None, 1, 100), (to_f32, 4, 0), (to_f32, 4, 6)] {
            for (nbytes, is_cut) in [(9 * MIB, true), (4 * MIB, false), (MIB, false)] {
                let piece = Piece {
                    converted,
                    ..run(0, nbytes)
                };
                let mut block = Block::allocate(into_page + nbytes).unwrap();
                let (_, dest) = block.dest().split_at(into_page);
                let mut chunks = Vec::new();
                cut(&piece, Destination::Together(dest), 0, 4 * MIB, &mut chunks);
                let end = |chunk: &Chunk<'_, '_>| match &chunk.dest {
                    Destination::Together(dest) => dest.addr() + dest.len(),
                    _ => panic!("it stays together"),
                };
                let (last, others) = chunks.split_last().unwrap();
                assert_eq!(!others.is_empty(), is_cut, "{nbytes} from {into_page}");
                for chunk in others {
                    // An element that lies over the border is the next chunk's.
                    assert!(HUGE_PAGE_NBYTES - 1 - (end(chunk) - 1) % HUGE_PAGE_NBYTES < width);
                    assert!((2 * MIB - width..=4 * MIB).contains(&chunk.dest.len()));
                    assert_eq!(chunk.dest.len() % width, 0);
                }
                assert!(last.dest.len() <= 4 * MIB);
                let total: usize = chunks.iter().map(|chunk| chunk.dest.len()).sum();
                assert_eq!(total, nbytes);
            }
        }
    }

    #[test]
    fn chunks_that_lie_close_together_are_one_task() {
        // From `BEGIN` on: how far a read goes on, how much a task takes, and how many chunks each task has.
        const BEGIN: usize = 1000;
        let together = [(0, 1000), (1000, 1000), (50_000, 1000)];
        let apart = [(0, 10), (15, 10), (31, 10), (41, 10)];
        let behind = [(0, 10), (5, 10)];
        let cases = [
            (&together[..], 0, 2500, &[2, 1][..]),
            (&together, 0, 2000, &[2, 1]),
            (&together, 0, 1999, &[1, 1, 1]),
            (&apart, 5, 100, &[2, 2]),
            (&apart, 5, 25, &[2, 2]),
            (&apart, 5, 24, &[1, 1, 2]),
            (&behind, 5, 100, &[1, 1]),
        ];
        for (places, gap, most, expected) in cases {
            let source = Gap(gap);
            let mut chunks = Vec::new();
            for &(at, nbytes) in places {
                let piece = run(BEGIN + at, nbytes);
                cut(&piece, Destination::Shown(nbytes), gap, MIB, &mut chunks);
            }
            let tasks = join(chunks, &[&source], most);
            let found: Vec<usize> = tasks.iter().map(Vec::len).collect();
            assert_eq!(found, expected, "{places:?}, gap {gap}, most {most}");
        }
    }
}
