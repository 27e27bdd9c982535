//! The fast reader: one pass over the compact JSON that every common writer emits.
//!
//! It returns exactly the result of the reference reader in `value.rs`, or leaves the header to that reader. It never
//! reports faults; that is the task of the reference reader.

use core::str;

use super::value;
use crate::dtype::Dtype;
use crate::error::FormatError;
use crate::extent::to_u64;
use crate::limits::Leniency;
use crate::metadata::{METADATA_KEY, Metadata};
use crate::raw::{PREFIX_NBYTES, RawHeader};

/// Reads the JSON of a header. Rules F4 to F8.
pub(crate) fn parse(header: &[u8], leniency: Leniency) -> Result<RawHeader, FormatError> {
    // F4
    let text = str::from_utf8(header).map_err(|fault| FormatError::InvalidUtf8 {
        position: to_u64(PREFIX_NBYTES + fault.valid_up_to()),
    })?;
    match Compact::whole(text) {
        Some(raw) => Ok(raw),
        None => value::read(text, leniency),
    }
}

/// The part of a compact header read so far. Compact means: no white space except spaces at the end and where space for
/// metadata is reserved, no escapes, and the fields of an entry in the usual order.
#[derive(Debug, Default)]
pub(crate) struct Compact {
    raw: RawHeader,
    expected: Expected,
    has_room: bool,
}

/// The item that is expected next.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Expected {
    #[default]
    Start,
    /// Reserved space for metadata, then the first item or the end.
    First,
    Item,
    /// Reserved space for more metadata, then a comma or the end.
    AfterMetadata,
    Padding,
}

impl Compact {
    /// Parses `text`, which must be a whole header.
    fn whole(text: &str) -> Option<RawHeader> {
        let mut compact = Compact::default();
        reserve(&mut compact.raw, text.len());
        (compact.read(text) == text.len()).then_some(compact)?.finish()
    }

    /// Reserves memory for the rest of a header of `header_nbytes`, once its first entries were read.
    pub(crate) fn make_room(&mut self, header_nbytes: usize) {
        if !self.has_room && !self.raw.records.is_empty() {
            reserve(&mut self.raw, header_nbytes);
            self.has_room = true;
        }
    }

    /// Reads the complete items in `text`, with their punctuation. Returns the number of bytes read; the text after
    /// them is incomplete or not compact.
    pub(crate) fn read(&mut self, text: &str) -> usize {
        let mut cursor = Cursor { rest: text };
        let mut done = text.len();
        while self.step(&mut cursor).is_some() {
            done = cursor.rest.len();
            if done == 0 {
                break;
            }
        }
        text.len() - done
    }

    /// Returns the header once all of it was read.
    pub(crate) fn finish(self) -> Option<RawHeader> {
        (self.expected == Expected::Padding).then_some(self.raw)
    }

    /// Reads one item with the comma or the brace after it. Changes nothing if it cannot read the item.
    #[inline]
    fn step(&mut self, cursor: &mut Cursor<'_>) -> Option<()> {
        match self.expected {
            Expected::Start => {
                cursor.literal("{")?;
                self.expected = Expected::First;
            }
            Expected::First => {
                cursor.spaces();
                self.expected = match cursor.literal("}") {
                    Some(()) => Expected::Padding,
                    None if cursor.rest.is_empty() => Expected::First,
                    None => Expected::Item,
                };
            }
            Expected::Item => {
                let (names, dims) = (self.raw.names.len(), self.raw.dims.len());
                let Some(expected) = item(cursor, &mut self.raw) else {
                    self.raw.names.truncate(names);
                    self.raw.dims.truncate(dims);
                    return None;
                };
                self.expected = expected;
            }
            Expected::AfterMetadata => {
                cursor.spaces();
                if !cursor.rest.is_empty() {
                    self.expected = after(cursor.goes_on("}")?);
                }
            }
            Expected::Padding => {
                cursor.spaces();
                return cursor.rest.is_empty().then_some(());
            }
        }
        Some(())
    }
}

/// Returns the state after an item; `goes_on` is true if another follows.
#[inline]
fn after(goes_on: bool) -> Expected {
    if goes_on {
        Expected::Item
    } else {
        Expected::Padding
    }
}

/// Reads one entry and the punctuation after it, or the metadata.
#[inline]
fn item(cursor: &mut Cursor<'_>, raw: &mut RawHeader) -> Option<Expected> {
    match cursor.string()? {
        METADATA_KEY => {
            raw.metadata = Some(metadata(cursor, raw)?);
            Some(Expected::AfterMetadata)
        }
        name => {
            raw.names.push_str(name);
            let (dtype, begin, end) = entry(cursor, raw)?;
            let goes_on = cursor.goes_on("}")?;
            raw.close_entry(dtype, begin, end);
            Some(after(goes_on))
        }
    }
}

/// Reserves the memory that a header of `header_nbytes` usually needs, so that growing does not copy it repeatedly.
/// Reserved memory that is never written to occupies no pages. The reserved sizes are chosen so that a header takes
/// less than twice its size even if one of the three vectors grows and the others stay small.
fn reserve(raw: &mut RawHeader, header_nbytes: usize) {
    const USUAL_ENTRY_NBYTES: usize = 100;
    let count = header_nbytes / USUAL_ENTRY_NBYTES + 1;
    raw.records.reserve(count);
    raw.dims.reserve(2 * count);
    raw.names.reserve(header_nbytes / 4);
}

/// Reads `:{"k":"v",…}` after `"__metadata__"`.
fn metadata(cursor: &mut Cursor<'_>, raw: &RawHeader) -> Option<Metadata> {
    if raw.metadata.is_some() {
        return None;
    }
    cursor.literal(":{")?;
    let mut metadata = Metadata::default();
    if cursor.literal("}").is_none() {
        loop {
            metadata.push(cursor.string()?);
            cursor.literal(":")?;
            metadata.push(cursor.string()?);
            if !cursor.goes_on("}")? {
                break;
            }
        }
    }
    metadata.duplicate().is_none().then_some(metadata)
}

/// Reads `:{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}` after a name. The dimensions go directly to `raw`.
#[inline]
fn entry(cursor: &mut Cursor<'_>, raw: &mut RawHeader) -> Option<(Dtype, u64, u64)> {
    cursor.literal(":{\"dtype\":")?;
    let dtype = cursor.dtype()?;
    cursor.literal(",\"shape\":[")?;
    if cursor.literal("]").is_none() {
        loop {
            raw.dims.push(cursor.number()?);
            if !cursor.goes_on("]")? {
                break;
            }
        }
    }
    cursor.literal(",\"data_offsets\":[")?;
    let begin = cursor.number()?;
    cursor.literal(",")?;
    let end = cursor.number()?;
    cursor.literal("]}")?;
    Some((dtype, begin, end))
}

/// The rest of the text. Each method consumes the item it is named after, or returns `None` and consumes nothing.
struct Cursor<'a> {
    rest: &'a str,
}

impl<'a> Cursor<'a> {
    #[inline]
    fn literal(&mut self, literal: &str) -> Option<()> {
        self.rest = self.rest.strip_prefix(literal)?;
        Some(())
    }

    /// Consumes spaces, if there are any.
    fn spaces(&mut self) {
        self.rest = self.rest.trim_start_matches(' ');
    }

    /// Consumes a comma and returns true, or consumes `close` and returns false.
    #[inline]
    fn goes_on(&mut self, close: &str) -> Option<bool> {
        match self.literal(",") {
            Some(()) => Some(true),
            None => self.literal(close).map(|()| false),
        }
    }

    /// Reads a quoted string without escapes.
    #[inline]
    fn string(&mut self) -> Option<&'a str> {
        let body = self.rest.strip_prefix('"')?;
        let (text, after) = body.split_at_checked(plain_nbytes(body.as_bytes()))?;
        self.rest = after.strip_prefix('"')?;
        Some(text)
    }

    /// Reads the quoted name of a dtype.
    #[inline]
    fn dtype(&mut self) -> Option<Dtype> {
        let body = self.rest.strip_prefix('"')?;
        // Byte by byte, because names are short: the processor predicts their ends and need not wait.
        let (code, after) = body.split_at_checked(body.bytes().position(|byte| byte == b'"')?)?;
        self.rest = after.strip_prefix('"')?;
        Dtype::from_code(code)
    }

    /// Reads an unsigned number in plain digits.
    #[inline]
    fn number(&mut self) -> Option<u64> {
        // 10¹⁹ - 1 is the largest number of 19 digits and fits; longer ones are left to the reference reader, so
        // wrapping here is harmless.
        const MAX_DIGITS: usize = 19;
        let mut number = 0_u64;
        let mut digits = self.rest.as_bytes();
        while let Some((four, after)) = digits.split_first_chunk()
            && let Some(value) = four_digits(*four)
        {
            number = number.wrapping_mul(10_000).wrapping_add(value);
            digits = after;
        }
        while let Some((&byte, after)) = digits.split_first()
            && byte.is_ascii_digit()
        {
            number = number.wrapping_mul(10).wrapping_add(u64::from(byte & 15));
            digits = after;
        }
        let len = self.rest.len() - digits.len();
        let leading_zero = len > 1 && self.rest.starts_with('0');
        if len == 0 || len > MAX_DIGITS || leading_zero {
            return None;
        }
        self.rest = self.rest.get(len..)?;
        Some(number)
    }
}

/// Returns the value of `text` if it is four digits. Offsets have about ten digits, and are half of a header's numbers.
#[inline]
fn four_digits(text: [u8; 4]) -> Option<u64> {
    // 0 to 9 for digits, and more for other bytes; adding 0x76 lifts 10 and above to the top bit.
    let values = u32::from_le_bytes(text) ^ 0x3030_3030;
    if (values.wrapping_add(0x7676_7676) | values) & 0x8080_8080 != 0 {
        return None;
    }
    // Neighbours are joined to pairs, and pairs to a number.
    let pairs = (values.wrapping_mul((10 << 8) + 1) >> 8) & 0x00ff_00ff;
    Some(u64::from(pairs.wrapping_mul((100 << 16) + 1) >> 16))
}

/// Returns the number of bytes of `body` before the first quote, backslash or control character.
pub(crate) fn plain_nbytes(body: &[u8]) -> usize {
    const WORD: usize = 8;
    const BLOCK: usize = 16;
    let mut at = 0;
    // Names are about 30 to 60 bytes long, and examining single bytes takes most of the time of a simple reader. So
    // whole blocks are skipped first, whose bytes compilers test all at once, and then eight bytes at a time.
    while body
        .get(at..)
        .and_then(<[u8]>::first_chunk::<BLOCK>)
        .is_some_and(is_plain)
    {
        at += BLOCK;
    }
    while let Some(word) = body.get(at..).and_then(<[u8]>::first_chunk::<WORD>) {
        let ends = string_ends(u64::from_le_bytes(*word));
        if ends != 0 {
            return at + crate::extent::index(ends.trailing_zeros() / 8);
        }
        at += WORD;
    }
    let tail = body.get(at..).unwrap_or_default();
    at + tail
        .iter()
        .position(|&byte| matches!(byte, b'"' | b'\\' | 0..=0x1f))
        .unwrap_or(tail.len())
}

/// Returns whether none of these bytes ends a plain string. The loop has no branch, so that it is vectorised.
#[inline]
fn is_plain(block: &[u8; 16]) -> bool {
    let ends = |byte: u8| (byte == b'"') | (byte == b'\\') | (byte < 0x20);
    !block.iter().fold(false, |found, &byte| found | ends(byte))
}

/// Marks the top bit of the bytes of `word` that end a plain string. Bytes above the first marked one may be marked
/// falsely (a borrow propagates upwards), so only the lowest mark is used.
fn string_ends(word: u64) -> u64 {
    const LOW: u64 = 0x0101_0101_0101_0101;
    const HIGH: u64 = 0x8080_8080_8080_8080;
    let zero_bytes = |word: u64| word.wrapping_sub(LOW) & !word;
    let quotes = zero_bytes(word ^ (LOW * 0x22));
    let backslashes = zero_bytes(word ^ (LOW * 0x5c));
    let controls = word.wrapping_sub(LOW * 0x20) & !word;
    (quotes | backslashes | controls) & HIGH
}

/// Compares the two readers. Returns whether the fast one parsed `text`, or how it differs from the reference reader.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn compare(text: &str) -> Result<bool, alloc::string::String> {
    let Some(quick) = Compact::whole(text) else {
        return Ok(false);
    };
    // Strict, because the fast reader never accepts anything unusual.
    let reference = value::read(text, Leniency::Refuse);
    // Debug output shows every field of a raw header.
    let (quick, reference) = (
        alloc::format!("{:?}", Ok::<_, FormatError>(quick)),
        alloc::format!("{reference:?}"),
    );
    if quick == reference {
        Ok(true)
    } else {
        Err(alloc::format!(
            "{text:?}:\n quick {quick}\n reference {reference}"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::format;
    use alloc::string::String;
    use alloc::vec::Vec;
    use proptest::prelude::*;

    /// Checks that the fast reader agrees with the reference reader, or leaves the text to it.
    fn agree(text: &str) -> Result<bool, TestCaseError> {
        compare(text).map_err(TestCaseError::fail)
    }

    /// Pieces that are joined to texts similar to real headers.
    fn piece() -> impl Strategy<Value = String> {
        let number = prop_oneof![
            Just("0".into()),
            (0_u64..300).prop_map(|n| format!("{n}")),
            any::<u64>().prop_map(|n| format!("{n}")),
            Just("00".into()),
            Just("18446744073709551616".into()),
            Just("1.0".into()),
            Just("-1".into()),
        ];
        let dtype = proptest::sample::select(Dtype::ALL).prop_map(|dtype| String::from(dtype.code()));
        let entry = (
            "[a-z.é\"\\\\]{0,20}",
            dtype,
            proptest::collection::vec(number.clone(), 0..4),
            number.clone(),
            number,
        )
            .prop_map(|(name, dtype, dims, begin, end)| {
                format!(
                    "\"{name}\":{{\"dtype\":\"{dtype}\",\"shape\":[{}],\"data_offsets\":[{begin},{end}]}}",
                    dims.join(",")
                )
            });
        let pairs = proptest::collection::vec(("[a-c]{0,2}", "\\PC{0,12}"), 0..4);
        let metadata = (pairs, " {0,3}").prop_map(|(pairs, room)| {
            let pairs: Vec<String> = pairs
                .iter()
                .map(|(key, value)| format!("\"{key}\":\"{value}\""))
                .collect();
            format!("\"__metadata__\":{{{}}}{room}", pairs.join(","))
        });
        prop_oneof![8 => entry, 1 => metadata]
    }

    fn text() -> impl Strategy<Value = String> {
        (" {0,2}", proptest::collection::vec(piece(), 0..6), " {0,8}")
            .prop_map(|(room, pieces, padding)| format!("{{{room}{}}}{padding}", pieces.join(",")))
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn quick_and_reference_reader_agree(text in text()) {
            agree(&text)?;
        }

        #[test]
        fn they_agree_after_one_byte_was_changed(text in text(), at in any::<prop::sample::Index>(), byte in 0_u8..128) {
            let mut bytes = text.into_bytes();
            let at = at.index(bytes.len());
            bytes[at] = byte;
            if let Ok(text) = String::from_utf8(bytes) {
                agree(&text)?;
            }
        }

        #[test]
        fn plain_length_equals_the_naive_one(body in proptest::collection::vec(any::<u8>(), 0..40)) {
            let naive = body.iter().position(|&byte| byte == b'"' || byte == b'\\' || byte < 0x20).unwrap_or(body.len());
            prop_assert_eq!(plain_nbytes(&body), naive);
        }
    }

    #[test]
    fn four_digits_are_those_that_each_by_itself_is() {
        for (digits, place, byte) in [*b"0123", *b"4567", *b"8901", *b"9999"]
            .into_iter()
            .flat_map(|digits| (0..4).map(move |place| (digits, place)))
            .flat_map(|(digits, place)| (0..=u8::MAX).map(move |byte| (digits, place, byte)))
        {
            let mut text = digits;
            text[place] = byte;
            let value = |sum: u64, byte: &u8| 10 * sum + u64::from(byte - b'0');
            let naive = text
                .iter()
                .all(u8::is_ascii_digit)
                .then(|| text.iter().fold(0, value));
            assert_eq!(four_digits(text), naive, "{}", text.escape_ascii());
        }
    }

    #[test]
    fn a_block_is_plain_where_each_of_its_bytes_is() {
        for byte in 0..=u8::MAX {
            let is_plain_byte = !matches!(byte, b'"' | b'\\' | 0..=0x1f);
            assert_eq!(is_plain(&[byte; 16]), is_plain_byte, "{byte}");
            for place in 0..16 {
                let mut block = *b"model.layers.12.";
                block[place] = byte;
                assert_eq!(is_plain(&block), is_plain_byte, "{byte} at {place}");
            }
        }
    }

    #[test]
    fn takes_what_upstream_writes() {
        for text in [
            "{}      ",
            "{\"a\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[0,24]}}",
            "{\"__metadata__\":{\"format\":\"pt\"},\"a\":{\"dtype\":\"F8_E4M3\",\"shape\":[],\"data_offsets\":[0,1]},\
             \"b\":{\"dtype\":\"F8_E5M2\",\"shape\":[0],\"data_offsets\":[1,1]}}  ",
            "{\"é\":{\"dtype\":\"BF16\",\"shape\":[1],\"data_offsets\":[0,2]},\"__metadata__\":{}}",
            // The longest number that always fits.
            "{\"a\":{\"dtype\":\"U8\",\"shape\":[9999999999999999999],\"data_offsets\":[0,1]}}",
            // With space for more metadata, as ingot writes it.
            "{   }  ",
            "{\"__metadata__\":{\"k\":\"v\"}    }  ",
            "{\"__metadata__\":{}   ,\"a\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[0,1]}}",
            "{  \"a\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[0,1]}}",
        ] {
            assert!(agree(text).unwrap(), "stepped aside for {text:?}");
        }
    }
}
