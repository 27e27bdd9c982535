//! The files that tensors lie in.

use std::collections::BTreeMap;

use ingot_format::Header;

use crate::archive::{Archive, Tensor};
use crate::error::Error;
use crate::failure::InFile;
use crate::read::plan::TensorId;
use crate::source::Source;

/// Archives, each of them once, in the order in which tensors of them come.
#[derive(Debug, Default)]
pub(crate) struct Files<'a> {
    archives: Vec<&'a Archive>,
}

impl<'a> Files<'a> {
    /// The files of `tensors`, and which tensor each of them is.
    pub(crate) fn of(tensors: impl Iterator<Item = Tensor<'a>>) -> (Files<'a>, Vec<TensorId>) {
        let mut files = Files::default();
        // Archives do not move while tensors of them are there.
        let mut numbers: BTreeMap<*const Archive, usize> = BTreeMap::new();
        let mut last: Option<(&Archive, usize)> = None;
        let mut id = |tensor: Tensor<'a>| {
            let archive = tensor.archive();
            let file = match last {
                Some((same, file)) if std::ptr::eq(same, archive) => file,
                _ => *numbers.entry(std::ptr::from_ref(archive)).or_insert_with(|| {
                    files.archives.push(archive);
                    files.archives.len() - 1
                }),
            };
            last = Some((archive, file));
            let number = tensor.number();
            TensorId { file, number }
        };
        let ids = tensors.map(&mut id).collect();
        (files, ids)
    }

    pub(crate) fn archives(&self) -> &[&'a Archive] {
        &self.archives
    }

    pub(crate) fn headers(&self) -> Vec<&'a Header> {
        self.archives.iter().map(|archive| archive.header()).collect()
    }

    pub(crate) fn sources(&self) -> Vec<&'a dyn Source> {
        self.archives.iter().map(|archive| archive.source()).collect()
    }

    /// Fails when one is no longer what was opened.
    pub(crate) fn check_unchanged(&self) -> Result<(), Error> {
        self.archives
            .iter()
            .try_for_each(|archive| archive.check_unchanged())
    }

    /// Adds path and tensor to what went wrong below.
    pub(crate) fn explain(&self, fault: impl Into<InFile>) -> Error {
        let InFile { file, failure } = fault.into();
        match (file, &*self.archives) {
            (Some(file), archives) if file < archives.len() => archives[file].explain(failure),
            (None, [only]) => only.explain(failure),
            _ => failure.into(),
        }
    }
}
