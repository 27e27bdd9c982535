//! Every `[[index]]` of `tests/vectors/index.toml` through [`ShardIndex`], and these against FORMAT.md.

use std::collections::BTreeSet;

use ingot_format::{IndexError, IndexReader, ShardIndex};
use toml::{Table, Value};

const FORMAT_MD: &str = include_str!("../FORMAT.md");
const VECTORS: &str = include_str!("../../../tests/vectors/index.toml");
const ERROR_RS: &str = include_str!("../src/index/error.rs");
const SHARDS_IN_URLS: &str = include_str!("../../../tests/vectors/shards_in_urls.json");

fn cases() -> Vec<Table> {
    let table: Table = VECTORS.parse().unwrap();
    let cases = table["index"].as_array().unwrap();
    cases
        .iter()
        .map(|case| case.as_table().unwrap().clone())
        .collect()
}

fn text<'a>(case: &'a Table, key: &str) -> Option<&'a str> {
    case.get(key).map(|value| value.as_str().unwrap())
}

fn bytes(case: &Table) -> Vec<u8> {
    if let Some(text) = text(case, "text") {
        return text.into();
    }
    let mut bytes = Vec::new();
    if let Some(hex) = text(case, "text_hex") {
        for (number, part) in hex.split('\'').enumerate() {
            if number % 2 == 1 {
                bytes.extend_from_slice(part.as_bytes());
            } else {
                bytes.extend(
                    part.split_whitespace()
                        .map(|byte| u8::from_str_radix(byte, 16).unwrap()),
                );
            }
        }
        return bytes;
    }
    for piece in case["text_repeat"].as_array().unwrap() {
        let times = usize::try_from(piece[1].as_integer().unwrap()).unwrap();
        bytes.extend_from_slice(piece[0].as_str().unwrap().repeat(times).as_bytes());
    }
    bytes
}

fn byte_by_byte(bytes: &[u8]) -> Result<ShardIndex, IndexError> {
    let mut reader = IndexReader::new(u64::try_from(bytes.len()).unwrap())?;
    let (mut begin, mut end) = (0, 0);
    while end < bytes.len() {
        end += 1;
        begin += reader.feed(&bytes[begin..end])?;
    }
    reader.finish()
}

#[test]
fn every_index_gets_its_verdict() {
    for case in cases() {
        let name = text(&case, "name").unwrap();
        let bytes = bytes(&case);
        let found = ShardIndex::parse(&bytes);
        assert_eq!(
            found.as_ref().err().map(IndexError::code),
            text(&case, "code"),
            "{name}: {found:?}"
        );
        assert_eq!(
            byte_by_byte(&bytes).err().map(|fault| fault.code()),
            text(&case, "code"),
            "{name}, byte by byte"
        );
        let Ok(index) = found else {
            assert_eq!(text(&case, "expect"), Some("reject"), "{name}");
            continue;
        };
        assert_eq!(text(&case, "expect"), Some("accept"), "{name}");
        let pair = |row: &Value| {
            (
                row[0].as_str().unwrap().to_owned(),
                row[1].as_str().unwrap().to_owned(),
            )
        };
        let expected: Vec<_> = case["weight_map"].as_array().unwrap().iter().map(pair).collect();
        let shard = |number: usize| index.shards()[number].clone();
        let entries: Vec<_> = index
            .entries()
            .map(|(tensor, number)| (tensor.to_owned(), shard(number)))
            .collect();
        assert_eq!(entries, expected, "{name}");
        if let Some(metadata) = text(&case, "metadata") {
            assert_eq!(index.metadata(), Some(metadata), "{name}");
        }
    }
}

#[test]
fn a_refusal_is_one_line_that_names_the_tensor_and_can_be_printed() {
    for case in cases() {
        if let Err(fault) = ShardIndex::parse(&bytes(&case)) {
            let message = fault.to_string();
            assert!(!message.chars().any(char::is_control), "{message:?}");
            if let Some(tensor) = fault.tensor() {
                assert!(message.contains(&format!("`{tensor}`")), "{message}");
            }
        }
    }
    let unsafe_name = br#"{"weight_map": {"wte": "../../etc/passwd"}}"#;
    assert_eq!(
        ShardIndex::parse(unsafe_name).unwrap_err().to_string(),
        "tensor `wte`: file name `../../etc/passwd` refused: it has a part `.` or `..`"
    );
    let twice = br#"{"weight_map": {"wte": "a.safetensors", "wte": "b.safetensors"}}"#;
    assert_eq!(
        ShardIndex::parse(twice).unwrap_err().to_string(),
        "tensor `wte`: it occurs twice, in `a.safetensors` and in `b.safetensors`"
    );
}

#[test]
fn every_rule_and_every_code_of_format_md_has_a_vector_or_a_test_of_its_own() {
    // These take more bytes than a vector should have; src/index/tests.rs has them.
    const TOO_LONG: [&str; 3] = ["index-too-large", "value-too-large", "too-many-shards"];
    let mut promised = BTreeSet::new();
    for paragraph in FORMAT_MD
        .split("\n\n")
        .filter(|paragraph| paragraph.starts_with("**I"))
    {
        let number = &paragraph[2..4];
        let (_, codes) = paragraph.rsplit_once('→').unwrap();
        for code in codes.split('`').skip(1).step_by(2) {
            promised.insert((number.to_owned(), code.to_owned()));
        }
    }
    let numbers: BTreeSet<&str> = promised.iter().map(|rule| &*rule.0).collect();
    assert_eq!(numbers.into_iter().collect::<String>(), "I1I2I3I4I5I6I7I8");
    let shown: BTreeSet<(String, String)> = cases()
        .iter()
        .filter_map(|case| Some((text(case, "rule")?.into(), text(case, "code")?.into())))
        .collect();
    for rule in &promised {
        let (number, code) = rule;
        assert!(
            shown.contains(rule) || TOO_LONG.contains(&&**code),
            "{number}: {code} has no vector"
        );
        assert!(
            ERROR_RS.contains(&format!("/// {number}: ")),
            "{number} is not in error.rs"
        );
        assert!(
            ERROR_RS.contains(&format!("\"{code}\"")),
            "{code} is not in error.rs"
        );
    }
    for rule in &shown {
        assert!(promised.contains(rule), "{rule:?} is not in FORMAT.md");
    }
}

#[test]
fn names_of_shards_in_urls_are_refused_by_what_a_server_makes_of_them() {
    let vectors: serde_json::Value = serde_json::from_str(SHARDS_IN_URLS).unwrap();
    for vector in vectors.as_array().unwrap() {
        let text = serde_json::json!({"weight_map": {"a": "first", "b": vector["shard"]}});
        let index = ShardIndex::parse(text.to_string().as_bytes());
        let verdict = index.and_then(|index| index.check_in_urls());
        assert_eq!(verdict.is_ok(), vector["accepted"].as_bool().unwrap(), "{vector}");
        if let Err(fault) = verdict {
            assert_eq!(
                (fault.code(), fault.tensor()),
                ("invalid-shard-name", Some("b")),
                "{vector}"
            );
        }
    }
}
