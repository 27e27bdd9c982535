//! Replaces the metadata of a file without moving its data.

use alloc::vec::Vec;

use crate::codec::json::{render, render_metadata};
use crate::extent::to_u64;
use crate::format::Format;
use crate::header::Header;
use crate::layout::sorted;
use crate::limits::{Leniency, Limits};
use crate::metadata::Metadata;
use crate::raw::PREFIX_NBYTES;

/// Returns the head of a file with `metadata` in place of its own. It has the same length as `head`, so that no data
/// moves. `None` if there is not enough space, or if `head` is not the head of a file with `header`.
///
/// The space comes from the spaces after the metadata, so that no entry moves either, or otherwise from the spaces at
/// the end of the header. Metadata is written as [`layout()`](crate::layout()) writes it, regardless of its previous
/// form.
///
/// ```
/// use ingot_format::{Format, LayoutOptions, edit_metadata, layout_with};
/// let options = LayoutOptions { reserve: 100, ..LayoutOptions::default() };
/// let old = layout_with(&[], None, Format::Safetensors, &options)?;
/// let head = edit_metadata(&old.head, &old.header, Some(&[("step", "1")])).unwrap();
/// assert_eq!(head.len(), old.head.len());
/// assert!(head[8..].starts_with(b"{\"__metadata__\":{\"step\":\"1\"}  "));
/// # Ok::<(), ingot_format::FormatError>(())
/// ```
#[must_use]
pub fn edit_metadata(head: &[u8], header: &Header, metadata: Option<&[(&str, &str)]>) -> Option<Vec<u8>> {
    if header.format() != Format::Safetensors {
        return None;
    }
    let metadata = metadata.map(sorted).transpose().ok()?;
    let new = header.with_metadata(metadata);
    let candidates = [in_its_place(head, header, &new), at_the_end(head, &new)];
    candidates
        .into_iter()
        .flatten()
        .find(|head| has_contents(head, &new))
}

/// Returns whether `head` belongs to a file with exactly the contents of `header`.
fn has_contents(head: &[u8], header: &Header) -> bool {
    let limits = Limits {
        header_nbytes: Limits::CEILING,
        leniency: Leniency::Accept,
    };
    // Parse the result and compare, since any program may have written the file.
    Header::parse(head, header.file_nbytes(), &limits).is_ok_and(|read| {
        read.data_start() == header.data_start()
            && read.metadata() == header.metadata()
            && read.entries().eq(header.entries())
    })
}

/// Replaces the metadata without moving anything after it.
fn in_its_place(head: &[u8], old: &Header, new: &Header) -> Option<Vec<u8>> {
    let begin = PREFIX_NBYTES + 1;
    let text = head.get(begin..)?;
    let nbytes = member(old.metadata(), old.is_empty(), text)?;
    let mut place = Vec::with_capacity(nbytes);
    if let Some(metadata) = new.metadata() {
        render_metadata(metadata, &mut place);
    }
    // The comma goes directly before the first entry, where it can stay if later metadata is longer.
    let comma = usize::from(new.metadata().is_some() && !new.is_empty());
    let spaces = nbytes.checked_sub(place.len() + comma)?;
    place.extend(core::iter::repeat_n(b' ', spaces));
    place.extend(core::iter::repeat_n(b',', comma));
    let mut edited = head.to_vec();
    edited[begin..begin + nbytes].copy_from_slice(&place);
    Some(edited)
}

/// Returns the number of bytes of `text` that belong to the metadata: the member as [`render_metadata`] writes it, the
/// spaces around it, and its comma. `text` follows the first brace.
fn member(metadata: Option<&Metadata>, alone: bool, text: &[u8]) -> Option<usize> {
    let mut rest = skip_spaces(text);
    if let Some(metadata) = metadata {
        let mut rendered = Vec::new();
        render_metadata(metadata, &mut rendered);
        rest = skip_spaces(rest.strip_prefix(&*rendered)?);
        if !alone {
            rest = skip_spaces(rest.strip_prefix(b",")?);
        }
    }
    Some(text.len() - rest.len())
}

fn skip_spaces(text: &[u8]) -> &[u8] {
    let spaces = text.iter().take_while(|&&byte| byte == b' ').count();
    &text[spaces..]
}

/// Writes the whole header anew, as compactly as possible.
fn at_the_end(head: &[u8], new: &Header) -> Option<Vec<u8>> {
    let mut edited = head.get(..PREFIX_NBYTES)?.to_vec();
    render(new.raw(), &mut edited);
    if to_u64(edited.len()) > new.data_start() {
        return None;
    }
    edited.resize(head.len(), b' ');
    Some(edited)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Align, Dtype, LayoutOptions, Spec, layout_with};
    use alloc::collections::BTreeMap;
    use alloc::string::String;
    use alloc::vec;
    use proptest::prelude::*;

    type Pairs = Option<BTreeMap<String, String>>;

    fn pairs() -> impl Strategy<Value = Pairs> {
        proptest::option::of(proptest::collection::btree_map(
            any::<String>(),
            any::<String>(),
            0..4,
        ))
    }

    fn borrowed(pairs: &Pairs) -> Option<Vec<(&str, &str)>> {
        let pairs = pairs.as_ref()?;
        Some(pairs.iter().map(|(key, value)| (&**key, &**value)).collect())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(600))]

        #[test]
        fn an_edited_head_has_the_new_metadata_and_keeps_the_rest(
            names in proptest::collection::btree_set("[a-c]{1,3}", 0..4),
            old in pairs(),
            new in pairs(),
            reserve in prop_oneof![Just(0_u64), 0..600_u64],
        ) {
            let specs: Vec<Spec<'_>> =
                names.iter().map(|name| Spec { name, dtype: Dtype::U8, shape: &[3] }).collect();
            let options = LayoutOptions { reserve, ..LayoutOptions::default() };
            let file = layout_with(&specs, borrowed(&old).as_deref(), Format::Safetensors, &options).unwrap();
            let edited = edit_metadata(&file.head, &file.header, borrowed(&new).as_deref());
            let Some(head) = edited else {
                let tight = layout_with(&specs, borrowed(&new).as_deref(), Format::Safetensors, &LayoutOptions::default());
                // Up to 7 of the spaces at its end are not needed.
                prop_assert!(tight.unwrap().head.len() > file.head.len() - 7, "there was room");
                return Ok(());
            };
            prop_assert_eq!(head.len(), file.head.len());
            let read = Header::parse(&head, file.header.file_nbytes(), &Limits::default()).unwrap();
            prop_assert_eq!(read.metadata().map(|metadata| metadata.iter().collect()), borrowed(&new));
            prop_assert!(read.entries().eq(file.header.entries()));
        }

        #[test]
        fn where_room_was_left_no_entry_moves(old in pairs(), new in pairs()) {
            let longest = [&old, &new].map(|pairs| pairs.iter().flatten().map(|(k, v)| 6 * (k.len() + v.len()) + 6).sum::<usize>());
            let reserve = to_u64(longest[0] + longest[1] + 30);
            let options = LayoutOptions { reserve, ..LayoutOptions::default() };
            let specs = [Spec { name: "weight", dtype: Dtype::U8, shape: &[3] }];
            let file = layout_with(&specs, borrowed(&old).as_deref(), Format::Safetensors, &options).unwrap();
            let head = edit_metadata(&file.head, &file.header, borrowed(&new).as_deref()).unwrap();
            let entry = file.head.windows(8).position(|bytes| bytes == b"\"weight\"").unwrap();
            prop_assert_eq!(&head[entry..], &file.head[entry..]);
            let again = edit_metadata(&head, &file.header.with_metadata(borrowed(&new).map(|pairs| sorted(&pairs).unwrap())), borrowed(&old).as_deref());
            prop_assert_eq!(Some(&head[..8]), again.as_deref().map(|head| &head[..8]));
            prop_assert_eq!(&again.unwrap()[entry..], &file.head[entry..]);
        }

        #[test]
        fn the_data_has_the_requested_alignment_and_there_is_room(
            names in proptest::collection::btree_set(any::<String>(), 0..4),
            metadata in pairs(),
            reserve in 0..5000_u64,
            align in proptest::sample::select(vec![Align::Elements, Align::CacheLine, Align::Page]),
        ) {
            prop_assume!(!names.contains(crate::METADATA_KEY));
            let specs: Vec<Spec<'_>> =
                names.iter().map(|name| Spec { name, dtype: Dtype::F32, shape: &[3] }).collect();
            let options = LayoutOptions { reserve, align, ..LayoutOptions::default() };
            let pairs = borrowed(&metadata);
            let usual = layout_with(&specs, pairs.as_deref(), Format::Safetensors, &LayoutOptions::default()).unwrap();
            let roomy = layout_with(&specs, pairs.as_deref(), Format::Safetensors, &options).unwrap();
            prop_assert_eq!(to_u64(roomy.head.len()) % align.nbytes(), 0);
            let more = to_u64(roomy.head.len() - usual.head.len());
            prop_assert!(more >= reserve && more < reserve + align.nbytes());
            let spaces = |head: &[u8]| head.iter().filter(|&&byte| byte == b' ').count();
            prop_assert_eq!(to_u64(spaces(&roomy.head[8..]) - spaces(&usual.head[8..])), more, "spaces and nothing else");
            let read = Header::parse(&roomy.head, roomy.header.file_nbytes(), &Limits { leniency: Leniency::Refuse, ..Limits::default() }).unwrap();
            prop_assert!(read.entries().eq(usual.header.entries()));
            prop_assert_eq!(read.metadata(), usual.header.metadata());
        }
    }

    /// A head with this text, and its header for a file with `data_nbytes` bytes of data.
    fn parsed(text: &[u8], data_nbytes: u64) -> (Vec<u8>, Header) {
        let head = [&to_u64(text.len()).to_le_bytes()[..], text].concat();
        let header = Header::parse(&head, to_u64(head.len()) + data_nbytes, &Limits::default()).unwrap();
        (head, header)
    }

    #[test]
    fn accepts_metadata_that_just_fits_and_rejects_one_byte_more() {
        // The space before the colon differs from our form, so that the whole header is written anew.
        let text = br#"{"__metadata__" :{"k":"v"},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#;
        let (head, header) = parsed(text, 1);
        let edited = edit_metadata(&head, &header, Some(&[("k", "vw")])).unwrap();
        let expected = br#"{"__metadata__":{"k":"vw"},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#;
        assert_eq!(&edited[8..], expected);
        assert_eq!(edit_metadata(&head, &header, Some(&[("k", "vwx")])), None);
    }

    #[test]
    fn the_head_of_another_file_is_never_taken_for_that_of_this_one() {
        let (_, header) = parsed(br#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}} "#, 1);
        let read = |head: &[u8]| Header::parse(head, to_u64(head.len()) + 1, &Limits::default()).unwrap();
        // A head of the same length: the result has the tensors of `header`.
        let (head, _) = parsed(br#"{"b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}} "#, 1);
        let edited = edit_metadata(&head, &header, None).unwrap();
        assert!(read(&edited).entries().eq(header.entries()));
        // A longer head, so that the data would begin elsewhere.
        let (head, _) = parsed(br#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}    "#, 1);
        assert_eq!(edit_metadata(&head, &header, None), None);
    }

    #[test]
    fn a_null_for_metadata_is_replaced() {
        let text = b"{\"__metadata__\":null}               ";
        let head = [&to_u64(text.len()).to_le_bytes()[..], text].concat();
        let header = Header::parse(&head, to_u64(head.len()), &Limits::default()).unwrap();
        let edited = edit_metadata(&head, &header, Some(&[("k", "v")])).unwrap();
        assert!(edited[8..].starts_with(b"{\"__metadata__\":{\"k\":\"v\"}} "));
    }

    #[test]
    fn bintensors_has_no_room() {
        for options in [
            LayoutOptions {
                reserve: 1,
                ..LayoutOptions::default()
            },
            LayoutOptions {
                align: Align::CacheLine,
                ..LayoutOptions::default()
            },
        ] {
            let fault = layout_with(&[], None, Format::Bintensors, &options).unwrap_err();
            assert_eq!(fault.code(), "no-room");
        }
        let file = layout_with(&[], None, Format::Bintensors, &LayoutOptions::default()).unwrap();
        assert_eq!(edit_metadata(&file.head, &file.header, None), None);
    }

    #[test]
    fn room_beyond_the_limit_is_refused_before_it_is_made() {
        for reserve in [Limits::HEADER_NBYTES, u64::MAX] {
            let options = LayoutOptions {
                reserve,
                ..LayoutOptions::default()
            };
            let fault = layout_with(&[], None, Format::Safetensors, &options).unwrap_err();
            assert_eq!(fault.code(), "header-too-large");
        }
    }
}
