//! No bytes make the reader panic or take more memory than a constant times the header; what it accepts it can
//! write, and what was written parses equal.
#![no_main]

use ingot_format::{FormatError, Header, Leniency, Limits, Spec, layout};
use libfuzzer_sys::fuzz_target;
use peak_alloc::PeakAlloc;

#[global_allocator]
static ALLOCATED: PeakAlloc = PeakAlloc;

/// Bytes of memory that one byte of a header may cost at the worst. The worst is a shape of one-digit dimensions
/// (in a binary header one byte each), which are 8 bytes each in memory and for a moment, while their list grows,
/// three times that.
const COST: usize = 32;

/// The same where faults are kept: the worst is an entry of six bytes, such as `"":1,`, whose fault has texts.
const FINDINGS_COST: usize = 128;

/// Messages and first allocations.
const BASE: usize = 8192;

fuzz_target!(|input: &[u8]| {
    check(input, input.len() as u64);
    // Most inputs say something wrong about their own length, and mutations seldom get it right; so take the rest
    // as a header again, in a file that is as long as it has to be.
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
                // Whatever the file holds, the message stays printable and short.
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

/// The tensors that were taken lie in the file, one after the other.
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
        Err(fault) => panic!("{fault} in what was accepted: {header:?}"),
    };
    let new_nbytes = new.header.file_nbytes();
    let limits = Limits {
        leniency: Leniency::Refuse,
        ..Limits::default()
    };
    let again = match Header::parse(&new.head, new_nbytes, &limits) {
        Ok(again) => again,
        Err(fault) => panic!("{fault} in what was written: {header:?}"),
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
    // The same entries in another order give the same bytes.
    let backwards: Vec<Spec<'_>> = specs.iter().rev().copied().collect();
    let other = layout(&backwards, metadata.as_deref(), header.format());
    assert_eq!(other.map(|other| other.head), Ok(new.head));
}
