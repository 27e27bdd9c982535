//! Every safetensors file that this crate accepts is accepted by the safetensors crate too. Both read the same contents
//! from it and write the same file.
#![no_main]

use std::collections::HashMap;

use ingot_format::{Format, FormatError, SafeTensors, to_vec};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    agree(input);
    // As in the target `parse`: the input as a header, in a file with the length that this header needs.
    if let Some(header) = input.get(8..) {
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend_from_slice(header);
        if let Err(FormatError::Truncated { expected, .. }) = SafeTensors::deserialize(&file) {
            const MOST: u64 = 1 << 16;
            if expected > MOST {
                return;
            }
            let data = (0..expected).map(|at| (at % 251) as u8);
            file.extend(data);
        }
        agree(&file);
    }
});

fn agree(file: &[u8]) {
    let Ok(ours) = SafeTensors::deserialize(file) else {
        return;
    };
    let theirs = match safetensors::SafeTensors::deserialize(file) {
        Ok(theirs) => theirs,
        Err(fault) => panic!("accepted here, refused upstream: {fault}"),
    };
    let (_, header) = match safetensors::SafeTensors::read_metadata(file) {
        Ok(read) => read,
        Err(fault) => panic!("{fault}"),
    };
    assert_eq!(ours.len(), theirs.len());
    for (name, view) in ours.iter() {
        let same = match theirs.tensor(name) {
            Ok(same) => same,
            Err(fault) => panic!("{name:?} is missing upstream: {fault}"),
        };
        assert_eq!(view.dtype().code(), same.dtype().to_string());
        assert_eq!(view.shape(), same.shape());
        assert_eq!(view.data(), same.data());
    }
    let metadata: Option<HashMap<String, String>> = ours.header().metadata().map(|metadata| {
        metadata
            .iter()
            .map(|(key, value)| (key.into(), value.into()))
            .collect()
    });
    assert_eq!(&metadata, header.metadata());

    // Upstream writes broken JSON for an empty map and no tensors: `{},"__metadata__":{}}`.
    if ours.is_empty() && metadata.as_ref().is_some_and(HashMap::is_empty) {
        return;
    }
    // Upstream writes several keys in an order that changes from run to run.
    if metadata.as_ref().is_some_and(|metadata| metadata.len() > 1) {
        return;
    }
    let pairs: Option<Vec<(&str, &str)>> = metadata.as_ref().map(|metadata| {
        metadata
            .iter()
            .map(|(key, value)| (key.as_str(), value.as_str()))
            .collect()
    });
    let written = to_vec(ours.iter(), pairs.as_deref(), Format::Safetensors);
    match safetensors::serialize(theirs.iter(), metadata.clone()) {
        Ok(expected) => assert_eq!(written, Ok(expected)),
        Err(fault) => panic!("upstream cannot write what it read: {fault}"),
    }
}
