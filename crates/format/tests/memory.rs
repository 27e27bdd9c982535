//! What reading a hostile header costs in memory, counted by the allocator. One test, because the counter is one for
//! the whole process.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use ingot_format::{Header, Limits};
use peak_alloc::PeakAlloc;

#[global_allocator]
static ALLOCATED: PeakAlloc = PeakAlloc;

/// The most memory that was in use at a time while this header was read, in bytes.
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
    // The quick reader leaves this order of the fields to the reference reader.
    let json = format!("{{\"a\":{{\"shape\":[{dims}],\"dtype\":\"U8\",\"data_offsets\":[0,0]}}}}");
    let mut head = (json.len() as u64).to_le_bytes().to_vec();
    head.extend_from_slice(json.as_bytes());
    // The list, and for a moment the one half as large that it grew from. A second list would make it 16.
    let most = COUNT * (8 + 4) + head.len();
    let cost = cost(&head);
    assert!(cost < most, "{cost} bytes for {}", head.len());
}
