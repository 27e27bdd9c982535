//! Compares our codecs with the crates `safetensors` 0.8.0 and `bintensors` 0.1.1 (the Python wheel 0.2.0).
//!
//! Both write the same bytes, and agree on every file that both read. We read no file that upstream rejects; files that
//! upstream reads and we reject are listed in [`STRICTER`] with the reason.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::panic::catch_unwind;

use ingot_format::{Dtype, Format, FormatError, Header, Limits, Spec, layout, nbytes, to_u64, to_usize};
use proptest::prelude::*;
use proptest::sample::{Index, select};

/// A fault that we report in a file that upstream reads.
struct Stricter {
    format: Format,
    code: &'static str,
    reason: &'static str,
    /// A header with this fault.
    header: &'static [u8],
    data_nbytes: usize,
}

const STRICTER: &[Stricter] = &[
    Stricter {
        format: Format::Safetensors,
        code: "duplicate-tensor",
        reason: "upstream keeps the last of them, so the file means one thing here and another there",
        header: br#"{"a":{"dtype":"U8","shape":[9],"data_offsets":[3,9]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#,
        data_nbytes: 1,
    },
    Stricter {
        format: Format::Safetensors,
        code: "duplicate-metadata-key",
        reason: "upstream keeps the last of them",
        header: br#"{"__metadata__":{"a":"1","\u0061":"2"}}"#,
        data_nbytes: 0,
    },
    Stricter {
        format: Format::Safetensors,
        code: "invalid-entry",
        reason: "upstream takes an array for an entry and an object for a dtype, which no specification allows",
        header: br#"{"a":["U8",[1],[0,1]],"b":{"dtype":{"U8":null},"shape":[1],"data_offsets":[1,2]}}"#,
        data_nbytes: 2,
    },
    Stricter {
        format: Format::Safetensors,
        code: "size-overflow",
        reason: "upstream lets a zero hide an overflow of the dimensions, but only if it stands before them",
        header: br#"{"a":{"dtype":"U8","shape":[0,4294967296,4294967296],"data_offsets":[0,0]}}"#,
        data_nbytes: 0,
    },
    Stricter {
        format: Format::Bintensors,
        code: "duplicate-metadata-key",
        reason: "upstream keeps the last of them",
        header: b"\x01\x02\x01a\x011\x01a\x012\x00",
        data_nbytes: 0,
    },
    Stricter {
        format: Format::Bintensors,
        code: "invalid-varint",
        reason: "a number in a longer form gives a second file for the same tensors, with another hash",
        header: b"\x00\xfb\x00\x00",
        data_nbytes: 0,
    },
    Stricter {
        format: Format::Bintensors,
        code: "invalid-padding",
        reason: "upstream skips whatever follows the last entry, so anything can be hidden there",
        header: b"\x00\x00hidden",
        data_nbytes: 0,
    },
    Stricter {
        format: Format::Bintensors,
        code: "size-overflow",
        reason: "as in safetensors",
        header: b"\x00\x01\x01a\x01\x03\x00\xfd\0\0\0\0\x01\0\0\0\xfd\0\0\0\0\x01\0\0\0\x00\x00",
        data_nbytes: 0,
    },
];

/// The contents of a header: the entries in data order, and the metadata.
#[derive(Debug, PartialEq)]
struct Contents {
    entries: Vec<Place>,
    metadata: Option<BTreeMap<String, String>>,
}

/// Range first, for sorting: empty tensors at one position have no other order.
type Place = (u64, u64, String, String, Vec<u64>);

impl Contents {
    fn of(header: &Header) -> Contents {
        let mut entries: Vec<Place> = header
            .entries()
            .map(|entry| {
                let code = entry.dtype.code().to_owned();
                (
                    entry.begin,
                    entry.end,
                    entry.name.to_owned(),
                    code,
                    entry.shape.to_vec(),
                )
            })
            .collect();
        entries.sort();
        let owned = |(key, value): (&str, &str)| (key.to_owned(), value.to_owned());
        let metadata = header
            .metadata()
            .map(|metadata| metadata.iter().map(owned).collect());
        Contents { entries, metadata }
    }
}

/// Both crates have the same metadata, but in different types.
macro_rules! upstream_contents {
    ($metadata:expr) => {{
        let metadata = $metadata;
        let mut entries: Vec<Place> = metadata
            .tensors()
            .into_iter()
            .map(|(name, info)| {
                let (begin, end) = info.data_offsets;
                let shape = info.shape.iter().copied().map(to_u64).collect();
                (
                    to_u64(begin),
                    to_u64(end),
                    name,
                    format!("{:?}", info.dtype),
                    shape,
                )
            })
            .collect();
        entries.sort();
        let metadata = metadata
            .metadata()
            .clone()
            .map(|metadata| metadata.into_iter().collect());
        Contents { entries, metadata }
    }};
}

/// Returns the contents that upstream reads; `None` if it rejects the file. It adds sizes unchecked, and panics if that
/// overflows.
fn upstream(file: &[u8], format: Format) -> Option<Contents> {
    match format {
        Format::Safetensors => catch_unwind(|| safetensors::SafeTensors::read_metadata(file))
            .ok()?
            .ok()
            .map(|(_, metadata)| upstream_contents!(metadata)),
        Format::Bintensors => catch_unwind(|| bintensors::BinTensors::read_metadata(file))
            .ok()?
            .ok()
            .map(|(_, metadata)| upstream_contents!(metadata)),
    }
}

fn ours(file: &[u8]) -> Result<Header, FormatError> {
    Header::parse(file, to_u64(file.len()), &Limits::default()).map_err(|fault| match fault {
        FormatError::Foreign { fault, .. } => *fault,
        fault => fault,
    })
}

/// Returns a file with `header` and the correct length.
fn file(header: &[u8], data_nbytes: usize) -> Vec<u8> {
    [
        &to_u64(header.len()).to_le_bytes()[..],
        header,
        &vec![0; data_nbytes],
    ]
    .concat()
}

/// Checks that both sides agree on `file`, a damaged file of `format`, or differ as [`STRICTER`] allows.
fn agree(file: &[u8], format: Format) -> Result<(), TestCaseError> {
    let upstream = upstream(file, format);
    match ours(file) {
        // Damage can turn a header of one format into one of the other; no file may be both.
        Ok(header) if header.format() != format => {
            prop_assert_eq!(upstream, None);
            prop_assert_eq!(Some(Contents::of(&header)), self::upstream(file, header.format()));
        }
        Ok(header) => prop_assert_eq!(Some(Contents::of(&header)), upstream),
        Err(fault) => {
            let listed = STRICTER
                .iter()
                .any(|row| row.format == format && row.code == fault.code());
            prop_assert!(
                listed || upstream.is_none(),
                "upstream reads {upstream:?}, we say {fault}"
            );
        }
    }
    Ok(())
}

#[test]
fn every_listed_difference_is_there() {
    for row in STRICTER {
        let file = file(row.header, row.data_nbytes);
        let fault = ours(&file).expect_err(row.reason);
        assert_eq!(fault.code(), row.code, "{fault}");
        assert!(
            upstream(&file, row.format).is_some(),
            "upstream refuses {}: the row can go",
            row.code
        );
    }
}

/// A tensor to be written. All of its bytes are its length.
#[derive(Clone, Debug)]
struct Tensor {
    name: String,
    dtype: Dtype,
    shape: Vec<u64>,
    upstream_shape: Vec<usize>,
    data: Vec<u8>,
}

impl Tensor {
    fn new(name: String, dtype: Dtype, mut shape: Vec<u64>) -> Tensor {
        if nbytes(dtype, &shape).is_err() {
            // A multiple of 8 elements fills whole bytes for each packed dtype.
            shape.push(8);
        }
        let len = to_usize(nbytes(dtype, &shape).unwrap()).unwrap();
        Tensor {
            name,
            dtype,
            upstream_shape: shape.iter().map(|&dim| to_usize(dim).unwrap()).collect(),
            shape,
            data: vec![len.to_le_bytes()[0]; len],
        }
    }

    fn spec(&self) -> Spec<'_> {
        Spec {
            name: &self.name,
            dtype: self.dtype,
            shape: &self.shape,
        }
    }
}

impl safetensors::View for &Tensor {
    fn dtype(&self) -> safetensors::Dtype {
        serde_json::from_value(self.dtype.code().into()).unwrap()
    }
    fn shape(&self) -> &[usize] {
        &self.upstream_shape
    }
    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.data)
    }
    fn data_len(&self) -> usize {
        self.data.len()
    }
}

impl bintensors::View for &Tensor {
    fn dtype(&self) -> bintensors::Dtype {
        use bintensors::Dtype::*;
        const BY_NUMBER: [bintensors::Dtype; 15] = [
            BOOL, U8, I8, F8_E5M2, F8_E4M3, I16, U16, F16, BF16, I32, U32, F32, F64, I64, U64,
        ];
        BY_NUMBER[usize::from(self.dtype.bintensors_number().unwrap())]
    }
    fn shape(&self) -> &[usize] {
        &self.upstream_shape
    }
    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.data)
    }
    fn data_len(&self) -> usize {
        self.data.len()
    }
}

type Pairs = Option<BTreeMap<String, String>>;

fn metadata() -> impl Strategy<Value = Pairs> {
    proptest::option::of(proptest::collection::btree_map(
        "\\PC{0,6}",
        any::<String>(),
        0..4,
    ))
}

fn tensors(format: Format) -> impl Strategy<Value = Vec<Tensor>> {
    let dtypes: Vec<Dtype> = Dtype::ALL
        .iter()
        .copied()
        .filter(|dtype| format == Format::Safetensors || dtype.bintensors_number().is_some())
        .collect();
    let shape = proptest::collection::vec(prop_oneof![4 => 0_u64..5, 1 => 250_u64..300], 0..3);
    let name = prop_oneof!["[a-c.]{0,4}", any::<String>(), "x{245,255}"];
    proptest::collection::vec((name, select(dtypes), shape), 0..8).prop_map(|specs| {
        let mut names = HashSet::new();
        specs
            .into_iter()
            .filter(|(name, ..)| name != ingot_format::METADATA_KEY && names.insert(name.clone()))
            .map(|(name, dtype, shape)| Tensor::new(name, dtype, shape))
            .collect()
    })
}

/// Returns the file that we write.
fn written(tensors: &[Tensor], metadata: &Pairs, format: Format) -> (Header, Vec<u8>) {
    let specs: Vec<_> = tensors.iter().map(Tensor::spec).collect();
    let pairs: Option<Vec<_>> = metadata
        .as_ref()
        .map(|pairs| pairs.iter().map(|(key, value)| (&**key, &**value)).collect());
    let new = layout(&specs, pairs.as_deref(), format).unwrap();
    let mut file = new.head;
    for &number in &new.order {
        file.extend_from_slice(&tensors[number].data);
    }
    (new.header, file)
}

/// Upstream's JSON for no tensors and empty metadata is `{},"__metadata__":{}}`, which it cannot read itself.
fn upstream_breaks(tensors: &[Tensor], metadata: &Pairs) -> bool {
    tensors.is_empty() && metadata.as_ref().is_some_and(BTreeMap::is_empty)
}

#[test]
fn upstream_writes_a_broken_file_where_we_write_a_right_one() {
    let none: [(&str, &Tensor); 0] = [];
    let theirs = safetensors::serialize(none, Some(HashMap::new())).unwrap();
    assert_eq!(
        upstream(&theirs, Format::Safetensors),
        None,
        "the exception can go"
    );
    let (_, file) = written(&[], &Some(BTreeMap::new()), Format::Safetensors);
    let contents = Contents {
        entries: Vec::new(),
        metadata: Some(BTreeMap::new()),
    };
    assert_eq!(upstream(&file, Format::Safetensors), Some(contents));
}

fn writes_the_same(tensors: &[Tensor], metadata: Pairs, format: Format) -> Result<(), TestCaseError> {
    prop_assume!(format == Format::Bintensors || !upstream_breaks(tensors, &metadata));
    let (header, file) = written(tensors, &metadata, format);
    let upstream_metadata = metadata.clone().map(HashMap::from_iter);
    let named = || tensors.iter().map(|tensor| (&tensor.name, tensor));
    let upstream_file = match format {
        Format::Safetensors => safetensors::serialize(named(), upstream_metadata).unwrap(),
        Format::Bintensors => bintensors::serialize(named(), &upstream_metadata).unwrap(),
    };
    let contents = Contents::of(&header);
    prop_assert_eq!(&contents.metadata, &metadata);
    // safetensors writes several metadata keys in an order that changes from run to run.
    if format == Format::Bintensors || metadata.is_none_or(|pairs| pairs.len() < 2) {
        prop_assert_eq!(&file, &upstream_file);
    }
    prop_assert_eq!(&Contents::of(&ours(&file).unwrap()), &contents);
    prop_assert_eq!(&Contents::of(&ours(&upstream_file).unwrap()), &contents);
    prop_assert_eq!(upstream(&file, format), Some(contents));
    Ok(())
}

/// Damage to the bytes of a header.
#[derive(Clone, Debug)]
enum Damage {
    Change(Index, u8),
    Remove(Index, usize),
    Repeat(Index, usize),
    Insert(Index, &'static [u8]),
}

fn damage() -> impl Strategy<Value = Damage> {
    const PIECES: &[&[u8]] = &[
        b"\"__metadata__\":{},",
        b"\"\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]},",
        b"\"x\":null,",
        b"null",
        b"[0]",
        b"{}",
        b"-0",
        b"1e2",
        b"0",
        b"18446744073709551615",
        b"18446744073709551616",
        b"\\u0061",
        b"\\ud800",
        b"\xff",
        b"\xc3\xa9",
        b"\n",
        b" ",
        b"\0",
        b"\xfb\x01\x00",
        b"\xfd\x00\x00\x00\x00\x01\x00\x00\x00",
        b"\xfd\xff\xff\xff\xff\xff\xff\xff\xff",
    ];
    prop_oneof![
        (any::<Index>(), any::<u8>()).prop_map(|(at, byte)| Damage::Change(at, byte)),
        (any::<Index>(), 1_usize..40).prop_map(|(at, len)| Damage::Remove(at, len)),
        (any::<Index>(), 1_usize..90).prop_map(|(at, len)| Damage::Repeat(at, len)),
        (any::<Index>(), select(PIECES)).prop_map(|(at, piece)| Damage::Insert(at, piece)),
    ]
}

fn damaged(header: &[u8], damages: &[Damage]) -> Vec<u8> {
    let mut header = header.to_vec();
    for damage in damages {
        // One past the end is allowed, for insertions.
        let at = |place: &Index| place.index(header.len() + 1);
        match damage {
            Damage::Change(place, byte) => {
                let at = at(place);
                header.splice(at..(at + 1).min(header.len()), [*byte]);
            }
            Damage::Remove(place, len) => {
                let at = at(place);
                header.drain(at..(at + len).min(header.len()));
            }
            Damage::Repeat(place, len) => {
                let at = at(place);
                let piece = header[at..(at + len).min(header.len())].to_vec();
                header.splice(at..at, piece);
            }
            Damage::Insert(place, piece) => {
                let at = at(place);
                header.splice(at..at, piece.iter().copied());
            }
        }
    }
    header
}

/// The style in which an entry of a JSON header is written.
#[derive(Clone, Copy, Debug)]
enum Style {
    Usual,
    Reordered,
    Spaced,
    Escaped,
    WithUnknownField,
    WithFieldTwice,
    AsArray,
    WithDtypeAsObject,
}

fn json_entry(tensor: &Tensor, begin: usize, style: Style) -> String {
    let mut name = serde_json::to_string(&tensor.name).unwrap();
    if let Style::Escaped = style {
        name = name.replace('a', "\\u0061").replace('.', "\\u002E");
    }
    let dtype = tensor.dtype.code();
    let shape = format!("{:?}", tensor.shape).replace(' ', "");
    let range = format!("[{begin},{}]", begin + tensor.data.len());
    match style {
        Style::Usual | Style::Escaped => {
            format!("{name}:{{\"dtype\":\"{dtype}\",\"shape\":{shape},\"data_offsets\":{range}}}")
        }
        Style::Reordered => {
            format!("{name}:{{\"data_offsets\":{range},\"shape\":{shape},\"dtype\":\"{dtype}\"}}")
        }
        Style::Spaced => {
            format!(
                " {name} :\t{{\"dtype\": \"{dtype}\",\n\"shape\": {shape} , \"data_offsets\":{range}\r}} "
            )
        }
        Style::WithUnknownField => format!(
            "{name}:{{\"dtype\":\"{dtype}\",\"x\":[{{}},1.5],\"shape\":{shape},\"data_offsets\":{range}}}"
        ),
        Style::WithFieldTwice => format!(
            "{name}:{{\"dtype\":\"{dtype}\",\"shape\":{shape},\"shape\":{shape},\"data_offsets\":{range}}}"
        ),
        Style::AsArray => format!("{name}:[\"{dtype}\",{shape},{range}]"),
        Style::WithDtypeAsObject => {
            format!("{name}:{{\"dtype\":{{\"{dtype}\":null}},\"shape\":{shape},\"data_offsets\":{range}}}")
        }
    }
}

/// JSON headers as other writers might write them, and the size of their data: in any order and style, some with a
/// duplicate name.
fn json_header() -> impl Strategy<Value = (String, usize)> {
    use Style::*;
    let style = prop_oneof![
        12 => Just(Usual),
        4 => select(&[Reordered, Spaced, Escaped, WithUnknownField][..]),
        1 => select(&[WithFieldTwice, AsArray, WithDtypeAsObject][..]),
    ];
    let metadata = prop_oneof![
        4 => Just(None),
        1 => select(&["null", "{}", "{\"a\":\"b\"}", "{\"a\":\"b\",\"a\":\"c\"}", "{\"a\":1}", "[]"][..]).prop_map(Some),
    ];
    let entry = (
        "[a-d.é]{0,3}",
        select(Dtype::ALL),
        proptest::collection::vec(0_u64..4, 0..3),
        style,
    );
    (proptest::collection::vec((entry, any::<Index>()), 0..6), metadata).prop_map(|(entries, metadata)| {
        let mut pieces = Vec::new();
        let mut begin = 0;
        for ((name, dtype, shape, style), place) in entries {
            let tensor = Tensor::new(name, dtype, shape);
            let at = place.index(pieces.len() + 1);
            pieces.insert(at, json_entry(&tensor, begin, style));
            begin += tensor.data.len();
        }
        pieces.extend(metadata.map(|metadata| format!("\"__metadata__\":{metadata}")));
        (format!("{{{}}}", pieces.join(",")), begin)
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn safetensors_are_written_the_same(tensors in tensors(Format::Safetensors), metadata in metadata()) {
        writes_the_same(&tensors, metadata, Format::Safetensors)?;
    }

    #[test]
    fn bintensors_are_written_the_same(tensors in tensors(Format::Bintensors), metadata in metadata()) {
        writes_the_same(&tensors, metadata, Format::Bintensors)?;
    }

    #[test]
    fn unusual_json_headers_are_read_the_same((header, data_nbytes) in json_header()) {
        agree(&file(header.as_bytes(), data_nbytes), Format::Safetensors)?;
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    #[test]
    fn damaged_json_headers_are_read_the_same(
        (header, data_nbytes) in json_header(),
        damages in proptest::collection::vec(damage(), 1..3),
    ) {
        agree(&file(&damaged(header.as_bytes(), &damages), data_nbytes), Format::Safetensors)?;
    }

    #[test]
    fn damaged_binary_headers_are_read_the_same(
        tensors in tensors(Format::Bintensors),
        metadata in metadata(),
        damages in proptest::collection::vec(damage(), 1..3),
    ) {
        let (header, whole) = written(&tensors, &metadata, Format::Bintensors);
        let data_start = to_usize(header.data_start()).unwrap();
        let bytes = damaged(&whole[8..data_start], &damages);
        agree(&file(&bytes, whole.len() - data_start), Format::Bintensors)?;
    }
}
