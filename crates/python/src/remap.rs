//! Tensors that are put together from parts of other tensors.

use ingot_format::Dtype;
use ingot_io::binding::{Assembled, Piece, Side};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// Name, dtype, shape and pieces of a tensor.
pub(crate) type NewTensor = (String, String, Vec<u64>, Vec<NewPiece>);

/// The name of the input, its first element, the sides (begin, count, step, stride), and the dtypes of the casts.
type NewPiece = (String, u64, Vec<(u64, u64, u64, u64)>, Vec<String>);

/// Return the tensor that Python describes.
pub(crate) fn assembled(
    py: Python<'_>,
    inputs: &ingot_io::Checkpoint,
    (name, dtype, shape, pieces): NewTensor,
) -> PyResult<Assembled> {
    let piece = |(input, input_begin, sides, casts): NewPiece| {
        let input = inputs.id(&input);
        let sides = sides.into_iter().map(|(begin, count, step, stride)| Side {
            begin,
            count,
            step,
            stride,
        });
        Ok(Piece {
            input: input.map_err(|error| crate::errors::raise(py, &error))?,
            input_begin,
            sides: sides.collect(),
            casts: casts.iter().map(|code| dtype_of(code)).collect::<PyResult<_>>()?,
        })
    };
    Ok(Assembled {
        dtype: dtype_of(&dtype)?,
        pieces: pieces.into_iter().map(piece).collect::<PyResult<_>>()?,
        name,
        shape,
    })
}

fn dtype_of(code: &str) -> PyResult<Dtype> {
    Dtype::from_code(code).ok_or_else(|| PyValueError::new_err(format!("unknown dtype {code:?}")))
}
