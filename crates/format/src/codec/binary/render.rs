//! Writing the binary header, byte for byte as bintensors writes it.

use alloc::vec::Vec;

use super::varint;
use crate::extent::to_u64;
use crate::raw::RawHeader;

/// Appends the binary form of `header`, without length and padding.
pub(crate) fn render(header: &RawHeader, out: &mut Vec<u8>) {
    out.push(u8::from(header.metadata.is_some()));
    if let Some(metadata) = &header.metadata {
        varint::put(to_u64(metadata.len()), out);
        for (key, value) in metadata.iter() {
            string(key, out);
            string(value, out);
        }
    }
    varint::put(to_u64(header.records.len()), out);
    for entry in header.entries() {
        string(entry.name, out);
        // `layout` has rejected dtypes without a number; no reader accepts this one.
        out.push(entry.dtype.bintensors_number().unwrap_or(u8::MAX));
        varint::put(to_u64(entry.shape.len()), out);
        for &dim in entry.shape {
            varint::put(dim, out);
        }
        varint::put(entry.begin, out);
        varint::put(entry.end, out);
    }
}

fn string(text: &str, out: &mut Vec<u8>) {
    varint::put(to_u64(text.len()), out);
    out.extend_from_slice(text.as_bytes());
}
