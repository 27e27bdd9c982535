//! Tensors that share bytes, and would be two after loading.

use ingot_format::Quoted;
use ingot_io::{Footprint, overlapping};
use pyo3::prelude::*;

use crate::errors::about_tensor;
use crate::tensor::Imported;

/// Names that a message lists; a whole model may share one buffer.
const MAX_NAMED: usize = 5;

/// Fails when two tensors share bytes: the file would hold them twice, and whoever loads it would get two tensors
/// that no longer change together.
pub(crate) fn refuse_shared(py: Python<'_>, tensors: &[(&str, Imported)]) -> PyResult<()> {
    let mut extents: Vec<(usize, usize, usize)> = tensors
        .iter()
        .enumerate()
        .map(|(number, (_, tensor))| (tensor.extent(), number))
        .filter(|(extent, _)| !extent.is_empty())
        .map(|(extent, number)| (extent.start, extent.end, number))
        .collect();
    let by_name = |number: usize| tensors[number].0;
    extents.sort_unstable_by_key(|&(begin, end, number)| (begin, end, by_name(number)));
    // Extents that reach into each other, one after another, are one group. Only there can bytes be shared.
    let mut reach = 0;
    let groups = extents.chunk_by(|&(_, end, _), &(begin, _, _)| {
        reach = reach.max(end);
        begin < reach
    });
    for group in groups.filter(|group| group.len() > 1) {
        let names: Vec<&str> = group.iter().map(|&(_, _, number)| by_name(number)).collect();
        let footprints: Option<Vec<Footprint>> = group
            .iter()
            .map(|&(_, _, number)| tensors[number].1.footprint())
            .collect();
        let footprints = footprints.unwrap_or_default();
        if let Some((one, other)) = overlapping(&footprints) {
            // Of views with holes, some may lie in the holes of others.
            return Err(match footprints.iter().all(Footprint::is_one_run) {
                true => shares(py, &names),
                false => shares(py, &[names[one], names[other]]),
            });
        }
    }
    Ok(())
}

/// The error for these tensors.
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
