//! The folder for the files of the targets `journal` and `records`.

use std::path::PathBuf;

/// Returns a path for a file of this process. `scripts/fuzz` passes a folder in memory, and removes leftovers.
pub fn place(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("ingot-fuzz-{}-{name}", std::process::id()))
}
