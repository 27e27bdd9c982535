//! What a reader is told that gives fewer bytes of a file than its header has.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use ingot_format::{FormatError, Header, Limits};

#[test]
fn a_header_that_was_not_given_whole_is_told_with_its_size_and_what_was_given() {
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
