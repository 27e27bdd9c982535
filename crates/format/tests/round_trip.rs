//! Writes layouts and parses them again, in both formats.

use std::collections::{BTreeMap, BTreeSet};

use ingot_format::{Dtype, Entry, Format, Header, Limits, Spec, layout, nbytes};
use proptest::prelude::*;
use proptest::sample::select;

type Tensors = BTreeMap<String, (Dtype, Vec<u64>)>;

fn tensors() -> impl Strategy<Value = Tensors> {
    let dtypes: Vec<Dtype> = Dtype::ALL
        .iter()
        .copied()
        .filter(|dtype| dtype.bintensors_number().is_some())
        .collect();
    // Large dimensions too, because no data is needed here.
    let dim = prop_oneof![0_u64..4, 249_u64..253, 65_534_u64..65_538, Just(1 << 13)];
    let name = prop_oneof!["[a-c]{0,3}", any::<String>()];
    let shape = proptest::collection::vec(dim, 0..4);
    proptest::collection::btree_map(name, (select(dtypes), shape), 0..12).prop_map(|mut tensors| {
        tensors.remove(ingot_format::METADATA_KEY);
        tensors
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn parsing_gives_back_what_was_laid_out(
        tensors in tensors(),
        metadata in proptest::option::of(proptest::collection::btree_map(any::<String>(), any::<String>(), 0..5)),
        format in select(&[Format::Safetensors, Format::Bintensors][..]),
    ) {
        let specs: Vec<Spec<'_>> = tensors
            .iter()
            .map(|(name, (dtype, shape))| Spec { name, dtype: *dtype, shape })
            .collect();
        let pairs: Option<Vec<(&str, &str)>> =
            metadata.as_ref().map(|pairs| pairs.iter().map(|(key, value)| (&**key, &**value)).collect());
        let new = layout(&specs, pairs.as_deref(), format).unwrap();
        let read = Header::parse(&new.head, new.header.file_nbytes(), &Limits::default()).unwrap();

        prop_assert_eq!(read.format(), format);
        prop_assert_eq!(read.data_start(), new.header.data_start());
        prop_assert_eq!(read.data_start() % 8, 0);
        let entries: Vec<Entry<'_>> = read.entries().collect();
        prop_assert_eq!(&entries, &new.header.entries().collect::<Vec<_>>());
        prop_assert_eq!(
            read.metadata().map(|metadata| metadata.iter().collect::<Vec<_>>()),
            pairs
        );

        // Each tensor occurs once and begins at the end of the previous one, up to the end of the file.
        prop_assert_eq!(new.order.iter().collect::<BTreeSet<_>>().len(), specs.len());
        prop_assert_eq!(entries.len(), specs.len());
        let mut covered = 0;
        for (entry, &number) in entries.iter().zip(&new.order) {
            let spec = &specs[number];
            prop_assert_eq!((entry.name, entry.dtype, entry.shape), (spec.name, spec.dtype, spec.shape));
            prop_assert_eq!(entry.begin, covered);
            prop_assert_eq!(Ok(entry.nbytes()), nbytes(spec.dtype, spec.shape));
            // Wide elements come first, so that all are aligned in a mapped file.
            prop_assert!(entry.nbytes() == 0 || entry.begin % (spec.dtype.bits() / 8) == 0);
            covered = entry.end;
        }
        prop_assert_eq!(covered, read.data_nbytes());

        for (rank, name) in tensors.keys().enumerate() {
            let by_name = read.entries_by_name().nth(rank).unwrap();
            prop_assert_eq!(by_name.name, name);
            prop_assert_eq!(read.get(name), Some(by_name));
        }
    }
}
