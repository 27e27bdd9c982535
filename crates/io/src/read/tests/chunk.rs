use std::io;
use std::num::NonZeroUsize;

use super::super::run::reading;
use super::*;
use crate::file::{MemorySource, OpenSource};
use crate::memory::Block;
use crate::options::ReadOptions;
use ingot_format::Index;

const MIB: usize = 1 << 20;

/// Reads in streams over gaps of this many bytes.
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

/// The bytes and the cost of the chunks of a piece, which is not read.
fn cut_up(piece: &Piece<'_>, chunk_nbytes: usize) -> Vec<(usize, usize)> {
    let mut chunks = Vec::new();
    let dest = Destination::Shown(piece.nbytes);
    cut(piece, dest, 0, chunk_nbytes, &mut chunks);
    chunks
        .iter()
        .map(|chunk| (chunk.dest.len(), chunk.cost))
        .collect()
}

#[test]
fn chunks_are_as_many_for_each_thread_that_all_end_together() {
    let plan = Plan::fresh(&mut [run(0, 48 * MIB)]);
    let options = ReadOptions {
        threads: NonZeroUsize::new(4),
    };
    let source = OpenSource::new(MemorySource::new(Vec::new()));
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
            nbytes,
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
            cut(&piece, Destination::Host(dest), 0, 4 * MIB, &mut chunks);
            let end = |chunk: &Chunk<'_, '_>| match &chunk.dest {
                Destination::Host(dest) => dest.addr() + dest.len(),
                _ => panic!("it stays together"),
            };
            let (last, others) = chunks.split_last().unwrap();
            assert_eq!(!others.is_empty(), is_cut, "{nbytes} from {into_page}");
            for chunk in others {
                // An element across the border belongs to the next chunk.
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
    // Ranges from `BEGIN` on: the end of a read, the bytes of a task, and the chunks of each task.
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
