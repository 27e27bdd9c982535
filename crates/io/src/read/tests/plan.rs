use std::fmt;

use super::*;
use ingot_format::Index;
use proptest::prelude::*;

/// Return a table with a line for each piece.
impl fmt::Display for Plan<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:>6} {:>16} {:>8} {:>12} {:>6} {:>10} on the way",
            "file", "position", "runs", "nbytes", "block", "at"
        )?;
        for piece in &self.pieces {
            let Piece {
                block, at, nbytes, ..
            } = *piece;
            let runs = piece.gathered.map_or(1, Selection::block_count);
            let change = piece
                .converted
                .map(|(stored, wanted)| format!("{stored} to {wanted}"));
            let change = change.unwrap_or_else(|| "-".to_owned());
            writeln!(
                f,
                "{:>6} {:>16} {runs:>8} {nbytes:>12} {block:>6} {at:>10} {change}",
                piece.file,
                piece.begin(),
            )?;
        }
        write!(
            f,
            "{} bytes in {} pieces into {} blocks",
            self.nbytes(),
            self.pieces.len(),
            self.blocks.len()
        )
    }
}

/// Return pieces for the tensors of a file: they have these sizes and are adjacent from byte `start` on.
fn pieces(file: usize, start: u64, sizes: &[u64]) -> Vec<Piece<'static>> {
    let ends = sizes.iter().scan(start, |end, size| {
        *end += size;
        Some(*end - size..*end)
    });
    ends.map(|run| Piece::run(file, run).unwrap()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    /// The simple plan reads each piece by itself. The merged plan must write the same bytes to the same places.
    #[test]
    fn a_merged_plan_delivers_what_one_read_per_tensor_does(
        sizes in proptest::collection::vec(
            proptest::collection::vec(
                prop_oneof![4 => 0_u64..200, 1 => (1_u64 << 20) - 1..(1 << 20) + 100], 1..6),
            1..4),
        start in 0_u64..100,
        picks in proptest::collection::vec(any::<prop::sample::Index>(), 0..16),
        alignments in proptest::collection::vec(prop::sample::select(vec![1_usize, 2, 4, 8]), 16),
    ) {
        let all: Vec<Piece<'_>> =
            sizes.iter().enumerate().flat_map(|(file, sizes)| pieces(file, start, sizes)).collect();
        let mut wanted: Vec<Piece<'_>> = picks.iter().zip(&alignments)
            .map(|(pick, &alignment)| Piece { alignment, ..*pick.get(&all) })
            .collect();
        let plan = Plan::fresh(&mut wanted);
        let mut written: Vec<Vec<Option<(usize, u64)>>> =
            plan.blocks().iter().map(|block| vec![None; block.nbytes]).collect();
        for piece in plan.pieces() {
            let Piece { block, at, nbytes, .. } = *piece;
            for (byte, position) in written[block][at..at + nbytes].iter_mut().zip(piece.position..) {
                prop_assert!(byte.is_none(), "read twice\n{plan}");
                *byte = Some((piece.file, position));
            }
            let is_first = !plan.pieces().iter().any(|other| other.block == block && other.at < at);
            let unit = if is_first { PAGE_NBYTES } else { ALIGNMENT };
            let is_level = piece.position % to_u64(unit) == to_u64(at % unit);
            prop_assert!(is_level || at % ALIGNMENT == 0, "as in the file\n{plan}");
        }
        for piece in &wanted {
            prop_assert!(piece.at % piece.alignment == 0, "{plan}");
            let bytes = &written[piece.block][piece.at..piece.at + piece.nbytes];
            let naive = (piece.position..).map(|position| Some((piece.file, position)));
            prop_assert!(bytes.iter().copied().eq(naive.take(piece.nbytes)), "{plan}");
        }
        let needed: u64 = wanted.iter().map(|piece| to_u64(piece.nbytes)).sum();
        prop_assert_eq!(plan.nbytes(), needed, "only what is needed is read");
    }
}

#[test]
fn small_neighbours_are_read_at_once_and_large_tensors_have_their_own_block() {
    let mut wanted = pieces(0, 72, &[10, 20, 30, 3 << 20, 40]);
    let plan = Plan::fresh(&mut wanted);
    let first = plan.pieces()[0];
    assert_eq!((first.position, first.at, first.nbytes), (72, 72, 60));
    assert_eq!(plan.blocks()[wanted[3].block].nbytes, wanted[3].at + (3 << 20));
    let alone: Vec<_> = plan.blocks().iter().map(|block| block.job).collect();
    assert_eq!(alone, [None, Some(3)]);
    assert_eq!(plan.pieces().len(), 3, "{plan}");
}

#[test]
fn a_plan_prints_as_a_table() {
    let odd = [Index::Span {
        start: Some(1),
        stop: None,
        step: Some(2),
    }];
    let selection = Selection::new(Dtype::U8, &[100], &odd).unwrap();
    let run = Piece::run(1, 8..68).unwrap();
    let gathered = Piece {
        gathered: Some(&selection),
        nbytes: 50,
        ..run
    };
    let converted = Piece {
        converted: Some((Dtype::BF16, Dtype::F32)),
        alignment: 4,
        nbytes: 120,
        ..run
    };
    let plan = Plan::fresh(&mut [run, gathered, converted]);
    let table = "  file         position     runs       nbytes  block         at on the way
     1                8        1           60      0          8 -
     1                8        1          120      0        128 BF16 to F32
     1                9       50           50      0        265 -
230 bytes in 3 pieces into 1 blocks";
    assert_eq!(plan.to_string(), table);
}

/// Return a piece that is gathered from `position` on, converted, or both, and that fills this many bytes.
fn piece(position: u64, nbytes: usize) -> Piece<'static> {
    let run = Piece::run(0, position..position + to_u64(nbytes)).unwrap();
    Piece { alignment: 4, ..run }
}

/// Rows 1, 3 and 5 of a matrix with rows of 10 bytes.
fn odd_rows() -> Selection {
    let odd = [Index::Span {
        start: Some(1),
        stop: Some(6),
        step: Some(2),
    }];
    Selection::new(Dtype::U8, &[8, 10], &odd).unwrap()
}

#[test]
fn what_is_read_of_each_file_is_told_as_a_span_and_as_stretches() {
    let odd = odd_rows();
    let of_file = |file, piece: Piece<'static>| Piece { file, ..piece };
    let gathered = Piece {
        gathered: Some(&odd),
        ..of_file(2, piece(100, 30))
    };
    let converted = Piece {
        converted: Some((Dtype::BF16, Dtype::F32)),
        ..of_file(3, piece(50, 12))
    };
    let plan = Plan::into_each(vec![
        of_file(0, piece(40, 10)),
        of_file(0, piece(20, 10)),
        of_file(0, piece(10, 10)),
        // Within the bytes that are read already, and after their end.
        of_file(0, piece(12, 4)),
        of_file(0, piece(45, 10)),
        gathered,
        converted,
    ]);
    assert_eq!(plan.spans(5), [10..55, 0..0, 110..160, 50..56, 0..0]);
    assert_eq!(
        plan.stretches(),
        [(0, 10..30), (0, 40..55), (2, 110..160), (3, 50..56)]
    );
    assert_eq!((converted.stored_nbytes(), gathered.stored_nbytes()), (6, 30));
}

#[test]
fn an_element_has_its_bytes_on_each_side_and_a_packed_one_has_one() {
    assert_eq!(widths(None), (1, 1));
    assert_eq!(widths(Some((Dtype::F64, Dtype::BF16))), (8, 2));
    assert_eq!(widths(Some((Dtype::F4, Dtype::F32))), (1, 4));
}

#[test]
fn each_piece_has_a_block_of_its_own_where_memory_is_there() {
    let plan = Plan::into_each(vec![piece(30, 8), piece(9, 0), piece(10, 12)]);
    let sizes: Vec<_> = plan.blocks().iter().map(|block| block.nbytes).collect();
    assert_eq!(sizes, [8, 0, 12]);
    let places: Vec<_> = plan
        .pieces()
        .iter()
        .map(|piece| (piece.block, piece.at))
        .collect();
    assert_eq!(places, [(0, 0), (2, 0)]);
    assert_eq!(plan.nbytes(), 20);
}

/// Return the block and the position of each tensor in a plan with this division. The tensors are adjacent in a file from
/// byte 72 on.
fn placed(blocks: Blocks, sizes: &[u64]) -> Vec<(usize, usize)> {
    let mut wanted = pieces(0, 72, sizes);
    Plan::fresh_in(blocks, &mut wanted);
    wanted.iter().map(|piece| (piece.block, piece.at)).collect()
}

#[test]
fn a_tensor_gets_a_block_of_its_own_from_a_size_on() {
    for (blocks, own) in [(Blocks::HOST, 1 << 20), (Blocks::DEVICE, 64 << 10)] {
        let numbers = |size| {
            placed(blocks, &[10, size, 10])
                .into_iter()
                .map(|place| place.0)
                .collect::<Vec<_>>()
        };
        assert_eq!(numbers(own - 1), [0, 0, 0]);
        assert_eq!(numbers(own), [0, 1, 0]);
    }
}

#[test]
fn an_empty_tensor_takes_no_place_of_the_host_and_a_block_of_a_device() {
    assert_eq!(placed(Blocks::HOST, &[10, 0, 5]), [(0, 72), (0, 64), (0, 82)]);
    assert_eq!(placed(Blocks::DEVICE, &[10, 0, 5]), [(0, 0), (1, 0), (0, 256)]);
}

#[test]
fn a_shared_block_is_closed_before_it_grows_larger_than_it_may() {
    let blocks = Blocks {
        own_nbytes: 1000,
        shared_nbytes: 400,
        ..Blocks::HOST
    };
    let level = |is_level| Blocks { is_level, ..blocks };
    assert_eq!(placed(level(false), &[100, 236, 1]), [(0, 0), (0, 128), (1, 0)]);
    assert_eq!(placed(level(false), &[100, 237, 1]), [(0, 0), (1, 0), (1, 256)]);
    // The file position is 36 bytes further into a page than the first.
    assert_eq!(placed(level(true), &[100, 164, 1]), [(0, 72), (0, 172), (1, 336)]);
    for (blocks, shared) in [(Blocks::HOST, 16 << 20), (Blocks::DEVICE, 2 << 20)] {
        let most = placed(blocks, &[60 << 10; 400]);
        let end = most
            .iter()
            .filter(|place| place.0 == 0)
            .map(|place| place.1 + (60 << 10))
            .max()
            .unwrap();
        assert!((shared - (61 << 10)..=shared).contains(&end), "{end} of {shared}");
    }
}

#[test]
fn only_what_goes_on_in_one_file_as_it_is_is_read_at_once() {
    let odd = odd_rows();
    let count = |second: Piece<'_>| Plan::fresh(&mut [piece(64, 8), second]).pieces().len();
    let next = piece(72, 8);
    assert_eq!(count(next), 1);
    assert_eq!(count(piece(73, 8)), 2);
    assert_eq!(count(Piece { file: 1, ..next }), 2);
    let gathered = Piece {
        gathered: Some(&odd),
        ..piece(62, 30)
    };
    assert_eq!(count(gathered), 2);
    let converted = Piece {
        converted: Some((Dtype::BF16, Dtype::F32)),
        ..next
    };
    assert_eq!(count(converted), 2);
    // Nothing has to be read.
    assert!(Plan::fresh(&mut [piece(64, 0)]).pieces().is_empty());
    // Neither is aligned in the file, and both are aligned in memory.
    let aligned = |position| Piece {
        alignment: 8,
        ..piece(position, 8)
    };
    let plan = Plan::fresh(&mut [aligned(73), aligned(81)]);
    assert_eq!(plan.pieces().len(), 1, "{plan}");
    // Its elements would not be aligned.
    assert_eq!(
        count(Piece {
            alignment: 16,
            ..next
        }),
        2
    );
}

#[test]
fn what_is_placed_lies_to_a_unit_as_in_the_file_unless_elements_would_not_be_aligned() {
    let page = to_u64(PAGE_NBYTES);
    for (end, position, alignment, expected) in [
        (0, page + 72, 8, 72),
        (0, page + 73, 8, 0),
        (0, 3 * page, 8, 0),
        (100, 200, 8, 136),
        (100, 201, 8, 128),
        (100, 100, 1, 100),
        (128, 64, 8, 128),
        (129, 64, 8, 192),
    ] {
        assert_eq!(
            level_place(end, position, alignment),
            expected,
            "{end} {position} {alignment}"
        );
    }
}

#[test]
fn pieces_of_each_pool_have_blocks_of_their_own() {
    let mut wanted = pieces(0, 72, &[10, 20, 30, 40]);
    for (piece, pool) in wanted.iter_mut().zip([0, 2, 1, 2]) {
        piece.pool = pool;
    }
    let plan = Plan::fresh(&mut wanted);
    let pools: Vec<_> = plan.blocks().iter().map(|block| block.pool).collect();
    assert_eq!(pools, [0, 2, 1]);
    let places: Vec<_> = wanted.iter().map(|piece| (piece.block, piece.at)).collect();
    assert_eq!(places, [(0, 72), (1, 0), (2, 0), (1, 256)]);
}
