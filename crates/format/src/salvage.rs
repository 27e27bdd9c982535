//! Selects the sound entries of a header that breaks rules.
//!
//! A codec has read each item of the header on its own. This module keeps the entries whose bytes exist and belong to
//! no other entry. `header` proves the result as it proves every header.

use alloc::borrow::ToOwned;
use alloc::vec::Vec;

use crate::entry::Entry;
use crate::error::FormatError;
use crate::extent;
use crate::finding::{Findings, Remedy, Understood, Unread};
use crate::raw::{RawHeader, broken_range};

/// Returns the entries of the sound tensors: the name is unique, the size fits shape and dtype, and all of the bytes
/// exist and belong to no other tensor. There may be bytes between them.
pub(crate) fn sound(understood: Understood, data_nbytes: u64) -> (RawHeader, Findings) {
    let Understood {
        raw,
        unread,
        mut findings,
    } = understood;
    let raw = raw.in_data_order();
    let mut choice = Choice {
        left_out: alloc::vec![false; raw.records.len()],
        raw: &raw,
        findings: &mut findings,
    };
    choice.by_names(&unread);
    choice.by_sizes(data_nbytes);
    choice.by_ranges();
    choice.bytes_of_no_tensor(&unread, data_nbytes);
    let left_out = choice.left_out;
    let chosen = chosen(raw, &left_out, data_nbytes, &mut findings);
    (chosen, findings)
}

/// Marks the entries to leave out.
struct Choice<'r> {
    raw: &'r RawHeader,
    left_out: Vec<bool>,
    findings: &'r mut Findings,
}

impl Choice<'_> {
    fn leave_out(&mut self, number: usize, fault: FormatError) {
        if !self.left_out[number] {
            self.left_out[number] = true;
            self.findings.add(fault, Remedy::TensorLeftOut);
        }
    }

    /// Rule F7. Of equal entries the first is kept. If entries of one name differ or cannot be read, none is kept,
    /// because it is unknown which one is meant.
    fn by_names(&mut self, unread: &[Unread]) {
        let raw = self.raw;
        let mut others: Vec<&str> = unread.iter().map(|unread| &*unread.tensor).collect();
        others.sort_unstable();
        let mut order: Vec<usize> = (0..raw.records.len()).collect();
        order.sort_by(|&a, &b| raw.name(a).cmp(raw.name(b)));
        for same in order.chunk_by(|&a, &b| raw.name(a) == raw.name(b)) {
            let [first, rest @ ..] = same else { continue };
            let is_unread = others.binary_search(&raw.name(*first)).is_ok();
            if rest.is_empty() && !is_unread {
                continue;
            }
            let tensor = raw.name(*first).to_owned();
            let fault = FormatError::DuplicateTensor { tensor };
            if !is_unread && rest.iter().all(|&other| raw.entry(other) == raw.entry(*first)) {
                self.findings.add(fault, Remedy::LastKept);
            } else {
                self.leave_out(*first, fault);
            }
            for &other in rest {
                self.left_out[other] = true;
            }
        }
    }

    /// Rules F9, F10 and F12.
    fn by_sizes(&mut self, data_nbytes: u64) {
        for number in 0..self.raw.records.len() {
            let entry = self.raw.entry(number);
            let nbytes = extent::nbytes(entry.dtype, entry.shape);
            if let Some(fault) = broken_range(&entry, nbytes) {
                self.leave_out(number, fault);
            } else if entry.end > data_nbytes && entry.begin < entry.end {
                let fault = FormatError::Truncated {
                    tensor: entry.name.to_owned(),
                    expected: entry.end,
                    found: data_nbytes,
                };
                self.leave_out(number, fault);
            }
        }
    }

    /// Rule F11. If two tensors share bytes, it is unknown which of them the values belong to, so both are left out.
    fn by_ranges(&mut self) {
        // Of the tensors examined so far, the one that ends last.
        let mut furthest: Option<usize> = None;
        for number in 0..self.raw.records.len() {
            let entry = self.raw.entry(number);
            if self.left_out[number] || entry.begin == entry.end {
                continue;
            }
            let before = furthest.map(|number| self.raw.entry(number));
            match (before, furthest) {
                (Some(before), Some(other)) if entry.begin < before.end => {
                    self.share_bytes(number, other);
                    // Two names for one tensor: the first keeps its values regardless of the second.
                    if entry
                        != (Entry {
                            name: entry.name,
                            ..before
                        })
                    {
                        self.share_bytes(other, number);
                    }
                    if entry.end > before.end {
                        furthest = Some(number);
                    }
                }
                _ => furthest = Some(number),
            }
        }
    }

    fn share_bytes(&mut self, number: usize, other: usize) {
        let (entry, other) = (self.raw.entry(number), self.raw.entry(other));
        let fault = FormatError::Overlap {
            tensor: entry.name.to_owned(),
            other: other.name.to_owned(),
            begin: entry.begin,
            end: other.end,
        };
        self.leave_out(number, fault);
    }

    /// Rules F11 and F12: reports bytes that no entry claims, where entries that were left out count too.
    fn bytes_of_no_tensor(&mut self, unread: &[Unread], data_nbytes: u64) {
        let read = self
            .raw
            .entries()
            .map(|entry| (entry.begin, entry.end, entry.name));
        let others = unread
            .iter()
            .map(|unread| (unread.begin, unread.end, &*unread.tensor));
        let mut claims: Vec<(u64, u64, &str)> = read.chain(others).collect();
        claims.sort_unstable();
        let mut covered = 0;
        for (begin, end, tensor) in claims {
            let begin = begin.min(data_nbytes);
            if begin > covered {
                let tensor = tensor.to_owned();
                let fault = FormatError::Hole {
                    tensor,
                    begin: covered,
                    end: begin,
                };
                self.findings.add(fault, Remedy::BytesLeftOut);
            }
            covered = covered.max(begin).max(end.min(data_nbytes));
        }
        if covered < data_nbytes {
            let (expected, found) = (covered, data_nbytes);
            let fault = FormatError::TrailingBytes { expected, found };
            self.findings.add(fault, Remedy::BytesLeftOut);
        }
    }
}

/// Returns the entries that are not left out. A tensor without bytes is sound at any position; if its position is
/// inside another tensor or past the end, it is moved to the end of the tensor before it.
fn chosen(raw: RawHeader, left_out: &[bool], data_nbytes: u64, findings: &mut Findings) -> RawHeader {
    let mut chosen = RawHeader::default();
    let mut covered = 0;
    for (entry, _) in raw.entries().zip(left_out).filter(|(_, left_out)| !**left_out) {
        let (mut begin, mut end) = (entry.begin, entry.end);
        if begin == end && !(covered..=data_nbytes).contains(&begin) {
            findings.add(misplaced(&entry, &chosen, data_nbytes), Remedy::Rewritten);
            (begin, end) = (covered, covered);
        }
        chosen.names.push_str(entry.name);
        chosen.dims.extend_from_slice(entry.shape);
        chosen.close_entry(entry.dtype, begin, end);
        covered = end;
    }
    RawHeader {
        metadata: raw.metadata,
        ..chosen
    }
}

/// Returns the fault of a misplaced tensor without bytes. Rule F11 or F12.
fn misplaced(entry: &Entry<'_>, before: &RawHeader, data_nbytes: u64) -> FormatError {
    let tensor = entry.name.to_owned();
    match before.entries().next_back() {
        Some(other) if entry.begin < other.end => FormatError::Overlap {
            tensor,
            other: other.name.to_owned(),
            begin: entry.begin,
            end: other.end,
        },
        _ => FormatError::Truncated {
            tensor,
            expected: entry.begin,
            found: data_nbytes,
        },
    }
}
