use super::*;
use alloc::collections::BTreeMap;
use alloc::format;
use alloc::string::ToString;
use alloc::vec;
use proptest::prelude::*;
use serde_json::Value as Json;

/// The contents of an index, by a reader without rules.
fn naive(text: &str) -> Option<BTreeMap<String, String>> {
    let json: Json = serde_json::from_str(text).ok()?;
    let map = json.get("weight_map")?.as_object()?;
    map.iter()
        .map(|(name, shard)| Some((name.clone(), shard.as_str()?.to_owned())))
        .collect()
}

fn said(index: &ShardIndex) -> Vec<(String, String)> {
    index
        .entries()
        .map(|(name, shard)| (name.to_owned(), index.shards()[shard].clone()))
        .collect()
}

/// Read through a window of `width` bytes, which grows if an item is longer.
fn through_window(text: &[u8], mut width: usize) -> Result<ShardIndex, IndexError> {
    let mut reader = IndexReader::new(to_u64(text.len()))?;
    let mut at = 0;
    while at < text.len() {
        match reader.feed(&text[at..text.len().min(at + width)])? {
            0 => width *= 2,
            taken => at += taken,
        }
    }
    reader.finish()
}

fn quoted(text: &str) -> String {
    serde_json::to_string(text).unwrap()
}

/// Texts similar to real indexes: names with escapes, white space of all kinds, fields of all kinds.
fn text() -> impl Strategy<Value = String> {
    let space = "[ \n\r\t]{0,3}";
    let name = prop_oneof![4 => "[a-d.]{0,4}".prop_map(|name| quoted(&name)), 1 => "\\PC{0,6}".prop_map(|name| quoted(&name)),
        1 => Just("\"\\u0061\"".to_string())];
    let shard = prop_oneof![8 => "[ab]{1,2}".prop_map(|name| quoted(&name)), 1 => "\\PC{0,6}".prop_map(|name| quoted(&name))];
    let tensor =
        (name, space, space, shard).prop_map(|(name, a, b, shard)| format!("{a}{name}{b}:{a}{shard}{b}"));
    let map = proptest::collection::vec(tensor, 0..6)
        .prop_map(|tensors| format!("\"weight_map\":{{{}}}", tensors.join(",")));
    let metadata = prop_oneof![
        Just("\"metadata\":{\"total_size\":12}".to_string()),
        Just("\"metadata\" : {\"total_size\":1.5e3,\"a\":[{\"b\":null}]}".to_string()),
        Just("\"metadata\":null".to_string()),
        Just("\"dtype\":\"bfloat16\"".to_string()),
        Just("\"n\":12".to_string()),
    ];
    (proptest::option::of(metadata), map, space, any::<bool>()).prop_map(|(metadata, map, space, first)| {
        let mut fields = vec![map];
        if let Some(metadata) = metadata {
            fields.insert(usize::from(!first), metadata);
        }
        format!("{space}{{{space}{}{space}}}{space}", fields.join(","))
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn accepted_text_equals_the_result_of_serde_json(text in text()) {
        match ShardIndex::parse(text.as_bytes()) {
            Ok(index) => {
                let entries = said(&index);
                let map = naive(&text).unwrap();
                prop_assert_eq!(entries.len(), map.len(), "no name is lost");
                for (name, shard) in &entries {
                    prop_assert_eq!(map.get(name), Some(shard));
                    prop_assert_eq!(index.shard_of(name), Some(shard.as_str()));
                }
                let by_name: Vec<&str> = (0..index.len()).map(|rank| index.entry(index.nth_by_name(rank)).0).collect();
                prop_assert!(by_name.is_sorted_by(|a, b| a < b));
            }
            Err(IndexError::InvalidJson { reason }) => prop_assert!(naive(&text).is_none(), "{}", reason),
            Err(_) => {}
        }
    }

    #[test]
    fn rendering_keeps_contents_and_order(text in text()) {
        if let Ok(index) = ShardIndex::parse(text.as_bytes()) {
            let again = ShardIndex::parse(&index.render());
            let again = again.unwrap_or_else(|fault| panic!("{fault} of {text}"));
            prop_assert_eq!(said(&index), said(&again));
            prop_assert_eq!(index.metadata(), again.metadata());
            prop_assert!(serde_json::from_slice::<Json>(&index.render()).is_ok());
        }
    }

    #[test]
    fn any_window_has_the_same_result(text in text(), width in 1_usize..80) {
        let whole = ShardIndex::parse(text.as_bytes());
        let pieces = through_window(text.as_bytes(), width);
        match (whole, pieces) {
            (Ok(whole), Ok(pieces)) => {
                prop_assert_eq!(said(&whole), said(&pieces));
                prop_assert_eq!(whole.metadata(), pieces.metadata());
            }
            (Err(whole), Err(pieces)) => prop_assert_eq!(whole.code(), pieces.code()),
            (whole, pieces) => prop_assert!(false, "{:?} but {:?}", whole, pieces),
        }
    }

    #[test]
    fn one_changed_byte_is_refused_or_read_as_serde_json_reads_it(
        text in text(),
        at in any::<prop::sample::Index>(),
        byte in 0_u8..128,
    ) {
        let mut bytes = text.into_bytes();
        let at = at.index(bytes.len());
        bytes[at] = byte;
        if let (Ok(index), Ok(text)) = (ShardIndex::parse(&bytes), str::from_utf8(&bytes)) {
            let map = naive(text);
            prop_assert!(map.is_some(), "accepted what is no JSON: {:?}", text);
            let found: BTreeMap<String, String> = said(&index).into_iter().collect();
            prop_assert_eq!(Some(found), map);
        }
    }
}

#[test]
fn a_value_that_is_too_large_is_refused_without_keeping_it() {
    let text = format!(
        "{{\"metadata\":{{\"a\":\"{}\"}},\"weight_map\":{{}}}}",
        "x".repeat(ShardIndex::VALUE_NBYTES)
    );
    let fault = ShardIndex::parse(text.as_bytes()).unwrap_err();
    assert_eq!(fault.code(), "value-too-large");
    assert_eq!(
        through_window(text.as_bytes(), 1 << 16).unwrap_err().code(),
        "value-too-large"
    );
}

#[test]
fn more_shards_than_the_limit_are_refused() {
    let tensors: Vec<String> = (0..=ShardIndex::SHARDS)
        .map(|number| format!("\"{number}\":\"{number}.safetensors\""))
        .collect();
    let text = format!("{{\"weight_map\":{{{}}}}}", tensors.join(","));
    assert_eq!(
        ShardIndex::parse(text.as_bytes()).unwrap_err().code(),
        "too-many-shards"
    );
}

#[test]
fn an_index_above_the_limit_is_refused_before_it_is_read() {
    assert_eq!(
        IndexReader::new(ShardIndex::NBYTES + 1).unwrap_err().code(),
        "index-too-large"
    );
}

#[test]
fn a_fault_has_the_position_of_the_wrong_byte_with_any_window() {
    let text = "{\"metadata\":{\"total_size\":12},\"weight_map\":{\"a\":\"x\",\"b\"?\"y\"}}";
    let at = text.find('?').unwrap();
    for width in [1, 2, 3, 7, 20, text.len()] {
        let fault = through_window(text.as_bytes(), width).unwrap_err().to_string();
        assert!(fault.contains(&format!("byte {at}")), "{width}: {fault}");
    }
}

#[test]
fn rejects_truncated_text_with_its_last_piece() {
    let text = br#"{"weight_map":{"a":"b"}"#;
    let mut reader = IndexReader::new(to_u64(text.len())).unwrap();
    let fault = reader.feed(text).unwrap_err();
    assert_eq!(fault.code(), "invalid-json");
    // If more text follows, it is not a fault.
    let mut reader = IndexReader::new(to_u64(text.len()) + 1).unwrap();
    assert!(reader.feed(text).is_ok());
}

#[test]
fn find_returns_none_for_unknown_names() {
    let names = ["b", "d", "f", "h", "j"];
    for count in 0..=names.len() {
        let tensors: Vec<String> = names[..count]
            .iter()
            .map(|name| format!("\"{name}\":\"x\""))
            .collect();
        let text = format!("{{\"weight_map\":{{{}}}}}", tensors.join(","));
        let index = ShardIndex::parse(text.as_bytes()).unwrap();
        assert_eq!(index.is_empty(), count == 0);
        for (number, name) in names.iter().enumerate() {
            assert_eq!(index.find(name), (number < count).then_some(number));
        }
        for name in ["", "a", "c", "e", "g", "i", "k"] {
            assert_eq!(index.find(name), None, "{name} of {count}");
        }
    }
}

#[test]
fn total_nbytes_is_the_total_size_of_the_metadata() {
    let total = |text: &str| ShardIndex::parse(text.as_bytes()).unwrap().total_nbytes();
    assert_eq!(
        total(r#"{"metadata":{"total_size":12},"weight_map":{}}"#),
        Some(12)
    );
    assert_eq!(total(r#"{"metadata":{"size":12},"weight_map":{}}"#), None);
    assert_eq!(total(r#"{"weight_map":{}}"#), None);
}

#[test]
fn rejects_invalid_utf8_at_once_with_its_position() {
    let text = b"{\"weight_map\":{\"a\":\"x\",\"b\xFF\":\"y\"}}";
    let mut reader = IndexReader::new(to_u64(text.len())).unwrap();
    let taken = reader.feed(&text[..23]).unwrap();
    // More text follows this piece, but it cannot make the byte valid.
    let fault = reader.feed(&text[taken..28]).unwrap_err();
    assert_eq!(fault, IndexError::InvalidUtf8 { position: 25 });
}

#[test]
fn rejects_a_wrong_value_at_once_with_its_position() {
    let text = br#"{"metadata":{"a":nulL},"weight_map":{}}"#;
    let mut reader = IndexReader::new(to_u64(text.len())).unwrap();
    let fault = reader.feed(&text[..30]).unwrap_err();
    assert!(fault.to_string().contains("after byte 12: "), "{fault}");
}

#[test]
fn rejects_a_wrong_escape_at_once_as_an_escape() {
    let text = br#"{"weight_map":{"a\x":"b"}}"#;
    let mut reader = IndexReader::new(to_u64(text.len())).unwrap();
    let fault = reader.feed(&text[..text.len() - 1]).unwrap_err();
    assert!(fault.to_string().contains("escape"), "{fault}");
}

#[test]
fn names_the_kind_of_value_found_instead_of_a_shard() {
    for (value, words) in [
        ("null", "null"),
        ("true", "true or false"),
        ("false", "true or false"),
        ("-1.5", "a number"),
        ("[\"a\"]", "an array"),
        ("{}", "an object"),
    ] {
        let text = format!(r#"{{"weight_map":{{"a":{value}}}}}"#);
        let error = ShardIndex::parse(text.as_bytes()).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!("tensor `a`: expected the name of a file, found {words}")
        );
    }
    let error = ShardIndex::parse(br#"{"weight_map":"a"}"#).unwrap_err();
    assert!(error.to_string().ends_with("found a string"), "{error}");
}
