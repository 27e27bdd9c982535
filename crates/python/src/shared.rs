//! Detects tensors that share memory, which would have separate memory after loading.

use ingot_format::Quoted;
use ingot_io::binding::{Footprint, crowds, overlapping};
use pyo3::prelude::*;

use crate::errors::about_tensor;
use crate::tensor::Imported;

/// The most names in a message, since all tensors of a model may share one buffer.
const MAX_NAMED: usize = 5;

/// Raise if two tensors share memory. The file would contain the bytes twice, and after loading a change of one tensor
/// would not change the other.
pub(crate) fn refuse_shared(py: Python<'_>, tensors: &[(&str, Imported)]) -> PyResult<()> {
    let (names, footprints): (Vec<&str>, Vec<Footprint>) = tensors
        .iter()
        .filter_map(|(name, tensor)| Some((*name, tensor.footprint()?)))
        .unzip();
    let Some((one, other)) = overlapping(&footprints) else {
        return Ok(());
    };
    let crowd = crowds(&footprints)
        .into_iter()
        .find(|crowd| crowd.contains(&one))
        .filter(|crowd| crowd.iter().all(|&number| footprints[number].is_one_run()));
    // Views with gaps may not overlap even if their extents do.
    let mut group = crowd.unwrap_or_else(|| vec![one, other]);
    group.sort_unstable_by_key(|&number| {
        let extent = footprints[number].extent();
        (extent.start, extent.end, names[number])
    });
    let group: Vec<&str> = group.into_iter().map(|number| names[number]).collect();
    Err(shares(py, &group))
}

/// Return the error for these tensors.
fn shares(py: Python<'_>, group: &[&str]) -> PyErr {
    let mut names: Vec<String> = group
        .iter()
        .take(MAX_NAMED)
        .map(|name| Quoted(name).to_string())
        .collect();
    if group.len() > MAX_NAMED {
        names.push(format!("and {} more", group.len() - MAX_NAMED));
    }
    let message = format!(
        "Some tensors share memory, this will lead to duplicate memory on disk and potential differences when \
         loading them again: {} — save with shared=\"alias\" or \"copy\", or save `tensor.clone()`",
        names.join(", ")
    );
    about_tensor(py, "SharedMemoryError", "shared-memory", group[0], &message)
}
