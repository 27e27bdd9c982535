//! No bytes make the reader panic or use more memory than a constant times the header. Every accepted header can be
//! written, and the written header parses to an equal one.
#![no_main]

use ingot_format::{FormatError, Header, Leniency, Limits, Spec, layout};
use libfuzzer_sys::fuzz_target;
use peak_alloc::PeakAlloc;

#[global_allocator]
static ALLOCATED: PeakAlloc = PeakAlloc;

/// The most bytes of memory per byte of a header. The worst case is a shape of one-digit dimensions (one byte each in a
/// binary header): each takes 8 bytes in memory, and briefly three times as much while the list grows.
const COST: usize = 32;

/// The same for a reader that keeps faults. The worst case is an entry of six bytes, such as `"":1,`, whose fault
/// contains texts.
const FINDINGS_COST: usize = 128;

/// Bytes for messages and first allocations.
const BASE: usize = 8192;

fuzz_target!(|input: &[u8]| {
    check(input, input.len() as u64);
    // Most inputs have a wrong length, and mutations seldom correct it. So the rest is also parsed as a header, in a
    // file with the right length.
    if let Some(header) = input.get(8..) {
        let mut head = (header.len() as u64).to_le_bytes().to_vec();
        head.extend_from_slice(header);
        let head_nbytes = head.len() as u64;
        let needed = match Header::parse(&head, head_nbytes, &Limits::default()) {
            Err(FormatError::Truncated { expected, .. }) => expected,
            _ => 0,
        };
        if let Some(file_nbytes) = head_nbytes.checked_add(needed) {
            check(&head, file_nbytes);
        }
    }
});

fn check(head: &[u8], file_nbytes: u64) {
    for leniency in [Leniency::Refuse, Leniency::Accept, Leniency::Salvage] {
        let limits = Limits {
            leniency,
            ..Limits::default()
        };
        let before = ALLOCATED.current_usage();
        ALLOCATED.reset_peak_usage();
        let parsed = Header::parse(head, file_nbytes, &limits);
        let used = ALLOCATED.peak_usage().saturating_sub(before);
        let cost = if leniency == Leniency::Salvage { FINDINGS_COST } else { COST };
        let most = cost * head.len() + BASE;
        assert!(used <= most, "{used} bytes of memory for {}", head.len());
        match parsed {
            Ok(header) if header.findings().is_empty() => rendered_equals(&header, file_nbytes),
            Ok(header) => is_sound(&header, file_nbytes),
            Err(fault) => {
                // The message stays printable and short, for any contents of the file.
                let message = fault.to_string();
                assert!(!message.chars().any(|c| c.is_control()), "{message:?}");
                assert!(message.len() < 8192, "{message:?}");
                let _ = (
                    fault.code(),
                    fault.tensor(),
                    fault.expected_found(),
                    fault.range(),
                );
            }
        }
    }
}

/// The accepted tensors follow one another in the file.
fn is_sound(header: &Header, file_nbytes: u64) {
    assert_eq!(header.file_nbytes(), file_nbytes);
    let mut end = 0;
    for entry in header.entries() {
        assert!(end <= entry.begin && entry.begin <= entry.end && entry.end <= header.data_nbytes());
        assert_eq!(header.get(entry.name), Some(entry));
        end = entry.end;
    }
    for found in header.findings() {
        assert!(!found.fault.to_string().chars().any(char::is_control));
    }
}

fn rendered_equals(header: &Header, file_nbytes: u64) {
    assert_eq!(header.file_nbytes(), file_nbytes);
    assert_eq!(header.entries().len(), header.len());
    for entry in header.entries() {
        assert_eq!(header.get(entry.name), Some(entry));
    }
    let specs: Vec<Spec<'_>> = header
        .entries()
        .map(|entry| Spec {
            name: entry.name,
            dtype: entry.dtype,
            shape: entry.shape,
        })
        .collect();
    let metadata: Option<Vec<(&str, &str)>> = header.metadata().map(|metadata| metadata.iter().collect());
    let new = match layout(&specs, metadata.as_deref(), header.format()) {
        Ok(new) => new,
        Err(fault) => panic!("{fault} in an accepted header: {header:?}"),
    };
    let new_nbytes = new.header.file_nbytes();
    let limits = Limits {
        leniency: Leniency::Refuse,
        ..Limits::default()
    };
    let again = match Header::parse(&new.head, new_nbytes, &limits) {
        Ok(again) => again,
        Err(fault) => panic!("{fault} in a written header: {header:?}"),
    };
    assert_eq!(format!("{again:?}"), format!("{:?}", new.header));
    assert_eq!(again.format(), header.format());
    assert_eq!(again.data_nbytes(), header.data_nbytes());
    let contents = |header: &Header| {
        let entries: Vec<String> = header
            .entries_by_name()
            .map(|entry| {
                format!(
                    "{} {} {:?} {}",
                    entry.name,
                    entry.dtype,
                    entry.shape,
                    entry.nbytes()
                )
            })
            .collect();
        let mut metadata: Option<Vec<(String, String)>> = header.metadata().map(|metadata| {
            metadata
                .iter()
                .map(|(key, value)| (key.into(), value.into()))
                .collect()
        });
        metadata.iter_mut().for_each(|pairs| pairs.sort());
        (entries, metadata)
    };
    assert_eq!(contents(&again), contents(header));
    // The same entries in another order produce the same bytes.
    let backwards: Vec<Spec<'_>> = specs.iter().rev().copied().collect();
    let other = layout(&backwards, metadata.as_deref(), header.format());
    assert_eq!(other.map(|other| other.head), Ok(new.head));
}
