//! Every vector of `tests/vectors` through [`Header::parse`] and [`layout()`], and the vectors against FORMAT.md.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use ingot_format::{Dtype, Format, Header, Leniency, Limits, Spec, layout};
use toml::{Table, Value};

const FORMAT_MD: &str = include_str!("../FORMAT.md");
const ERROR_RS: &str = include_str!("../src/error.rs");

/// The tables of this kind in all files, each with its location.
fn tables(kind: &str) -> Vec<(String, Table)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/vectors");
    let mut paths: Vec<_> = fs::read_dir(folder)
        .unwrap()
        .map(|file| file.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "toml"))
        .collect();
    paths.sort();
    let mut all = Vec::new();
    for path in paths {
        let file = path.file_name().unwrap().to_string_lossy().into_owned();
        let mut table: Table = fs::read_to_string(&path)
            .unwrap()
            .parse()
            .unwrap_or_else(|fault| panic!("{file}: {fault}"));
        if let Some(Value::Array(cases)) = table.remove(kind) {
            for case in cases {
                let Value::Table(case) = case else {
                    panic!("{file}: a {kind} is no table")
                };
                all.push((format!("{file}, {}", text(&case, "name").unwrap()), case));
            }
        }
    }
    all
}

fn text<'a>(case: &'a Table, key: &str) -> Option<&'a str> {
    case.get(key)
        .map(|value| value.as_str().unwrap_or_else(|| panic!("{key} is no string")))
}

/// Hexadecimal digits with white space anywhere; text between single quotes is taken as bytes.
fn hex(text: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (number, part) in text.split('\'').enumerate() {
        if number % 2 == 1 {
            bytes.extend_from_slice(part.as_bytes());
        } else {
            let digits: Vec<char> = part.chars().filter(|c| !c.is_whitespace()).collect();
            for pair in digits.chunks(2) {
                bytes.push(u8::from_str_radix(&pair.iter().collect::<String>(), 16).unwrap());
            }
        }
    }
    bytes
}

fn header_bytes(case: &Table) -> Vec<u8> {
    if let Some(header) = text(case, "header") {
        return header.into();
    }
    if let Some(header) = text(case, "header_hex") {
        return hex(header);
    }
    let mut bytes = Vec::new();
    for piece in case["header_repeat"].as_array().unwrap() {
        let piece = piece.as_array().unwrap();
        let times = usize::try_from(piece[1].as_integer().unwrap()).unwrap();
        bytes.extend_from_slice(piece[0].as_str().unwrap().repeat(times).as_bytes());
    }
    bytes
}

/// The whole file that a vector describes.
fn file_bytes(case: &Table) -> Vec<u8> {
    if let Some(file) = text(case, "file") {
        return file.into();
    }
    if let Some(file) = text(case, "file_hex") {
        return hex(file);
    }
    let header = header_bytes(case);
    let mut bytes = match case.get("length_prefix") {
        None => u64::try_from(header.len()).unwrap().to_le_bytes().to_vec(),
        Some(Value::String(prefix)) => hex(prefix),
        Some(prefix) => u64::try_from(prefix.as_integer().unwrap())
            .unwrap()
            .to_le_bytes()
            .to_vec(),
    };
    bytes.extend(header);
    bytes.extend(hex(text(case, "data_hex").unwrap_or_default()));
    if let Some(nbytes) = case.get("data_nbytes") {
        bytes.resize(
            bytes.len() + usize::try_from(nbytes.as_integer().unwrap()).unwrap(),
            0,
        );
    }
    bytes
}

fn format(case: &Table) -> Format {
    match text(case, "format").unwrap_or("safetensors") {
        "safetensors" => Format::Safetensors,
        "bintensors" => Format::Bintensors,
        other => panic!("no format {other}"),
    }
}

/// The outcome in the form of a vector: the code of the fault, or the header.
fn verdict(case: &Table, leniency: Leniency) -> Result<Header, &'static str> {
    let mut limits = Limits {
        leniency,
        ..Limits::default()
    };
    if let Some(limit) = case.get("limit") {
        limits.header_nbytes = u64::try_from(limit.as_integer().unwrap()).unwrap();
    }
    let file = file_bytes(case);
    let file_nbytes = u64::try_from(file.len()).unwrap();
    let whole = Header::parse(&file, file_nbytes, &limits);
    // A file is read in two steps; the first has only the length. The verdict must be the same.
    if let Ok(head_nbytes) = Header::head_nbytes(&file[..8.min(file.len())], file_nbytes, &limits) {
        let head = &file[..usize::try_from(head_nbytes).unwrap()];
        let fault = Header::parse(head, file_nbytes, &limits).err();
        assert_eq!(
            fault,
            whole.clone().err(),
            "the verdict differs when only the header is at hand"
        );
    }
    whole.map_err(|fault| {
        assert!(!fault.to_string().is_empty());
        fault.code()
    })
}

/// A tensor's name, dtype, shape, begin and end.
type Row = (String, String, Vec<i64>, i64, i64);

fn expected_tensors(case: &Table) -> Option<Vec<Row>> {
    let integers = |value: &Value| -> Vec<i64> {
        value
            .as_array()
            .unwrap()
            .iter()
            .map(|dim| dim.as_integer().unwrap())
            .collect()
    };
    Some(
        case.get("tensors")?
            .as_array()
            .unwrap()
            .iter()
            .map(|row| {
                let row = row.as_array().unwrap();
                let word = |at: usize| row[at].as_str().unwrap().to_owned();
                (
                    word(0),
                    word(1),
                    integers(&row[2]),
                    row[3].as_integer().unwrap(),
                    row[4].as_integer().unwrap(),
                )
            })
            .collect(),
    )
}

fn found_tensors(header: &Header) -> Vec<Row> {
    let signed = |n: u64| i64::try_from(n).unwrap();
    header
        .entries()
        .map(|entry| {
            (
                entry.name.to_owned(),
                entry.dtype.code().to_owned(),
                entry.shape.iter().map(|&dim| signed(dim)).collect(),
                signed(entry.begin),
                signed(entry.end),
            )
        })
        .collect()
}

fn expected_metadata(case: &Table) -> Option<BTreeMap<&str, &str>> {
    let pairs = case.get("metadata")?.as_table().unwrap();
    Some(
        pairs
            .iter()
            .map(|(key, value)| (key.as_str(), value.as_str().unwrap()))
            .collect(),
    )
}

/// Returns the difference from the expected outcome, if there is one.
fn disagreement(case: &Table) -> Option<String> {
    let expect = text(case, "expect").unwrap();
    let header = match (expect, verdict(case, Leniency::Accept)) {
        ("accept", Ok(header)) => header,
        ("reject", Err(code)) if Some(code) == text(case, "code") => {
            // A strict reader reports the same rule, unless it finds a harmless deviation first.
            let strict = verdict(case, Leniency::Refuse).err();
            return (strict != Some(code)).then(|| format!("strict: {strict:?}"));
        }
        (_, found) => return Some(format!("expected {expect}, found {:?}", found.map(|_| "accept"))),
    };
    assert_eq!(
        text(case, "code"),
        None,
        "an accepted file has no code, or `expect` is wrong"
    );
    let strict = verdict(case, Leniency::Refuse).err();
    let expected = (text(case, "strict") == Some("reject")).then_some("not-strict");
    if strict != expected {
        return Some(format!("strict: expected {expected:?}, found {strict:?}"));
    }
    if header.format() != format(case) {
        return Some(format!("taken for {}", header.format()));
    }
    let found = found_tensors(&header);
    if expected_tensors(case).is_some_and(|expected| expected != found) {
        return Some(format!("found {found:?}"));
    }
    let metadata = header.metadata().map(|metadata| metadata.iter().collect());
    if case.contains_key("metadata") && expected_metadata(case) != metadata {
        return Some(format!("found the metadata {metadata:?}"));
    }
    None
}

#[test]
fn every_vector_gets_its_verdict() {
    let vectors = tables("vector");
    assert!(vectors.len() >= 150, "only {} vectors", vectors.len());
    let wrong: Vec<String> = vectors
        .iter()
        .filter_map(|(place, case)| Some(format!("{place}: {}", disagreement(case)?)))
        .collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn no_file_is_accepted_when_it_ends_earlier_or_later() {
    for (place, case) in tables("vector") {
        let file = file_bytes(&case);
        let parse = |file: &[u8]| Header::parse(file, u64::try_from(file.len()).unwrap(), &Limits::default());
        if text(&case, "expect") == Some("reject") || parse(&file).is_err() || file.len() > 2000 {
            continue;
        }
        for nbytes in 0..file.len() {
            let code = parse(&file[..nbytes]).map_err(|fault| fault.code()).err();
            let expected = ["too-short", "header-past-end", "truncated"];
            assert!(
                code.is_some_and(|code| expected.contains(&code)),
                "{place}, {nbytes} bytes of it: {code:?}"
            );
        }
        let longer = parse(&[&file[..], b"\0"].concat());
        assert_eq!(
            longer.err().map(|fault| fault.code()),
            Some("trailing-bytes"),
            "{place}"
        );
    }
}

#[test]
fn every_vector_has_a_name_of_its_own_and_known_keys() {
    const KEYS: &str = "name rule format header header_hex header_repeat length_prefix data_hex data_nbytes file \
                        file_hex limit expect code strict tensors metadata upstream note";
    let mut names = BTreeSet::new();
    for (place, case) in tables("vector") {
        assert!(names.insert(text(&case, "name").unwrap().to_owned()), "{place}");
        for key in case.keys() {
            assert!(KEYS.split(' ').any(|known| known == key), "{place}: key {key}");
        }
        let upstream = text(&case, "upstream");
        assert!(
            matches!(upstream, Some("accept" | "reject")),
            "{place}: upstream {upstream:?}"
        );
    }
}

/// The request of a vector to a writer.
struct Writing<'a> {
    shapes: Vec<Vec<u64>>,
    names: Vec<(&'a str, Dtype)>,
    metadata: Option<Vec<(&'a str, &'a str)>>,
}

impl<'a> Writing<'a> {
    fn of(case: &'a Table) -> Writing<'a> {
        let rows: Vec<&[Value]> = case["tensors"]
            .as_array()
            .unwrap()
            .iter()
            .map(|row| &row.as_array().unwrap()[..])
            .collect();
        let dim = |value: &Value| u64::try_from(value.as_integer().unwrap()).unwrap();
        Writing {
            shapes: rows
                .iter()
                .map(|row| row[2].as_array().unwrap().iter().map(dim).collect())
                .collect(),
            names: rows
                .iter()
                .map(|row| {
                    (
                        row[0].as_str().unwrap(),
                        Dtype::from_code(row[1].as_str().unwrap()).unwrap(),
                    )
                })
                .collect(),
            metadata: expected_metadata(case).map(|pairs| pairs.into_iter().rev().collect()),
        }
    }

    fn specs(&self) -> Vec<Spec<'_>> {
        self.names
            .iter()
            .zip(&self.shapes)
            .map(|(&(name, dtype), shape)| Spec { name, dtype, shape })
            .collect()
    }
}

#[test]
fn every_list_of_tensors_is_written_as_its_vector_says() {
    for (place, case) in tables("writing") {
        let writing = Writing::of(&case);
        let written = layout(&writing.specs(), writing.metadata.as_deref(), format(&case));
        match (text(&case, "code"), written) {
            (Some(code), written) => {
                assert_eq!(written.err().map(|fault| fault.code()), Some(code), "{place}")
            }
            (None, Err(fault)) => panic!("{place}: {fault}"),
            (None, Ok(written)) => {
                let (found, expected) = (&written.head, hex(text(&case, "head_hex").unwrap()));
                let shown = |bytes: &[u8]| bytes.escape_ascii().to_string();
                assert_eq!(shown(found), shown(&expected), "{place}");
                let order: Vec<i64> = written
                    .order
                    .iter()
                    .map(|&at| i64::try_from(at).unwrap())
                    .collect();
                let expected: Vec<i64> = case["order"]
                    .as_array()
                    .unwrap()
                    .iter()
                    .map(|at| at.as_integer().unwrap())
                    .collect();
                assert_eq!(order, expected, "{place}");
                assert_eq!(
                    written.header.file_nbytes() - written.header.data_nbytes(),
                    written.head.len() as u64
                );
            }
        }
    }
}

/// The rules of FORMAT.md and the codes behind each: paragraphs that begin with the number in bold and end with
/// the codes.
fn rules() -> BTreeMap<&'static str, BTreeSet<&'static str>> {
    let mut rules = BTreeMap::new();
    for paragraph in FORMAT_MD.split("\n\n") {
        let Some((number, rest)) = paragraph
            .strip_prefix("**")
            .and_then(|rest| rest.split_once(".** "))
        else {
            continue;
        };
        let (_, codes) = rest
            .rsplit_once("→")
            .unwrap_or_else(|| panic!("{number} names no code"));
        if number.starts_with('I') {
            // The rules of an index have vectors of their own, in tests/index_vectors.rs.
            continue;
        }
        let codes = codes.split('`').skip(1).step_by(2).collect();
        assert!(
            rules.insert(number, codes).is_none(),
            "{number} stands in FORMAT.md twice"
        );
    }
    rules
}

#[test]
fn every_rule_of_format_md_has_vectors_both_ways() {
    let rules = rules();
    let expected: Vec<String> = (1..=12)
        .map(|n| format!("F{n}"))
        .chain((1..=4).map(|n| format!("B{n}")))
        .collect();
    assert_eq!(
        rules.keys().copied().collect::<BTreeSet<_>>(),
        expected.iter().map(String::as_str).collect()
    );

    let mut accepted = BTreeSet::new();
    let mut rejected: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for (place, case) in tables("vector") {
        let rule = text(&case, "rule").unwrap();
        let codes = rules
            .get(rule)
            .unwrap_or_else(|| panic!("{place}: FORMAT.md has no rule {rule}"));
        match text(&case, "code") {
            None => {
                accepted.insert(rule.to_owned());
            }
            Some(code) => {
                assert!(
                    code == "foreign-file" || codes.contains(code),
                    "{place}: {code} is no code of {rule}"
                );
                rejected
                    .entry(rule.to_owned())
                    .or_default()
                    .insert(code.to_owned());
            }
        }
    }
    for (rule, codes) in rules {
        assert!(accepted.contains(rule), "no vector that {rule} accepts");
        for code in codes {
            assert!(
                rejected.get(rule).is_some_and(|found| found.contains(code)),
                "no vector for {code} of {rule}"
            );
        }
    }
}

#[test]
fn every_code_appears_in_a_vector() {
    let (_, rest) = ERROR_RS.split_once("fn code(").unwrap();
    let (body, _) = rest.split_once("\n    }\n").unwrap();
    let codes: BTreeSet<&str> = body
        .split("=> \"")
        .skip(1)
        .map(|arm| arm.split('"').next().unwrap())
        .collect();
    assert!(
        codes.len() > 20,
        "the codes are not where this test looks for them: {codes:?}"
    );
    let mut found = BTreeSet::new();
    for (_, case) in tables("vector").into_iter().chain(tables("writing")) {
        found.extend(text(&case, "code").map(str::to_owned));
        found.extend((text(&case, "strict") == Some("reject")).then(|| "not-strict".to_owned()));
    }
    // Faults of a caller or of the system, not of a file: tests beside the code that detects them cover these.
    let elsewhere = [
        "io",
        "no-room",
        "other-format",
        "too-large-for-memory",
        "unknown-tensor",
        "wrong-length",
    ];
    found.extend(elsewhere.map(str::to_owned));
    let found: BTreeSet<&str> = found.iter().map(String::as_str).collect();
    assert_eq!(codes, found);
}

#[test]
fn every_dtype_stands_in_format_md() {
    for dtype in Dtype::ALL {
        let number = dtype
            .bintensors_number()
            .map_or("—".to_owned(), |number| number.to_string());
        let row = FORMAT_MD
            .lines()
            .find(|line| line.starts_with(&format!("| `{dtype}` |")));
        let row = row.unwrap_or_else(|| panic!("no row for {dtype}"));
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        assert_eq!(
            (cells[2], cells[3]),
            (dtype.bits().to_string().as_str(), number.as_str()),
            "{dtype}"
        );
    }
    let after_the_first = FORMAT_MD.split_once("\n| `").map_or("", |(_, after)| after);
    let table = after_the_first.split("\n\n").next().unwrap_or_default();
    assert_eq!(1 + table.matches("\n| `").count(), Dtype::ALL.len());
}
