//! Checkpoints whose tensors are computed while they are read, such as tensors that are stacked, converted or dequantised.
//!
//! A computed checkpoint is an [`Archive`] over a source that stores only the header. A read of its data section
//! calls the makers of the tensors, which read the bytes that they need from the input checkpoint.

mod assembly;
mod source;

use std::sync::Arc;

use ingot_format::{Dtype, Format, LayoutOptions, Order, layout_with};

use crate::checkpoint::Checkpoint;
use crate::error::{Error, Failure};
use crate::file::{Archive, Origin};
use assembly::Assembly;
pub use assembly::{Piece, Side};
use source::Computed;
pub(crate) use source::{Made, Make};

/// Return the checkpoint of the tensors `made` from `inputs`. Its data has the order of `made`. Errors about the computed
/// checkpoint name the path of `inputs`.
///
/// # Errors
/// [`Failure::Unstorable`] for a duplicate name, a shape that overflows, a dtype that `format` lacks.
pub(crate) fn compute(
    inputs: Arc<Checkpoint>,
    made: Vec<Made>,
    metadata: &[(&str, &str)],
    format: Format,
) -> Result<Checkpoint, Error> {
    let specs: Vec<_> = made.iter().map(Made::spec).collect();
    let metadata = (!metadata.is_empty()).then_some(metadata);
    let order = LayoutOptions {
        order: Order::Given,
        ..LayoutOptions::default()
    };
    let path = inputs.path().map(ToOwned::to_owned);
    let layout = layout_with(&specs, metadata, format, &order);
    let layout = layout.map_err(|fault| Failure::Unstorable(fault).about(path.as_deref(), None))?;
    let header = layout.header.clone();
    let origin = Origin::Other(Box::new(Computed::new(Arc::clone(&inputs), layout, made)));
    let archive = Archive::of_header(origin, path.as_deref(), header);
    Ok(Checkpoint::from(archive).computed_from(inputs))
}

/// A tensor that is put together from boxes of other tensors.
#[derive(Debug)]
pub struct Assembled {
    /// Its name.
    pub name: String,
    /// Its dtype, to which all pieces are converted.
    pub dtype: Dtype,
    /// Its shape.
    pub shape: Vec<u64>,
    /// Each element is in one piece.
    pub pieces: Vec<Piece>,
}

/// Return the checkpoint of these tensors, in the format of `inputs`, which stay open. Its data has the order of `tensors`.
///
/// # Errors
/// [`Failure::Pieces`] if the pieces of a tensor do not fit it or their inputs; [`Failure::Conversion`];
/// [`Failure::Unstorable`] for a duplicate name, a shape that overflows, a dtype that the format lacks.
pub fn remapped(
    inputs: Arc<Checkpoint>,
    tensors: Vec<Assembled>,
    metadata: &[(&str, &str)],
) -> Result<Checkpoint, Error> {
    let mut made = Vec::with_capacity(tensors.len());
    for Assembled {
        name,
        dtype,
        shape,
        pieces,
    } in tensors
    {
        let assembly = Assembly::new(&inputs, dtype, &shape, &pieces).map_err(|fault| fault.of(&name))?;
        let maker = Box::new(assembly);
        made.push(Made {
            name,
            dtype,
            shape,
            maker,
        });
    }
    let format = inputs.format()?;
    compute(inputs, made, metadata, format)
}
