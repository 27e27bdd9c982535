//! Hashes of files, and the digests that files keep of their tensors.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "the functions that tests share are tests too, though clippy cannot see it"
)]

use std::fs;
use std::path::PathBuf;

use ingot_format::{Checksums, Dtype, Format, TensorView, to_vec};
use ingot_io::{Algorithm, Definition, Digest, Error, Unwatched, Watch, hash, verify};
use proptest::prelude::*;
use tempfile::TempDir;

/// A folder with one file in it.
fn file(bytes: &[u8]) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    fs::write(&path, bytes).unwrap();
    (folder, path)
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at % 249).to_le_bytes()[0]).collect()
}

/// A file of tensors of these sizes that keeps a digest of each.
fn with_checksums(algorithm: Algorithm, sizes: &[usize]) -> Vec<u8> {
    let tensors: Vec<(String, Vec<u8>)> = sizes
        .iter()
        .enumerate()
        .map(|(number, &len)| (format!("t{number:02}"), pattern(len + number)[number..].to_vec()))
        .collect();
    let digests = tensors
        .iter()
        .map(|(name, bytes)| (name.as_str(), algorithm.digest(bytes).to_string().into()));
    let record = Checksums::new(algorithm.name(), digests).unwrap().render();
    let views = tensors.iter().map(|(name, bytes)| {
        let view = TensorView::new(Dtype::U8, vec![bytes.len()], bytes).unwrap();
        (name, view)
    });
    to_vec(views, Some(&[("ingot.checksums", &record)]), Format::Safetensors).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn a_file_is_hashed_as_its_bytes_are(
        len in prop_oneof![0..5000_usize, (1 << 20) - 2..(1 << 20) + 2_usize, 0..9_000_000_usize],
        algorithm in prop::sample::select(Algorithm::ALL.to_vec()),
    ) {
        let bytes = pattern(len);
        let (_folder, path) = file(&bytes);
        let found = hash(&path, Definition::File(algorithm), &Unwatched).unwrap();
        prop_assert_eq!(found, algorithm.digest(&bytes).to_string());
    }

    #[test]
    fn a_flipped_bit_anywhere_in_the_data_is_found_and_its_tensor_named(
        sizes in prop::collection::vec(prop_oneof![3 => 1..4000_usize, 1 => 1..3_000_000_usize], 1..6),
        at in any::<prop::sample::Index>(),
        algorithm in prop::sample::select(Algorithm::ALL.to_vec()),
    ) {
        let mut bytes = with_checksums(algorithm, &sizes);
        let (_folder, path) = file(&bytes);
        let report = verify(&path, None, &Unwatched).unwrap();
        prop_assert!(report.is_ok(), "{:?}", report);
        prop_assert_eq!(report.checked, sizes.len());

        let data_nbytes: usize = sizes.iter().sum();
        let begin = bytes.len() - data_nbytes;
        let at = at.index(data_nbytes);
        bytes[begin + at] ^= 0x10;
        fs::write(&path, &bytes).unwrap();
        let report = verify(&path, None, &Unwatched).unwrap();
        prop_assert!(!report.is_ok());
        let mut end = 0;
        let hit = sizes.iter().position(|len| { end += len; at < end }).unwrap();
        let named: Vec<&str> = report.bad.iter().map(|row| row.tensor.as_str()).collect();
        prop_assert_eq!(named, [format!("t{hit:02}")]);
    }
}

#[test]
fn a_wrong_digest_of_the_whole_file_is_found() {
    let bytes = with_checksums(Algorithm::Xxh3, &[10]);
    let (_folder, path) = file(&bytes);
    let right = Algorithm::Sha256.digest(&bytes);
    assert!(verify(&path, Some(right), &Unwatched).unwrap().is_ok());
    let report = verify(&path, Some(Algorithm::Sha256.digest(b"other")), &Unwatched).unwrap();
    assert!(!report.is_ok());
    assert_eq!(report.file.unwrap().found, right);
    assert!(report.bad.is_empty());
}

#[test]
fn a_file_that_keeps_no_digests_is_not_vouched_for() {
    let tensor = TensorView::new(Dtype::U8, vec![3], b"abc").unwrap();
    let bytes = to_vec([("a", tensor)], None, Format::Bintensors).unwrap();
    let (_folder, path) = file(&bytes);
    let report = verify(&path, None, &Unwatched).unwrap();
    assert_eq!(
        (report.algorithm, report.checked, report.is_ok()),
        (None, 0, false)
    );
    assert_eq!(report.unchecked, ["a"]);
    let whole = Digest::from_hex(
        Algorithm::Sha256,
        &hash(&path, Definition::File(Algorithm::Sha256), &Unwatched).unwrap(),
    );
    assert!(verify(&path, whole, &Unwatched).unwrap().is_ok());
}

#[test]
fn a_record_that_cannot_be_used_is_an_error() {
    let tensor = TensorView::new(Dtype::U8, vec![3], b"abc").unwrap();
    for (record, words) in [
        ("no JSON", "is no record of checksums"),
        (r#"{"algorithm":"md4","tensors":{}}"#, "unknown algorithm `md4`"),
        (
            r#"{"algorithm":"xxh3","tensors":{"a":"00"}}"#,
            "tensor `a`: `00` is no digest of xxh3",
        ),
    ] {
        let bytes = to_vec(
            [("a", &tensor)],
            Some(&[("ingot.checksums", record)]),
            Format::Safetensors,
        )
        .unwrap();
        let (_folder, path) = file(&bytes);
        let error = verify(&path, None, &Unwatched).unwrap_err();
        assert_eq!(error.code(), "invalid-checksums");
        assert!(error.to_string().contains(words), "{error}");
    }
}

#[test]
fn names_without_a_tensor_are_reported() {
    let tensor = TensorView::new(Dtype::U8, vec![3], b"abc").unwrap();
    let record = r#"{"algorithm":"xxh3","tensors":{"gone":"0000000000000000"}}"#;
    let bytes = to_vec(
        [("a", &tensor)],
        Some(&[("ingot.checksums", record)]),
        Format::Safetensors,
    )
    .unwrap();
    let (_folder, path) = file(&bytes);
    let report = verify(&path, None, &Unwatched).unwrap();
    assert_eq!(
        (report.missing, report.unchecked),
        (vec!["gone".into()], vec!["a".into()])
    );
}

#[test]
fn definitions_over_tensors_ask_for_tensors() {
    let (_folder, path) = file(b"not tensors at all, whatever it is");
    for (name, definition) in Definition::all() {
        let of_tensors = matches!(name, "autov3" | "sshs_legacy" | "modelspec");
        assert_eq!(hash(&path, definition, &Unwatched).is_err(), of_tensors, "{name}");
        assert_eq!(Definition::from_name(name), Some(definition));
    }
}

/// Stops at the first look.
struct Stopped;

impl Watch for Stopped {
    fn interrupted(&self) -> bool {
        true
    }
}

#[test]
fn hashing_stops_when_asked_to() {
    let (_folder, path) = file(&pattern(20 << 20));
    let stopped = hash(&path, Definition::File(Algorithm::Sha256), &Stopped);
    assert!(matches!(stopped, Err(Error::Interrupted)), "{stopped:?}");
}
