//! The mark at the beginning of a file to which a patch is applied in place. FORMAT.md, "In place".

use std::fs::File;
use std::path::Path;

use ingot_format::{UNFINISHED_PATCH, saturating_usize, to_u64};

use crate::digest::Algorithm;
use crate::error::{Error, PatchFault, unopened};
use crate::payload::FileRange;

/// The most bytes of a mark: a sector, which disks write as a whole.
const MARK_NBYTES: usize = 512;

/// Bytes of a mark before the path of the patch.
pub(super) const FACTS_NBYTES: usize = UNFINISHED_PATCH.len() + 4 + 3 * 16;

/// What a mark records, besides the path of the patch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Mark {
    /// The number of the file in its checkpoint.
    pub(super) number: u32,
    /// The [`short`] id of the patch.
    pub(super) patch: u128,
    /// The [`short`] id of the file before the patch, computed as if the file was the whole version.
    pub(super) file: u128,
    /// The [`base_of`] all files before the patch.
    pub(super) base: u128,
}

/// Return the first half of an id of 64 hexadecimal digits.
pub(super) fn short(id: &str) -> u128 {
    id.get(..32)
        .and_then(|digits| u128::from_str_radix(digits, 16).ok())
        .unwrap_or_default()
}

/// Return the short id of the base whose files have these short ids.
pub(super) fn base_of(files: &[u128]) -> u128 {
    let bytes: Vec<u8> = files.iter().flat_map(|id| id.to_be_bytes()).collect();
    short(&Algorithm::Blake3.digest(&bytes).to_string())
}

impl Mark {
    /// Read the mark at the beginning of a file; `None` if it has none.
    ///
    /// # Errors
    /// The mark names a patch with another short id, or reading fails.
    pub(super) fn of(path: &Path, file: &File, patch: u128) -> Result<Option<Mark>, Error> {
        let nbytes = file.metadata().map_err(unopened(path))?.len();
        // A shorter file is padded with zeros, which are the id of no patch.
        let mut start = [0; MARK_NBYTES];
        let filled = MARK_NBYTES.min(saturating_usize(nbytes));
        FileRange::new(file, 0, to_u64(filled))
            .read(0, &mut start[..filled])
            .map_err(unopened(path))?;
        let Some((mark, path_of_patch)) = Mark::parse(&start) else {
            return Ok(None);
        };
        if mark.patch == patch {
            return Ok(Some(mark));
        }
        let unfinished = PatchFault::Unfinished {
            patch: format!("{:016x}", mark.patch >> 64),
            path: String::from_utf8_lossy(path_of_patch).into_owned(),
        };
        Err(unfinished.about(Some(path)))
    }

    /// Return a description of the file: its number, and the version.
    pub(super) fn origin(&self) -> String {
        format!("file {} of the version {:032x}", self.number, self.base)
    }

    /// Read a mark, and the path of its patch.
    fn parse(start: &[u8]) -> Option<(Mark, &[u8])> {
        let (number, rest) = start.strip_prefix(UNFINISHED_PATCH)?.split_first_chunk()?;
        let (patch, rest) = rest.split_first_chunk()?;
        let (file, rest) = rest.split_first_chunk()?;
        let (base, rest) = rest.split_first_chunk()?;
        let mark = Mark {
            number: u32::from_le_bytes(*number),
            patch: u128::from_be_bytes(*patch),
            file: u128::from_be_bytes(*file),
            base: u128::from_be_bytes(*base),
        };
        Some((mark, rest.split(|byte| *byte == 0).next().unwrap_or_default()))
    }

    /// Return the bytes of the mark. The path of the patch is for the error only.
    pub(super) fn render(&self, path: Option<&Path>) -> Vec<u8> {
        let mut bytes = UNFINISHED_PATCH.to_vec();
        bytes.extend_from_slice(&self.number.to_le_bytes());
        for id in [self.patch, self.file, self.base] {
            bytes.extend_from_slice(&id.to_be_bytes());
        }
        if let Some(path) = path {
            let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
            bytes.extend_from_slice(path.to_string_lossy().as_bytes());
        }
        bytes.push(0);
        bytes.truncate(MARK_NBYTES);
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_is_read_as_it_was_written() {
        let mark = Mark {
            number: 7,
            patch: short(&"12".repeat(32)),
            file: 3,
            base: u128::MAX,
        };
        for path in ["/a/ö", &*format!("/{}", "b".repeat(600))] {
            let bytes = mark.render(Some(Path::new(path)));
            let (found, path_of_patch) = Mark::parse(&bytes).unwrap();
            assert_eq!((found, bytes.len() <= MARK_NBYTES), (mark, true));
            let path = std::path::absolute(path).unwrap();
            assert!(path.to_str().unwrap().as_bytes().starts_with(path_of_patch));
            assert!(!path_of_patch.is_empty());
        }
        let bytes = mark.render(None);
        assert_eq!(bytes.len(), FACTS_NBYTES + 1);
        assert_eq!(Mark::parse(&bytes[..FACTS_NBYTES]), Some((mark, &b""[..])));
        assert_eq!(Mark::parse(&bytes[..FACTS_NBYTES - 1]), None);
    }
}
