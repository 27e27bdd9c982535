//! Test files in memory.

use ingot_format::{Dtype, Format, Spec, layout, to_u64};
use ingot_io::{Archive, MemorySource, OpenOptions};

/// Returns a file with these tensors.
pub(crate) fn archive(tensors: &[(&str, Dtype, Vec<u8>)]) -> Archive {
    let shapes: Vec<[u64; 1]> = tensors
        .iter()
        .map(|(_, dtype, bytes)| [to_u64(bytes.len()) * 8 / dtype.bits()])
        .collect();
    let specs: Vec<Spec<'_>> = tensors
        .iter()
        .zip(&shapes)
        .map(|((name, dtype, _), shape)| Spec {
            name,
            dtype: *dtype,
            shape,
        })
        .collect();
    let layout = layout(&specs, None, Format::Safetensors).unwrap();
    let mut file = layout.head;
    for name in layout.header.names() {
        let (_, _, bytes) = tensors.iter().find(|(other, _, _)| *other == name).unwrap();
        file.extend_from_slice(bytes);
    }
    Archive::from_source(Box::new(MemorySource::new(file)), &OpenOptions::default()).unwrap()
}
