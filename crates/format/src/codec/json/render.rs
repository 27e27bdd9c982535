//! Writing the JSON header, byte for byte as safetensors writes it.

use alloc::vec::Vec;

use super::parse::plain_nbytes;
use crate::dtype::Dtype;
use crate::metadata::{METADATA_KEY, Metadata};
use crate::raw::RawHeader;

/// Returns the rank of this dtype in data order: higher ranks come first, so that wide elements are aligned.
pub(crate) fn data_rank(dtype: Dtype) -> u8 {
    dtype as u8
}

/// Appends the JSON of `header`, without length and padding. Returns the position in `out` at which space for longer
/// metadata belongs.
pub(crate) fn render(header: &RawHeader, out: &mut Vec<u8>) -> usize {
    out.push(b'{');
    if let Some(metadata) = &header.metadata {
        render_metadata(metadata, out);
    }
    let room_at = out.len();
    let before = usize::from(header.metadata.is_some());
    for (place, entry) in header.entries().enumerate() {
        comma(before + place, out);
        string(entry.name, out);
        out.extend_from_slice(b":{\"dtype\":\"");
        out.extend_from_slice(entry.dtype.code().as_bytes());
        out.extend_from_slice(b"\",\"shape\":");
        numbers(entry.shape, out);
        out.extend_from_slice(b",\"data_offsets\":");
        numbers(&[entry.begin, entry.end], out);
        out.push(b'}');
    }
    out.push(b'}');
    room_at
}

/// Appends the member of the header that holds `metadata`.
pub(crate) fn render_metadata(metadata: &Metadata, out: &mut Vec<u8>) {
    string(METADATA_KEY, out);
    out.extend_from_slice(b":{");
    for (place, (key, value)) in metadata.iter().enumerate() {
        comma(place, out);
        string(key, out);
        out.push(b':');
        string(value, out);
    }
    out.push(b'}');
}

fn comma(place: usize, out: &mut Vec<u8>) {
    if place > 0 {
        out.push(b',');
    }
}

fn numbers(numbers: &[u64], out: &mut Vec<u8>) {
    out.push(b'[');
    for (place, &number) in numbers.iter().enumerate() {
        comma(place, out);
        decimal(number, out);
    }
    out.push(b']');
}

/// Appends the digits of `number`. Not left to the formatting machinery, which takes longer than the rest of an entry.
fn decimal(number: u64, out: &mut Vec<u8>) {
    // `u64::MAX` has 20 digits.
    let mut digits = [0; 20];
    let mut begin = digits.len();
    let mut rest = number;
    loop {
        begin -= 1;
        // The remainder is below 10, so only its lowest byte matters.
        digits[begin] = b'0' + (rest % 10).to_le_bytes()[0];
        rest /= 10;
        if rest == 0 {
            break;
        }
    }
    out.extend_from_slice(&digits[begin..]);
}

/// Appends a JSON string with the escapes of serde_json: the short ones that JSON has, `\u00xx` for other control
/// characters, and no others.
pub(crate) fn string(text: &str, out: &mut Vec<u8>) {
    out.push(b'"');
    let mut rest = text.as_bytes();
    loop {
        let (plain, special) = rest.split_at(plain_nbytes(rest));
        out.extend_from_slice(plain);
        let Some((&byte, after)) = special.split_first() else {
            break;
        };
        escape(byte, out);
        rest = after;
    }
    out.push(b'"');
}

fn escape(byte: u8, out: &mut Vec<u8>) {
    let short = match byte {
        0x08 => b'b',
        0x09 => b't',
        0x0a => b'n',
        0x0c => b'f',
        0x0d => b'r',
        0..=0x1f => {
            out.extend_from_slice(b"\\u00");
            out.extend([byte >> 4, byte & 15].map(|half| b"0123456789abcdef"[usize::from(half)]));
            return;
        }
        // A quote or a backslash.
        _ => byte,
    };
    out.extend([b'\\', short]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_character_is_escaped_as_serde_json_does() {
        for c in ('\0'..='\u{ff}').chain(['\u{2028}', '😀']) {
            let text = alloc::format!("a{c}b");
            let mut out = Vec::new();
            string(&text, &mut out);
            assert_eq!(out, serde_json::to_vec(&text).unwrap(), "{c:?}");
        }
    }
}
