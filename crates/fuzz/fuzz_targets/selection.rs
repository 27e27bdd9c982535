//! A selection contains the same bytes in the same order as naive loops, and no index makes it panic or read outside
//! the tensor.
#![no_main]

mod selected;

use ingot_format::{Dtype, Selection, nbytes};
use libfuzzer_sys::arbitrary::{Result, Unstructured};
use libfuzzer_sys::fuzz_target;
use selected::{merged, naive, part};

fuzz_target!(|input: &[u8]| {
    // Inputs that end too early are ignored.
    let _ = check(&mut Unstructured::new(input));
});

fn check(input: &mut Unstructured<'_>) -> Result<()> {
    let dtype = *input.choose(Dtype::ALL)?;
    let is_small = input.arbitrary()?;
    let mut shape = Vec::new();
    for _ in 0..input.int_in_range(0..=4)? {
        shape.push(match (is_small, input.arbitrary()?) {
            (true, _) => input.int_in_range(0..=6)?,
            (false, true) => input.int_in_range(0..=1 << 20)?,
            (false, false) => input.arbitrary()?,
        });
    }
    let mut index = Vec::new();
    for _ in 0..input.int_in_range(0..=6)? {
        index.push(part(input)?);
    }
    let Ok(selection) = Selection::new(dtype, &shape, &index) else {
        return Ok(());
    };
    within(&selection, dtype, &shape);
    if is_small {
        let naive = naive(dtype, &shape, &index);
        assert_eq!(selection.shape(), naive.shape);
        let runs = merged(selection.runs().map(|run| (8 * run.begin, 8 * run.end)));
        assert_eq!(runs, naive.bits);
        let given: Vec<_> = selection.runs().map(|run| (8 * run.begin, 8 * run.end)).collect();
        assert_eq!(given, runs, "two runs in a row touch");
        let rows = selection.rows().flat_map(|row| {
            (0..row.count).map(move |turn| {
                let begin = row.begin + turn * row.stride;
                (8 * begin, 8 * (begin + row.nbytes))
            })
        });
        assert_eq!(merged(rows), runs);
        assert_eq!(
            selection.nbytes(),
            selection.runs().map(|run| run.nbytes()).sum::<u64>()
        );
        assert!(selection.runs().count() as u64 <= selection.block_count());
        let span = runs
            .iter()
            .map(|run| run.0)
            .min()
            .zip(runs.iter().map(|run| run.1).max());
        assert_eq!(selection.span().map(|span| (8 * span.begin, 8 * span.end)), span);
    }
    Ok(())
}

/// Checks that the sizes and the ranges of a selection fit the tensor.
fn within(selection: &Selection, dtype: Dtype, shape: &[u64]) {
    const LOOKED_AT: usize = 1000;
    let whole = match nbytes(dtype, shape) {
        Ok(whole) => whole,
        Err(fault) => panic!("selected from a tensor without a size: {fault}"),
    };
    assert_eq!(nbytes(dtype, selection.shape()), Ok(selection.nbytes()));
    assert_eq!(selection.nbytes() == 0, selection.span().is_none());
    assert_eq!(selection.is_contiguous(), selection.block_count() <= 1);
    let span = selection.span();
    for run in selection.runs().take(LOOKED_AT) {
        assert!(run.begin < run.end && run.end <= whole);
        assert!(span.is_some_and(|span| span.begin <= run.begin && run.end <= span.end));
    }
    for row in selection.rows().take(LOOKED_AT) {
        assert!(row.count > 0 && row.nbytes > 0);
        assert!(row.begin + (row.count - 1) * row.stride + row.nbytes <= whole);
    }
}
