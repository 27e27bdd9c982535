//! Reading a header through a window that is shorter than the header.

use core::str;

use crate::codec::json::Compact;
use crate::extent::{to_u64, to_usize};
use crate::format::Format;
use crate::header::Header;
use crate::raw::PREFIX_NBYTES;

/// Reads a long header piece by piece, so that the whole header is never in memory: faulting in its pages takes longer
/// than parsing it.
///
/// It parses only the compact JSON that every common writer emits. For any other header, including a broken one, it
/// returns `None`; the caller then passes the whole header to [`Header::parse`], which also reports the fault.
///
/// ```
/// use ingot_format::{Header, HeaderWindow, Limits};
/// let file = b"\x39\0\0\0\0\0\0\0{\"bias\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}12345678";
/// let limits = Limits::default();
/// let head_nbytes = Header::head_nbytes(file, 73, &limits)?;
/// let mut window = HeaderWindow::new(head_nbytes, 73);
/// let taken = window.feed(&file[8..20]).unwrap();
/// assert_eq!(taken, 1, "the brace; the entry is not yet whole");
/// window.feed(&file[8 + taken..65]).unwrap();
/// assert_eq!(window.finish().unwrap().get("bias").unwrap().shape, [2]);
/// # Ok::<(), ingot_format::FormatError>(())
/// ```
#[derive(Debug)]
pub struct HeaderWindow {
    compact: Compact,
    head_nbytes: u64,
    file_nbytes: u64,
    /// Bytes of the header that were not yet read.
    left: u64,
}

impl HeaderWindow {
    /// Creates a window for a file of `file_nbytes` whose length and header take `head_nbytes`, as returned by
    /// [`Header::head_nbytes`].
    #[must_use]
    pub fn new(head_nbytes: u64, file_nbytes: u64) -> HeaderWindow {
        let left = head_nbytes.saturating_sub(to_u64(PREFIX_NBYTES));
        let compact = Compact::default();
        HeaderWindow {
            compact,
            head_nbytes,
            file_nbytes,
            left,
        }
    }

    /// Reads the complete items in `bytes`, which begin where the bytes read so far end; the first ones follow the 8
    /// bytes of the length. Returns the number of bytes read; the rest must be passed again with more bytes after it.
    /// If it returns `None`, or 0 for the longest possible window, use [`Header::parse`].
    pub fn feed(&mut self, bytes: &[u8]) -> Option<usize> {
        let text = match str::from_utf8(bytes) {
            Ok(text) => text,
            // A character cut in two is passed again.
            Err(fault) if fault.error_len().is_none() => {
                str::from_utf8(&bytes[..fault.valid_up_to()]).ok()?
            }
            Err(_) => return None,
        };
        let taken = self.compact.read(text);
        // Not sooner: a header whose first item is longer than any window is read by [`Header::parse`].
        self.compact.make_room(to_usize(self.left).unwrap_or(0));
        self.left = self.left.checked_sub(to_u64(taken))?;
        Some(taken)
    }

    /// Returns the header once all of it was read; `None` if [`Header::parse`] must be used.
    #[must_use]
    pub fn finish(self) -> Option<Header> {
        if self.left > 0 {
            return None;
        }
        let raw = self.compact.finish()?;
        Header::prove(
            raw,
            Format::Safetensors,
            self.head_nbytes,
            self.file_nbytes - self.head_nbytes,
        )
        .ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Dtype, Limits, Spec, layout};
    use alloc::format;
    use alloc::string::String;
    use alloc::vec::Vec;
    use proptest::prelude::*;

    /// The header of `file`, read through a window of `width` bytes.
    fn through_window(file: &[u8], width: usize) -> Option<Header> {
        let file_nbytes = to_u64(file.len());
        let head_nbytes = Header::head_nbytes(file, file_nbytes, &Limits::default()).ok()?;
        let end = to_usize(head_nbytes)?;
        let mut window = HeaderWindow::new(head_nbytes, file_nbytes);
        let mut at = PREFIX_NBYTES;
        while at < end {
            match window.feed(&file[at..end.min(at + width)])? {
                0 => return None,
                taken => at += taken,
            }
        }
        window.finish()
    }

    fn all(header: &Header) -> String {
        format!("{header:?}")
    }

    #[test]
    fn invalid_utf8_is_left_to_parse_at_once() {
        let mut window = HeaderWindow::new(100, 100);
        assert_eq!(window.feed(b"{\"a\xff\":"), None);
        // The rest of a character that is cut in two may still follow.
        let mut window = HeaderWindow::new(100, 100);
        assert_eq!(window.feed(b"{\"a\xc3"), Some(1));
    }

    #[test]
    fn room_for_metadata_may_be_cut_anywhere() {
        let text = br#"{   "a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#;
        let head_nbytes = to_u64(text.len() + PREFIX_NBYTES);
        for cut in 1..5 {
            let mut window = HeaderWindow::new(head_nbytes, head_nbytes + 1);
            assert_eq!(window.feed(&text[..cut]), Some(cut));
            assert_eq!(window.feed(&text[cut..]), Some(text.len() - cut));
            assert!(window.finish().is_some(), "{cut}");
        }
    }

    #[test]
    fn finish_returns_none_for_an_incomplete_header() {
        let text = br#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#;
        let head_nbytes = to_u64(text.len() + PREFIX_NBYTES);
        let finished = |head_nbytes: u64| {
            let mut window = HeaderWindow::new(head_nbytes, head_nbytes + 1);
            assert_eq!(window.feed(text), Some(text.len()));
            window.finish()
        };
        assert!(finished(head_nbytes).is_some());
        // One more byte, with any value.
        assert!(finished(head_nbytes + 1).is_none());
    }

    proptest! {
        #[test]
        fn any_window_gives_the_header_or_steps_aside(
            shapes in proptest::collection::vec(proptest::collection::vec(0_u64..300, 0..4), 0..20),
            metadata in proptest::option::of("\\PC{0,40}"),
            width in 1_usize..400,
            at in any::<prop::sample::Index>(),
            byte in any::<u8>(),
        ) {
            let names: Vec<String> = (0..shapes.len()).map(|number| format!("layer.{number}.größe")).collect();
            let specs: Vec<Spec<'_>> = names
                .iter()
                .zip(&shapes)
                .map(|(name, shape)| Spec { name, dtype: Dtype::U8, shape })
                .collect();
            let pairs = metadata.as_ref().map(|value| [("key", value.as_str())]);
            let new = layout(&specs, pairs.as_ref().map(|pairs| &pairs[..]), Format::Safetensors).unwrap();
            let mut file = new.head;
            file.resize(to_usize(new.header.file_nbytes()).unwrap(), 0);
            let whole = Header::parse(&file, to_u64(file.len()), &Limits::default()).unwrap();
            if let Some(header) = through_window(&file, width) {
                prop_assert_eq!(all(&header), all(&whole));
            }
            // Without escapes, a window that holds the largest item is enough.
            if metadata.is_none_or(|value| !value.contains(['"', '\\'])) {
                prop_assert!(through_window(&file, 400).is_some());
            }
            let head_nbytes = to_usize(whole.data_start()).unwrap();
            let at = PREFIX_NBYTES + at.index(head_nbytes - PREFIX_NBYTES);
            file[at] = byte;
            if let Some(header) = through_window(&file, width) {
                let whole = Header::parse(&file, to_u64(file.len()), &Limits::default());
                prop_assert_eq!(Some(all(&header)), whole.ok().map(|header| all(&header)));
            }
        }
    }
}
