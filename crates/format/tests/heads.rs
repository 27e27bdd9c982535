//! Errors for heads that are incomplete or exactly at the limit, and for tensors that are not in the header.

use ingot_format::{FormatError, Header, Limits};

#[test]
fn rejects_an_incomplete_header_with_both_sizes() {
    let text = br#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#;
    let header_nbytes = u64::try_from(text.len()).unwrap();
    let file = [&header_nbytes.to_le_bytes()[..], text, b"x"].concat();
    let file_nbytes = u64::try_from(file.len()).unwrap();
    assert!(Header::parse(&file, file_nbytes, &Limits::default()).is_ok());
    for given in [8, 9, file.len() - 2] {
        let fault = Header::parse(&file[..given], file_nbytes, &Limits::default()).unwrap_err();
        let expected = FormatError::HeaderPastEnd {
            header_nbytes,
            file_nbytes: u64::try_from(given).unwrap(),
        };
        assert_eq!(fault, expected);
    }
}

#[test]
fn rejects_a_file_shorter_than_the_length_field() {
    let start = b"\x02\0\0\0\0\0\0\0{}";
    let fault = Header::head_nbytes(start, 7, &Limits::default()).unwrap_err();
    assert_eq!(fault, FormatError::TooShort { file_nbytes: 7 });
    assert_eq!(Header::head_nbytes(start, 10, &Limits::default()), Ok(10));
}

#[test]
fn json_alone_may_be_as_large_as_the_limit_and_its_data_would_begin_after_it() {
    let text = br#"{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}}"#;
    let nbytes = u64::try_from(text.len()).unwrap();
    let limits = |header_nbytes| Limits {
        header_nbytes,
        ..Limits::default()
    };
    let header = Header::parse_json(text, &limits(nbytes)).unwrap();
    assert_eq!((header.data_start(), header.data_nbytes()), (nbytes + 8, 3));
    let fault = Header::parse_json(text, &limits(nbytes - 1)).unwrap_err();
    let expected = FormatError::HeaderTooLarge {
        found: nbytes,
        limit: nbytes - 1,
    };
    assert_eq!(fault, expected);
}

#[test]
fn there_is_no_entry_after_the_last() {
    let text = br#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#;
    let header = Header::parse_json(text, &Limits::default()).unwrap();
    assert_eq!(header.entry(0).map(|entry| entry.name), Some("a"));
    assert_eq!(header.entry(1), None);
}

#[test]
fn invalid_utf8_has_its_position_in_the_file() {
    let file = b"\x05\0\0\0\0\0\0\0{\"a\xff\"";
    let fault = Header::parse(file, 13, &Limits::default()).unwrap_err();
    assert_eq!(fault, FormatError::InvalidUtf8 { position: 11 });
}

#[test]
fn the_error_for_nul_padding_names_it() {
    let reason = |text: &[u8]| {
        let head = [&u64::try_from(text.len()).unwrap().to_le_bytes()[..], text].concat();
        let file_nbytes = u64::try_from(head.len()).unwrap();
        Header::parse(&head, file_nbytes, &Limits::default())
            .unwrap_err()
            .to_string()
    };
    let hint = "padded with NUL, not spaces";
    assert!(reason(b"{}\0\0\0").contains(hint), "{}", reason(b"{}\0\0\0"));
    for text in [&b"{}x"[..], b"{]}", b"{\"a\"\0", b"{\"a\""] {
        let reason = reason(text);
        assert!(
            reason.contains("invalid JSON") && !reason.contains(hint),
            "{reason}"
        );
    }
}
