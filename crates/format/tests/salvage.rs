//! Results of [`Leniency::Salvage`] for headers that break rules.

use ingot_format::{Dtype, FormatError, Header, Leniency, Limits, Remedy, Spec, layout};
use proptest::prelude::*;

const LENIENT: Limits = Limits {
    header_nbytes: Limits::HEADER_NBYTES,
    leniency: Leniency::Salvage,
};

/// A file with this header and this many bytes of data.
fn file(header: &[u8], data_nbytes: usize) -> Vec<u8> {
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header);
    file.resize(file.len() + data_nbytes, 0);
    file
}

fn salvaged(json: &str, data_nbytes: usize) -> Result<Header, FormatError> {
    let file = file(json.as_bytes(), data_nbytes);
    Header::parse(&file, file.len() as u64, &LENIENT)
}

/// Returns the tensors with their ranges, the findings with their remedies, and the metadata.
fn contents(header: &Header) -> (Vec<String>, Vec<String>, Option<String>) {
    let tensors = header
        .entries()
        .map(|entry| format!("{} {}..{}", entry.name, entry.begin, entry.end));
    let findings = header.findings().iter().map(|found| {
        let tensor = found.fault.tensor().unwrap_or("-");
        format!("{} {tensor} {}", found.fault.code(), found.remedy.code())
    });
    let metadata = header.metadata().map(|metadata| {
        let pairs: Vec<String> = metadata
            .iter()
            .map(|(key, value)| format!("{key}={value}"))
            .collect();
        pairs.join(";")
    });
    (tensors.collect(), findings.collect(), metadata)
}

#[track_caller]
fn check(json: &str, data_nbytes: usize, tensors: &[&str], findings: &[&str]) {
    let header = salvaged(json, data_nbytes).expect("refused");
    let (found, said, _) = contents(&header);
    assert_eq!(
        (found.as_slice(), said.as_slice()),
        (&*strings(tensors), &*strings(findings))
    );
}

fn strings(texts: &[&str]) -> Vec<String> {
    texts.iter().map(|&text| text.into()).collect()
}

/// An entry of U8.
fn entry(name: &str, begin: u64, end: u64) -> String {
    let nbytes = end - begin;
    format!(r#""{name}":{{"dtype":"U8","shape":[{nbytes}],"data_offsets":[{begin},{end}]}}"#)
}

fn object(items: &[String]) -> String {
    format!("{{{}}}", items.join(","))
}

#[test]
fn a_sound_file_is_read_as_ever() {
    let json = object(&[entry("a", 0, 4), entry("b", 4, 8)]);
    check(&json, 8, &["a 0..4", "b 4..8"], &[]);
}

#[test]
fn bytes_of_no_tensor_are_passed_over() {
    let json = object(&[entry("a", 2, 4), entry("b", 6, 8)]);
    check(
        &json,
        11,
        &["a 2..4", "b 6..8"],
        &[
            "hole a bytes-left-out",
            "hole b bytes-left-out",
            "trailing-bytes - bytes-left-out",
        ],
    );
}

#[test]
fn a_truncated_file_keeps_its_complete_tensors() {
    let json = object(&[
        entry("a", 0, 4),
        entry("b", 4, 8),
        entry("c", 8, 12),
        entry("none", 12, 12),
    ]);
    check(
        &json,
        7,
        &["a 0..4", "none 4..4"],
        &[
            "truncated b tensor-left-out",
            "truncated c tensor-left-out",
            "truncated none rewritten",
        ],
    );
}

#[test]
fn tensors_that_share_bytes_are_left_out() {
    let json = object(&[entry("a", 0, 4), entry("b", 2, 6), entry("c", 6, 8)]);
    check(
        &json,
        8,
        &["c 6..8"],
        &["overlap b tensor-left-out", "overlap a tensor-left-out"],
    );
    // An entry that claims all bytes overlaps with each of the others.
    let json = object(&[entry("all", 0, 8), entry("b", 2, 6), entry("c", 6, 8)]);
    let (tensors, findings, _) = contents(&salvaged(&json, 8).unwrap());
    assert_eq!((tensors.len(), findings.len()), (0, 3));
}

#[test]
fn of_two_names_for_one_tensor_the_first_is_kept() {
    let json = object(&[entry("a", 0, 4), entry("b", 0, 4), entry("c", 4, 8)]);
    check(&json, 8, &["a 0..4", "c 4..8"], &["overlap b tensor-left-out"]);
}

#[test]
fn of_two_tensors_with_one_name_neither_is_kept_unless_they_say_the_same() {
    let json = object(&[entry("a", 0, 4), entry("a", 4, 8)]);
    check(&json, 8, &[], &["duplicate-tensor a tensor-left-out"]);
    let json = object(&[entry("a", 0, 4), entry("a", 0, 4)]);
    check(&json, 4, &["a 0..4"], &["duplicate-tensor a last-kept"]);
}

#[test]
fn an_entry_that_cannot_be_read_costs_no_other_and_its_bytes_are_no_hole() {
    for (broken, code) in [
        (
            r#"{"dtype":"F17","shape":[4],"data_offsets":[0,4]}"#,
            "unknown-dtype",
        ),
        (
            r#"{"dtype":"U8","shape":[-4],"data_offsets":[0,4]}"#,
            "invalid-entry",
        ),
        (r#"{"shape":[4],"data_offsets":[0,4]}"#, "missing-field"),
        (
            r#"{"dtype":"U8","dtype":"U8","shape":[4],"data_offsets":[0,4]}"#,
            "duplicate-field",
        ),
        (
            r#"{"dtype":"\ud800","shape":[4],"data_offsets":[0,4]}"#,
            "invalid-entry",
        ),
    ] {
        let json = object(&[format!(r#""a":{broken}"#), entry("b", 4, 8)]);
        check(&json, 8, &["b 4..8"], &[&format!("{code} a tensor-left-out")]);
    }
    // An entry without a valid claim leaves its bytes without a tensor.
    let json = object(&[r#""a":5"#.into(), entry("b", 4, 8)]);
    check(
        &json,
        8,
        &["b 4..8"],
        &["invalid-entry a tensor-left-out", "hole b bytes-left-out"],
    );
}

#[test]
fn a_range_that_does_not_fit_the_shape_is_left_out() {
    let json = object(&[
        r#""a":{"dtype":"U8","shape":[3],"data_offsets":[0,4]}"#.into(),
        r#""b":{"dtype":"U8","shape":[4],"data_offsets":[8,4]}"#.into(),
        r#""c":{"dtype":"F4","shape":[3],"data_offsets":[8,10]}"#.into(),
        entry("d", 10, 12),
    ]);
    check(
        &json,
        12,
        &["d 10..12"],
        &[
            "size-mismatch a tensor-left-out",
            "reversed-range b tensor-left-out",
            "partial-byte c tensor-left-out",
            // Between the end of the first and the beginning of the other.
            "hole b bytes-left-out",
        ],
    );
}

#[test]
fn a_tensor_without_bytes_is_sound_at_any_position() {
    let json = object(&[entry("a", 0, 4), entry("none", 2, 2), entry("b", 4, 8)]);
    check(
        &json,
        8,
        &["a 0..4", "none 4..4", "b 4..8"],
        &["overlap none rewritten"],
    );
    // If its position is right, only the other faults are reported.
    let json = object(&[entry("a", 0, 4), entry("none", 4, 4), entry("b", 4, 6)]);
    check(
        &json,
        8,
        &["a 0..4", "none 4..4", "b 4..6"],
        &["trailing-bytes - bytes-left-out"],
    );
}

#[test]
fn bytes_are_shared_with_the_first_of_those_that_reach_furthest() {
    let others = |items: &[String]| {
        let header = salvaged(&object(items), 10).unwrap();
        let findings = header.findings().iter().map(|found| match &found.fault {
            FormatError::Overlap { tensor, other, .. } => format!("{tensor} {other}"),
            fault => fault.code().to_owned(),
        });
        findings.collect::<Vec<_>>()
    };
    // The second ends after the first, and only the second overlaps the third.
    let items = [entry("a", 0, 4), entry("b", 2, 8), entry("c", 6, 10)];
    assert_eq!(others(&items), ["b a", "a b", "c b"]);
    // The second ends with the first.
    let items = [entry("a", 0, 8), entry("b", 2, 8), entry("c", 6, 10)];
    assert_eq!(others(&items), ["b a", "a b", "c a"]);
}

#[test]
fn metadata_that_is_no_text_becomes_text() {
    let json = format!(
        r#"{{"__metadata__":{{"n":5,"x":null,"list":[1, {{"k":"v"}}],"s":"\ud800","ok":"é"}},{}}}"#,
        entry("a", 0, 4)
    );
    let (tensors, findings, metadata) = contents(&salvaged(&json, 4).unwrap());
    assert_eq!(tensors, ["a 0..4"]);
    assert_eq!(findings, ["invalid-metadata - made-text"; 4]);
    assert_eq!(
        metadata.unwrap(),
        r#"n=5;x=null;list=[1, {"k":"v"}];s="\ud800";ok=é"#
    );
}

#[test]
fn metadata_other_than_an_object_is_left_out_and_null_is_no_metadata() {
    for (metadata, finding) in [
        ("[1]", "invalid-metadata - value-left-out"),
        ("\"text\"", "invalid-metadata - value-left-out"),
        ("null", "not-strict - rewritten"),
    ] {
        let json = format!(r#"{{"__metadata__":{metadata},{}}}"#, entry("a", 0, 4));
        let (tensors, findings, found) = contents(&salvaged(&json, 4).unwrap());
        assert_eq!(
            (tensors.as_slice(), findings.as_slice(), found),
            (&*strings(&["a 0..4"]), &*strings(&[finding]), None)
        );
    }
}

#[test]
fn the_last_of_several_values_counts() {
    let json = format!(
        r#"{{"__metadata__":{{"k":"1","j":"0","k":"2"}},{},"__metadata__":{{"k":"3"}}}}"#,
        entry("a", 0, 4)
    );
    let (_, findings, metadata) = contents(&salvaged(&json, 4).unwrap());
    assert_eq!(findings, ["duplicate-metadata-key - last-kept"; 2]);
    assert_eq!(metadata.unwrap(), "j=0;k=3");
    // Empty metadata is metadata.
    let json = format!(" {}", object(&[r#""__metadata__":{}"#.into()]));
    let (_, findings, metadata) = contents(&salvaged(&json, 0).unwrap());
    assert_eq!(
        (findings, metadata),
        (strings(&["not-strict - rewritten"]), Some(String::new()))
    );
}

#[test]
fn reports_harmless_deviations() {
    let json = format!(
        " {}\n",
        object(&[r#""a":{"dtype":"U8","shape":[4],"data_offsets":[0,4],"x":1}"#.into()])
    );
    check(&json, 4, &["a 0..4"], &["not-strict - rewritten"]);
}

#[test]
fn nul_counts_as_padding_and_invalid_utf8_is_replaced() {
    check(
        &format!("{}\0\0\0", object(&[entry("a", 0, 4)])),
        4,
        &["a 0..4"],
        &["invalid-json - rewritten"],
    );
    let padded = salvaged("{}\0\0\0", 0).unwrap();
    let reason = "padded with NUL, not spaces".to_owned();
    assert_eq!(padded.findings()[0].fault, FormatError::InvalidJson { reason });
    let mut header = format!(r#"{{"__metadata__":{{"k":"x"}},{}}}"#, entry("a", 0, 4)).into_bytes();
    let at = header.iter().position(|&byte| byte == b'x').unwrap();
    header[at] = 0xff;
    let file = file(&header, 4);
    let header = Header::parse(&file, file.len() as u64, &LENIENT).unwrap();
    let (tensors, findings, metadata) = contents(&header);
    assert_eq!(
        (tensors.as_slice(), metadata.unwrap()),
        (&*strings(&["a 0..4"]), "k=\u{fffd}".into())
    );
    assert_eq!(findings, ["invalid-utf8 - made-text"]);
    let position = 8 + at as u64;
    assert_eq!(header.findings()[0].fault, FormatError::InvalidUtf8 { position });
}

#[test]
fn json_that_ends_elsewhere_than_its_length_says_is_refused() {
    let json = object(&[entry("a", 0, 4)]);
    for (header, code) in [
        (&json[..json.len() - 1], "invalid-json"),
        (&format!("{json}x"), "invalid-json"),
        ("[]", "invalid-json"),
        ("5", "invalid-json"),
    ] {
        assert_eq!(salvaged(header, 4).unwrap_err().code(), code, "{header}");
    }
}

#[test]
fn left_out_tensors_are_found_by_name() {
    let header = salvaged(&object(&[entry("a", 0, 4), entry("b", 4, 8)]), 4).unwrap();
    assert!(header.left_out("a").is_none());
    assert_eq!(header.left_out("b").unwrap().code(), "truncated");
}

/// A `.bt` file of these tensors of U8, changed by `change` before the data of 8 bytes.
fn binary(change: impl FnOnce(&mut Vec<u8>)) -> Result<Header, FormatError> {
    let specs = [
        Spec {
            name: "a",
            dtype: Dtype::U8,
            shape: &[4],
        },
        Spec {
            name: "b",
            dtype: Dtype::U8,
            shape: &[4],
        },
    ];
    let laid_out = layout(&specs, Some(&[("k", "v")]), ingot_format::Format::Bintensors).unwrap();
    let mut head = laid_out.head[8..].to_vec();
    change(&mut head);
    let file = file(&head, 8);
    Header::parse(&file, file.len() as u64, &LENIENT)
}

#[test]
fn a_binary_header_is_salvaged_too() {
    let name = |head: &[u8], name: u8| head.iter().rposition(|&byte| byte == name).unwrap();
    let unknown = binary(|head| {
        let at = name(head, b'b');
        head[at + 1] = 200;
    });
    let (tensors, findings, _) = contents(&unknown.unwrap());
    assert_eq!(
        (tensors, findings),
        (
            strings(&["a 0..4"]),
            strings(&["unknown-dtype b tensor-left-out"])
        )
    );
    let padded = contents(&binary(|head| head.extend_from_slice(b"xx")).unwrap());
    assert_eq!(
        (padded.0.len(), padded.1),
        (2, strings(&["invalid-padding - rewritten"]))
    );
    let swapped = binary(|head| {
        let (a, b) = (name(head, b'a') - 1, name(head, b'b') - 1);
        let width = b - a;
        let (first, second) = head.split_at_mut(b);
        first[a..].swap_with_slice(&mut second[..width]);
    });
    let (tensors, findings, _) = contents(&swapped.unwrap());
    assert_eq!(
        (tensors.as_slice(), findings.len()),
        (&*strings(&["a 0..4", "b 4..8"]), 1)
    );
}

/// Entries that may be anything, in a file of up to 40 bytes.
fn items() -> impl Strategy<Value = Vec<String>> {
    let number = prop_oneof![4 => (0_u64..40).prop_map(|n| n.to_string()), 1 => Just("-1".into()), 1 => Just("18446744073709551615".into())];
    let broken = (
        "[a-d]",
        "U8|F32|F4|F17",
        proptest::collection::vec(number.clone(), 0..3),
        number.clone(),
        number,
    )
        .prop_map(|(name, dtype, dims, begin, end)| {
            format!(
                r#""{name}":{{"dtype":"{dtype}","shape":[{}],"data_offsets":[{begin},{end}]}}"#,
                dims.join(",")
            )
        });
    let sound =
        ("[a-f]", 0_u64..30, 0_u64..8).prop_map(|(name, begin, nbytes)| entry(&name, begin, begin + nbytes));
    let other = prop_oneof![
        Just(r#""__metadata__":{"k":"v","n":1}"#.into()),
        Just(r#""__metadata__":null"#.into()),
        Just(r#""x":[]"#.into())
    ];
    proptest::collection::vec(prop_oneof![4 => sound, 2 => broken, 1 => other], 0..7)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    /// The result keeps the promises of a header; a naive loop finds no other tensor that should have been kept.
    #[test]
    fn keeps_exactly_the_sound_tensors(items in items(), data_nbytes in 0_usize..40) {
        let json = object(&items);
        let header = salvaged(&json, data_nbytes).unwrap();
        let mut end = 0;
        for entry in header.entries() {
            prop_assert!(entry.begin >= end && entry.begin <= entry.end && entry.end <= data_nbytes as u64);
            prop_assert_eq!(ingot_format::nbytes(entry.dtype, entry.shape), Ok(entry.end - entry.begin));
            end = entry.end;
        }
        let strict = Header::parse(&file(json.as_bytes(), data_nbytes), (8 + json.len() + data_nbytes) as u64, &Limits { leniency: Leniency::Refuse, ..LENIENT });
        prop_assert_eq!(strict.is_ok(), header.findings().is_empty());
        // Every entry of this form with a unique name and a range that exists and overlaps no other is kept.
        let kept: Vec<&str> = header.names().collect();
        let claims: Vec<(u64, u64)> = items.iter().filter_map(|item| claim(item)).collect();
        for (name, begin, end) in &items.iter().filter_map(|item| naive(item)).collect::<Vec<_>>() {
            let once = items.iter().filter(|item| item.starts_with(&format!("\"{name}\":"))).count() == 1;
            let alone = claims.iter().filter(|other| other.0 < *end && *begin < other.1).count() == 1;
            if once && alone && begin < end && *end <= data_nbytes as u64 {
                prop_assert!(kept.contains(&name.as_str()), "{} of {}", name, json);
            }
        }
        for finding in header.findings() {
            if finding.remedy == Remedy::TensorLeftOut {
                prop_assert!(!kept.contains(&finding.fault.tensor().unwrap()));
            }
        }
    }

    #[test]
    fn no_bytes_make_it_panic(header in proptest::collection::vec(any::<u8>(), 0..60), data_nbytes in 0_usize..20) {
        let file = file(&header, data_nbytes);
        if let Ok(header) = Header::parse(&file, file.len() as u64, &LENIENT) {
            prop_assert!(header.entries().all(|entry| entry.end <= data_nbytes as u64));
        }
    }
}

/// Returns the byte range that an entry claims.
fn claim(item: &str) -> Option<(u64, u64)> {
    let (_, range) = item.split_once(r#""data_offsets":["#)?;
    let (begin, end) = range.strip_suffix("]}")?.split_once(',')?;
    Some((begin.parse().ok()?, end.parse().ok()?))
}

/// Returns name and range of an entry of U8 whose shape fits.
fn naive(item: &str) -> Option<(String, u64, u64)> {
    let name = item.get(1..2)?;
    let shape = item.strip_prefix(&format!(r#""{name}":{{"dtype":"U8","shape":["#))?;
    let nbytes: u64 = shape.split_once(']')?.0.parse().ok()?;
    let (begin, end) = claim(item)?;
    (begin.checked_add(nbytes) == Some(end)).then(|| (name.into(), begin, end))
}
