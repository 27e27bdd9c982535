//! Memory that a hostile header costs, counted by the allocator. A single test, because the process has only one
//! counter.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use ingot_format::{Header, Limits};
use peak_alloc::PeakAlloc;

#[global_allocator]
static ALLOCATED: PeakAlloc = PeakAlloc;

/// Returns the peak memory while this header is parsed, in bytes.
fn cost(head: &[u8]) -> usize {
    let before = ALLOCATED.current_usage();
    ALLOCATED.reset_peak_usage();
    let header = Header::parse(head, head.len() as u64, &Limits::default()).unwrap();
    assert_eq!(header.len(), 1);
    ALLOCATED.peak_usage() - before
}

#[test]
fn the_reference_reader_holds_dimensions_once() {
    const COUNT: usize = 1 << 20;
    let dims = vec!["0"; COUNT].join(",");
    // The fast reader leaves this order of the fields to the reference reader.
    let json = format!("{{\"a\":{{\"shape\":[{dims}],\"dtype\":\"U8\",\"data_offsets\":[0,0]}}}}");
    let mut head = (json.len() as u64).to_le_bytes().to_vec();
    head.extend_from_slice(json.as_bytes());
    // The list, and during growth its predecessor of half the size. A second list would make it 16.
    let most = COUNT * (8 + 4) + head.len();
    let cost = cost(&head);
    assert!(cost < most, "{cost} bytes for {}", head.len());
}
