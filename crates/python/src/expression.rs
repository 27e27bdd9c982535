//! Regular expressions that match in linear time. Python's take exponential time for some expressions.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use regex_lite::{Regex, RegexBuilder};

/// The most bytes of a compiled expression, which bound the time for each character.
const MAX_COMPILED_NBYTES: usize = 64 << 10;

/// A regular expression without look-around and references to groups.
#[pyclass(frozen, module = "ingot._native")]
pub(crate) struct Expression(Regex);

#[pymethods]
impl Expression {
    /// Compile an expression.
    #[new]
    fn new(pattern: &str) -> PyResult<Expression> {
        let compiled = RegexBuilder::new(pattern).size_limit(MAX_COMPILED_NBYTES).build();
        compiled
            .map(Expression)
            .map_err(|fault| PyValueError::new_err(fault.to_string()))
    }

    /// Return whether it matches any part of the text.
    fn matches(&self, text: &str) -> bool {
        self.0.is_match(text)
    }
}
