//! Tensors that share bytes, and would be two after loading.

use ingot_format::Quoted;
use pyo3::prelude::*;

use crate::errors::about_tensor;
use crate::tensor::Imported;

/// Names that a message lists; a whole model may share one buffer.
const MAX_NAMED: usize = 5;

/// Fails when two tensors share bytes: the file would hold them twice, and whoever loads it would get two tensors
/// that no longer change together.
pub(crate) fn refuse_shared(py: Python<'_>, tensors: &[(&str, Imported)]) -> PyResult<()> {
    let mut ranges: Vec<_> = tensors
        .iter()
        .map(|(name, tensor)| (tensor.addresses(), *name))
        .filter(|((begin, end), _)| begin < end)
        .collect();
    ranges.sort_unstable();
    // Ranges that reach into each other, one after another, are one group.
    let mut reach = 0;
    let mut groups = ranges.chunk_by(|((_, end), _), ((begin, _), _)| {
        reach = reach.max(*end);
        *begin < reach
    });
    let Some(group) = groups.find(|group| group.len() > 1) else {
        return Ok(());
    };
    let first = group[0].1;
    let mut names: Vec<String> = group
        .iter()
        .take(MAX_NAMED)
        .map(|row| Quoted(row.1).to_string())
        .collect();
    if group.len() > MAX_NAMED {
        names.push(format!("and {} more", group.len() - MAX_NAMED));
    }
    let message = format!(
        "Some tensors share memory, this will lead to duplicate memory on disk and potential differences when \
         loading them again: {} — save with shared=\"alias\" or \"copy\", or save `tensor.clone()`",
        names.join(", ")
    );
    Err(about_tensor(
        py,
        "SharedMemoryError",
        "shared-memory",
        first,
        &message,
    ))
}
