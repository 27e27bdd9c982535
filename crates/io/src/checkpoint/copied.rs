//! Tensors as a file in memory.

use std::collections::HashMap;
use std::path::Path;

use ingot_format::safetensors::{TensorView, serialize};
use ingot_format::to_usize;

use crate::error::{Error, Failure};
use crate::file::{Archive, MemorySource, OpenSource, Origin, Tensor};
use crate::memory::Region;
use crate::options::OpenOptions;

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
    let bytes = views.and_then(|views| serialize(views, metadata));
    let bytes = bytes.map_err(|fault| Failure::Unstorable(fault).about(path, None))?;
    let source = Origin::Other(Box::new(OpenSource::new(MemorySource::new(bytes))));
    Archive::of(source, path, &OpenOptions::default(), None)
}
