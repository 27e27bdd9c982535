//! Checkpoints whose tensors are computed while they are read, such as tensors that are stacked, converted or dequantised.
//!
//! A computed checkpoint is an [`Archive`] over a source of which only the header exists. A read of its data section
//! calls the makers of the tensors, which read the bytes that they need from the input checkpoint.

mod source;

use std::fmt::Debug;
use std::sync::Arc;

use ingot_format::{Dtype, Format, LayoutOptions, Order, Spec, StopFlag, layout_with};

use crate::checkpoint::Checkpoint;
use crate::error::{Error, Failure};
use crate::file::{Archive, Origin};
use source::Computed;

/// Computes the bytes of one tensor.
pub(crate) trait Make: Debug + Send + Sync {
    /// Return the number of bytes that are best computed together, such as the size of an element or of a block. Calls of
    /// [`Make::fill`] begin at a multiple of it and end at a multiple of it or at the end of the tensor.
    fn unit_nbytes(&self) -> usize {
        1
    }

    /// Fill `dest` with the bytes of the tensor from `begin` on. Many threads call this at once; scratch memory is bounded
    /// by a few MiB. Read inputs by [`Tensor::read_at`](crate::Tensor).
    ///
    /// # Errors
    /// Errors of reading the inputs, which name their file and tensor; [`Failure::Interrupted`] soon after `stop` is set.
    fn fill(&self, inputs: &Checkpoint, begin: u64, dest: &mut [u8], stop: StopFlag<'_>)
    -> Result<(), Error>;
}

/// A tensor of a computed checkpoint.
#[derive(Debug)]
pub(crate) struct Made {
    pub(crate) name: String,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<u64>,
    pub(crate) maker: Box<dyn Make>,
}

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

impl Made {
    fn spec(&self) -> Spec<'_> {
        Spec {
            name: &self.name,
            dtype: self.dtype,
            shape: &self.shape,
        }
    }
}
