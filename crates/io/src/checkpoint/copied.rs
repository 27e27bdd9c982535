//! Tensors as a file in memory.

use std::collections::HashMap;
use std::path::Path;

use ingot_format::safetensors::{TensorView, serialize};
use ingot_format::{Limits, to_usize};

use crate::error::Error;
use crate::file::{Archive, Given, MemorySource, Tensor};
use crate::memory::Region;

/// Return a file in memory with these tensors and this metadata. `regions` are the bytes of the tensors. Errors name `path`.
pub(crate) fn copied<'a>(
    tensors: &[Tensor<'a>],
    regions: &'a [Region],
    metadata: Option<HashMap<String, String>>,
    path: Option<&Path>,
) -> Result<Archive, Error> {
    let view = |(tensor, region): (&Tensor<'a>, &'a Region)| {
        let entry = tensor.entry();
        let shape = entry.shape.iter().filter_map(|&size| to_usize(size)).collect();
        // The regions are private memory. A mapping cannot be borrowed, and would have too few bytes here.
        TensorView::new(entry.dtype, shape, region.as_slice().unwrap_or_default())
            .map(|view| (entry.name, view))
    };
    let views = tensors
        .iter()
        .zip(regions)
        .map(view)
        .collect::<Result<Vec<_>, _>>();
    let path = path.map(Path::to_owned);
    let bytes = views.and_then(|views| serialize(views, metadata));
    let bytes = bytes.map_err(|fault| Error::Unstorable {
        path: path.clone(),
        fault,
    })?;
    let source = Box::new(Given::new(MemorySource::new(bytes)));
    Archive::from_reader(source, path, "memory", "a copy of tensors", &Limits::default())
}
