//! Where a target makes its files: for the targets `journal` and `records`.

use std::path::PathBuf;

/// A file of this process. `scripts/fuzz` gives a folder in memory, and takes away what is left in it.
pub fn place(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("ingot-fuzz-{}-{name}", std::process::id()))
}
