//! Programs for the safetensors crate, compiled with that crate and with ingot. Only the crate's name differs, and the
//! results must be equal.

use proptest::prelude::*;

mod upstream {
    use ::safetensors as crate_in_use;

    include!("drop_in/programs.rs");
}

mod io {
    use ::ingot_io as crate_in_use;

    include!("drop_in/programs.rs");
}

/// Uses the module `safetensors`, as programs do that name the crate by a path.
#[allow(
    dead_code,
    reason = "one of the programs is run by a property test, with two of the three"
)]
mod io_by_module {
    use ::ingot_io::safetensors as crate_in_use;

    include!("drop_in/programs.rs");
}

macro_rules! does_the_same {
    ($($program:ident: $sentence:ident;)*) => {
        $(#[test]
        fn $sentence() {
            let expected = upstream::$program().unwrap();
            assert!(!expected.is_empty());
            assert_eq!(io::$program().unwrap(), expected);
            assert_eq!(io_by_module::$program().unwrap(), expected);
        })*
    };
}

does_the_same! {
    saves_and_loads: a_program_that_saves_and_loads_runs_unchanged;
    stores_its_own_type: a_program_with_a_view_of_its_own_runs_unchanged;
    stores_a_map: a_program_that_stores_a_map_runs_unchanged;
    lists_a_file: a_program_that_lists_a_file_runs_unchanged;
    reads_only_the_header: a_program_that_reads_only_the_header_runs_unchanged;
    makes_a_header: a_program_that_makes_a_header_runs_unchanged;
    takes_columns: a_program_that_takes_rows_and_columns_runs_unchanged;
    shards_by_rank: a_program_that_shards_by_rank_runs_unchanged;
    looks_at_errors: a_program_that_looks_at_errors_runs_unchanged;
    boxes_errors: a_program_that_boxes_errors_runs_unchanged;
    sorts_dtypes: a_program_that_asks_for_sizes_of_dtypes_runs_unchanged;
}

/// Generates for each dimension its size, the begin and the end of a nonempty range within it, and a step.
fn ranges() -> impl Strategy<Value = Vec<(usize, usize, usize, usize)>> {
    let one = (1_usize..7).prop_flat_map(|dim| (Just(dim), 0..dim, 1..=dim, 1_usize..4));
    let forwards = one.prop_map(|(dim, a, b, step)| (dim, a.min(b - 1), b.max(a + 1), step));
    proptest::collection::vec(forwards, 1..4)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn slices_are_those_of_upstream(ranges in ranges()) {
        prop_assert_eq!(io::slice_of(&ranges), upstream::slice_of(&ranges));
    }
}

/// Upstream returns all bytes of the tensor, with an empty shape.
#[test]
fn an_empty_range_has_no_bytes() {
    for ranges in [[(3, 2, 2, 2), (4, 0, 4, 1)], [(3, 1, 1, 1), (4, 1, 3, 1)]] {
        assert_eq!(
            io::slice_of(&ranges),
            (vec![0, ranges[1].2 - ranges[1].1], 0, vec![])
        );
        assert_eq!(upstream::slice_of(&ranges).2.len(), 12);
    }
}

/// Upstream panics.
#[test]
fn a_range_that_ends_before_it_begins_is_refused() {
    use ingot_io::slice::{IndexOp, InvalidSlice};
    use ingot_io::{Dtype, TensorView};
    let tensor = TensorView::new(Dtype::U8, vec![5], &[1, 2, 3, 4, 5]).unwrap();
    #[allow(clippy::reversed_empty_ranges, reason = "that is the case")]
    let fault = tensor.slice(4..2).unwrap_err();
    let expected = InvalidSlice::SliceOutOfRange {
        dim_index: 0,
        asked: 4,
        dim_size: 5,
    };
    assert_eq!(fault, expected);
}

/// Upstream takes the last of the two, other readers the first.
#[test]
fn a_header_of_json_with_two_meanings_is_refused() {
    use ingot_io::tensor::Metadata;
    let entry = r#"{"dtype":"U8","shape":[1],"data_offsets":[0,1]}"#;
    for header in [
        format!(r#"{{"a":{entry},"a":{entry}}}"#),
        r#"{"__metadata__":{"k":"1","k":"2"}}"#.to_owned(),
        r#"{"__metadata__":{},"__metadata__":{}}"#.to_owned(),
        r#"{"a":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}}"#.to_owned(),
        r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,1]}}"#.to_owned(),
    ] {
        assert!(serde_json::from_str::<Metadata>(&header).is_err(), "{header}");
    }
    assert!(serde_json::from_str::<Metadata>(&format!(r#"{{"a":{entry}}}"#)).is_ok());
}
