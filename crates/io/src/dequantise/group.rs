//! The tensors that one quantised weight consists of.

use ingot_format::Dtype;

use super::matrix::{Decode, Matrix};
use crate::computed::Made;

/// A weight that several tensors store.
#[derive(Debug)]
pub(super) struct Group {
    /// The name of the weight.
    pub(super) name: String,
    pub(super) shape: Vec<u64>,
    /// The rows and columns that the decoder has.
    pub(super) matrix: [u64; 2],
    pub(super) decoder: Box<dyn Decode>,
    /// The names of the tensors that it consists of.
    pub(super) parts: Vec<String>,
}

impl Group {
    pub(super) fn made(self, dtype: Dtype) -> Made {
        let [rows, columns] = self.matrix;
        Made {
            name: self.name,
            dtype,
            shape: self.shape,
            maker: Box::new(Matrix::new(self.decoder, rows, columns, dtype)),
        }
    }
}
