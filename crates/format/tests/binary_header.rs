//! The binary header, byte by byte: files that bintensors wrote, and one file for each way to break a rule.

use ingot_format::{Dtype, Entry, Format, FormatError, Header, Layout, Limits, Spec, layout, to_u64};

/// Returns a file with `header` and the correct length.
fn file(header: &[u8], data: &[u8]) -> Vec<u8> {
    [&to_u64(header.len()).to_le_bytes()[..], header, data].concat()
}

fn parse(file: &[u8]) -> Result<Header, FormatError> {
    Header::parse(file, to_u64(file.len()), &Limits::default())
}

/// The fault of a file whose header is `header` and whose data is `nbytes` long.
fn fault(header: &[u8], nbytes: usize) -> FormatError {
    parse(&file(header, &vec![0; nbytes])).expect_err("the header breaks a rule")
}

fn specs(header: &Header) -> Vec<Spec<'_>> {
    header
        .entries()
        .map(|entry| Spec {
            name: entry.name,
            dtype: entry.dtype,
            shape: entry.shape,
        })
        .collect()
}

/// Lays out the contents of `header` again.
fn again(header: &Header) -> Layout {
    let pairs: Option<Vec<_>> = header.metadata().map(|metadata| metadata.iter().collect());
    layout(&specs(header), pairs.as_deref(), Format::Bintensors).unwrap()
}

const ATTN: &[u8] = b"\x00\x01\x06attn.0\x0b\x03\x01\x02\x03\x00\x18";
const TEST: &[u8] = b"\x00\x01\x04test\x00\x02\x02\x02\x00\x04   ";

#[test]
fn reads_and_writes_the_files_of_the_specification() {
    for (header, data, name, dtype, shape) in [
        (ATTN, 24, "attn.0", Dtype::F32, &[1, 2, 3][..]),
        (TEST, 4, "test", Dtype::BOOL, &[2, 2]),
    ] {
        let file = file(header, &vec![0; data]);
        let parsed = parse(&file).unwrap();
        let entry = Entry {
            name,
            dtype,
            shape,
            begin: 0,
            end: to_u64(data),
        };
        assert_eq!(parsed.format(), Format::Bintensors);
        assert_eq!(parsed.metadata(), None);
        assert_eq!(parsed.entries().collect::<Vec<_>>(), [entry]);
        assert_eq!(again(&parsed).head, file[..file.len() - data]);
    }
}

#[test]
fn an_empty_file_is_a_header_of_eight_bytes() {
    let none = layout(&[], None, Format::Bintensors).unwrap();
    assert_eq!(none.head, b"\x08\0\0\0\0\0\0\0\0\0      ");
    let empty_metadata = layout(&[], Some(&[]), Format::Bintensors).unwrap();
    assert_eq!(empty_metadata.head, b"\x08\0\0\0\0\0\0\0\x01\0\0     ");
    for new in [none, empty_metadata] {
        let parsed = parse(&new.head).unwrap();
        assert!(parsed.is_empty());
        assert_eq!(parsed.metadata(), new.header.metadata());
    }
}

/// `golden/all_dtypes.bt`, as the bintensors 0.2.0 wheel wrote it: all its dtypes, sorted metadata, a scalar, an
/// empty tensor, names that are long, empty or not ASCII, and numbers of one and of three bytes.
#[test]
fn a_file_from_bintensors_comes_back_byte_for_byte() {
    let file = include_bytes!("golden/all_dtypes.bt");
    let parsed = parse(file).unwrap();
    let dtypes: std::collections::HashSet<_> = parsed.entries().map(|entry| entry.dtype).collect();
    assert_eq!(dtypes.len(), 15);
    let metadata: Vec<_> = parsed.metadata().unwrap().iter().collect();
    assert_eq!(metadata, [("", "x"), ("a", "é\n"), ("b", ""), ("format", "pt")]);
    assert_eq!(parsed.get("scalar").unwrap().shape, [0_u64; 0]);
    assert_eq!(parsed.get("empty").unwrap().nbytes(), 0);
    assert_eq!(parsed.get("größe.重み.🦀").unwrap().dtype, Dtype::BF16);
    let new = again(&parsed);
    assert_eq!(new.head, file[..new.head.len()]);
    // The file is the same in any order of the caller.
    let mut specs = specs(&parsed);
    specs.reverse();
    let pairs = [("format", "pt"), ("b", ""), ("a", "é\n"), ("", "x")];
    assert_eq!(
        layout(&specs, Some(&pairs), Format::Bintensors).unwrap().head,
        new.head
    );
}

#[test]
fn refuses_to_write_dtypes_that_the_format_lacks() {
    for dtype in Dtype::ALL
        .iter()
        .copied()
        .filter(|dtype| dtype.bintensors_number().is_none())
    {
        let spec = Spec {
            name: "w",
            dtype,
            shape: &[8],
        };
        let fault = layout(&[spec], None, Format::Bintensors).unwrap_err();
        assert_eq!((fault.code(), fault.tensor()), ("unsupported-dtype", Some("w")));
    }
}

#[test]
fn rejects_a_header_that_ends_early() {
    let metadata = b"\x01\x01\x01k\x01v\x01\x01w\x01\x01\x01\x00\x01";
    assert!(parse(&file(metadata, &[0])).is_ok());
    for (whole, nbytes) in [(ATTN, 24), (&metadata[..], 1)] {
        for end in 1..whole.len() {
            let fault = fault(&whole[..end], nbytes);
            assert_eq!(fault.code(), "unexpected-end", "{end}: {fault}");
        }
    }
}

#[test]
fn says_where_it_ends_counted_from_the_start_of_the_file() {
    let end = |position, reading| FormatError::UnexpectedEnd { position, reading };
    assert_eq!(fault(b"\x00", 0), end(9, "tensor count"));
    assert_eq!(fault(b"\x00\x01\x09abcdefg\x00", 0), end(10, "tensor name"));
    assert_eq!(fault(&ATTN[..10], 0), end(18, "rank"));
    assert_eq!(fault(&ATTN[..15], 0), end(23, "data range"));
    assert_eq!(fault(b"\x01\x02\x01k\x01", 0), end(9, "metadata count"));
}

/// Trusting such a number would take all memory.
#[test]
fn rejects_counts_that_the_header_cannot_hold() {
    let huge = b"\xfd\xff\xff\xff\xff\xff\xff\xff\xff";
    for before in [
        &b"\x00"[..],
        b"\x01",
        b"\x01\x01",
        b"\x01\x01\x01k",
        b"\x00\x01",
        b"\x00\x01\x01w\x01",
    ] {
        let fault = fault(&[before, huge, b"      "].concat(), 0);
        assert_eq!(fault.code(), "unexpected-end", "{before:?}: {fault}");
    }
}

/// Each of these headers fits into the file, and would take eight times its size in memory.
#[test]
fn rejects_headers_that_grow_too_large_in_memory() {
    const COUNT: u32 = 12_500_001;
    let count = [&[252][..], &COUNT.to_le_bytes()].concat();
    let dims = vec![1; 12_500_001];
    let with_dims = [b"\x00\x01\x01w\x01", &count[..], &dims, &[0, 1]].concat();
    let pairs = [&[1], &count[..], &dims, &dims, &[0]].concat();
    for header in [with_dims, pairs] {
        assert_eq!(fault(&header, 1).code(), "header-too-large");
    }
    let entries = [
        &[0, 252][..],
        &3_125_001_u32.to_le_bytes(),
        &vec![0; 5 * 3_125_001],
    ]
    .concat();
    assert_eq!(fault(&entries, 0).code(), "header-too-large");
    let shape = vec![1; 12_500_001];
    let spec = Spec {
        name: "w",
        dtype: Dtype::U8,
        shape: &shape,
    };
    let fault = layout(&[spec], None, Format::Bintensors).unwrap_err();
    assert_eq!(
        fault.code(),
        "header-too-large",
        "no file is written that is not read"
    );
}

#[test]
fn rejects_numbers_in_a_longer_form() {
    // 3 as a number of two bytes, for each number of the header in turn.
    for (header, position) in [
        (&b"\x00\xfb\x01\x00\x01w\x01\x00\x00\x01"[..], 9),
        (b"\x00\x01\xfb\x01\x00w\x01\x00\x00\x01", 10),
        (b"\x00\x01\x01w\xfb\x01\x00\x00\x00\x01", 12),
        (b"\x00\x01\x01w\x01\xfb\x00\x00\x00\x01", 13),
        (b"\x00\x01\x01w\x01\x01\xfc\x01\x00\x00\x00\x00\x01", 14),
        (b"\x00\x01\x01w\x01\x00\xfb\x00\x00\x01", 14),
        (
            b"\x00\x01\x01w\x01\x00\x00\xfd\x01\x00\x00\x00\x00\x00\x00\x00",
            15,
        ),
        (b"\x01\xfb\x00\x00\x00", 9),
    ] {
        assert_eq!(
            fault(header, 1),
            FormatError::InvalidVarint { position },
            "{header:?}"
        );
    }
}

#[test]
fn rejects_numbers_of_128_bits_and_reserved_tags() {
    for tag in [0xfe, 0xff] {
        let header = [&[0, tag, 1][..], &[0; 16]].concat();
        assert_eq!(fault(&header, 0), FormatError::InvalidVarint { position: 9 });
    }
}

#[test]
fn rejects_dtypes_without_a_name() {
    for (number, spelled) in [(&b"\x0f"[..], "15"), (b"\xfa", "250"), (b"\xfb\xfb\x00", "251")] {
        let header = [b"\x00\x01\x01w", number, b"\x00\x00\x01"].concat();
        let fault = fault(&header, 1);
        assert_eq!(
            fault,
            FormatError::UnknownDtype {
                tensor: "w".into(),
                dtype: spelled.into()
            }
        );
    }
}

#[test]
fn rejects_text_that_is_not_utf8() {
    for (header, position) in [
        (&b"\x00\x01\x02a\xff\x01\x00\x00\x01"[..], 12),
        (b"\x01\x01\x01\x80\x01v\x00", 11),
        (b"\x01\x01\x01k\x02\xc3(\x00", 13),
    ] {
        assert_eq!(
            fault(header, 1),
            FormatError::InvalidUtf8 { position },
            "{header:?}"
        );
    }
    // A character cut in two is not text, even if its halves are in adjacent names.
    let header = b"\x00\x02\x01\xc3\x01\x00\x00\x01\x01\xa9\x01\x00\x01\x02";
    assert_eq!(fault(header, 2), FormatError::InvalidUtf8 { position: 11 });
}

#[test]
fn rejects_two_tensors_with_one_name() {
    let header = b"\x00\x03\x01w\x01\x00\x00\x01\x01a\x01\x00\x01\x02\x01w\x01\x00\x02\x03";
    assert_eq!(
        fault(header, 3),
        FormatError::DuplicateTensor { tensor: "w".into() }
    );
}

#[test]
fn rejects_a_metadata_key_twice() {
    let header = b"\x01\x03\x01k\x01v\x01a\x00\x01k\x01v\x00";
    assert_eq!(
        fault(header, 0),
        FormatError::DuplicateMetadataKey { key: "k".into() }
    );
}

#[test]
fn rejects_tensors_out_of_the_order_of_their_data() {
    let header = b"\x00\x02\x01a\x01\x00\x01\x02\x01b\x01\x00\x00\x01";
    assert_eq!(fault(header, 2).code(), "hole");
}

#[test]
fn accepts_up_to_seven_spaces_after_the_last_entry() {
    for spaces in 0..=8 {
        let header = [&b"\x00\x00"[..], &vec![b' '; spaces]].concat();
        match parse(&file(&header, &[])) {
            Ok(parsed) => assert!(parsed.is_empty() && spaces <= 7),
            Err(fault) => {
                assert_eq!(fault, FormatError::InvalidPadding { position: 17 });
                assert_eq!(spaces, 8);
            }
        }
    }
}

#[test]
fn rejects_bytes_hidden_after_the_last_entry() {
    assert_eq!(
        fault(b"\x00\x00  \x00   ", 0),
        FormatError::InvalidPadding { position: 12 }
    );
    assert_eq!(
        fault(&[&b"\x00\x00"[..], &[b'x'; 2000]].concat(), 0),
        FormatError::InvalidPadding { position: 10 }
    );
}
