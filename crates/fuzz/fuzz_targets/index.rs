//! No bytes make the reader of indexes panic or take more memory than a constant times the input; where the input is cut
//! makes no difference; what it accepts serde_json reads as the same tensors in the same files.
#![no_main]

use std::collections::BTreeMap;

use ingot_format::{IndexError, IndexReader, ShardIndex};
use libfuzzer_sys::fuzz_target;
use peak_alloc::PeakAlloc;

#[global_allocator]
static ALLOCATED: PeakAlloc = PeakAlloc;

/// Bytes of memory that one byte of an index may cost at the worst. The worst are shards of short names, each of which is
/// two strings, an entry of a tree, and its lower case while collisions are looked for.
const COST: usize = 64;

/// Messages and first allocations.
const BASE: usize = 16 << 10;

fuzz_target!(|input: &[u8]| {
    // The first byte says how the rest is cut.
    let Some((&step, text)) = input.split_first() else {
        return;
    };
    let before = ALLOCATED.current_usage();
    ALLOCATED.reset_peak_usage();
    let whole = ShardIndex::parse(text);
    let used = ALLOCATED.peak_usage().saturating_sub(before);
    let most = COST * text.len() + BASE;
    assert!(used <= most, "{used} bytes of memory for {}", text.len());
    let cut = in_pieces(text, usize::from(step) + 1);
    match (whole, cut) {
        (Ok(whole), Ok(cut)) => {
            assert!(whole.entries().eq(cut.entries()));
            assert_eq!((whole.shards(), whole.metadata()), (cut.shards(), cut.metadata()));
            equals_reference(&whole, text);
        }
        (Err(fault), Err(_)) => {
            let message = fault.to_string();
            assert!(!message.chars().any(|c| c.is_control()), "{message:?}");
            let _ = (fault.code(), fault.tensor(), fault.expected_found());
        }
        (whole, cut) => panic!("whole {whole:?}, in pieces {cut:?}"),
    }
});

/// As a file that gives a few bytes at a time.
fn in_pieces(text: &[u8], step: usize) -> Result<ShardIndex, IndexError> {
    let mut reader = IndexReader::new(text.len() as u64)?;
    let (mut begin, mut end) = (0, 0);
    while end < text.len() {
        end = text.len().min(end + step);
        begin += reader.feed(&text[begin..end])?;
    }
    reader.finish()
}

fn equals_reference(index: &ShardIndex, text: &[u8]) {
    let reference: serde_json::Value = match serde_json::from_slice(text) {
        Ok(reference) => reference,
        Err(fault) => panic!("serde_json refuses what was accepted: {fault}"),
    };
    let said: BTreeMap<&str, &str> = reference["weight_map"]
        .as_object()
        .into_iter()
        .flatten()
        .filter_map(|(name, shard)| Some((name.as_str(), shard.as_str()?)))
        .collect();
    assert_eq!(said.len(), index.len());
    assert!(index.names_by_name().eq(said.keys().copied()));
    for (name, shard) in said {
        assert_eq!(index.shard_of(name), Some(shard));
        assert!(
            !shard.starts_with('/') && !shard.split('/').any(|part| part == ".."),
            "{shard:?}"
        );
    }
}
