//! No bytes make the reader of indexes panic or use more memory than a constant times the input. The result does not
//! depend on how the input is split into pieces. serde_json reads the same tensors in the same files from every
//! accepted index.
#![no_main]

use std::collections::BTreeMap;

use ingot_format::{IndexError, IndexReader, ShardIndex};
use libfuzzer_sys::fuzz_target;
use peak_alloc::PeakAlloc;

#[global_allocator]
static ALLOCATED: PeakAlloc = PeakAlloc;

/// The most bytes of memory per byte of an index. The worst case is shards with short names: each is stored as two
/// strings, an entry of a tree, and its lower case during the search for collisions.
const COST: usize = 64;

/// Bytes for messages and first allocations.
const BASE: usize = 16 << 10;

fuzz_target!(|input: &[u8]| {
    // The first byte selects how the rest is split.
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

/// The input as a file that returns a few bytes at a time.
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
