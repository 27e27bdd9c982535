//! Hashes by the definitions of other tools.

use std::fs;

use ingot_inspect::{Definition, hash};
use ingot_io::Unwatched;

#[test]
fn definitions_over_tensors_ask_for_tensors() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    fs::write(&path, b"not tensors at all, whatever it is").unwrap();
    for (name, definition) in Definition::all() {
        let of_tensors = matches!(name, "autov3" | "sshs_legacy" | "modelspec");
        assert_eq!(hash(&path, definition, &Unwatched).is_err(), of_tensors, "{name}");
        assert_eq!(Definition::from_name(name), Some(definition));
    }
}
