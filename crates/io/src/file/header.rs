//! The header of a file, read here or by another process.

use std::path::Path;

use ingot_format::{Header, HeaderWindow, Limits, StopFlag, saturating_usize, to_u64};

use super::read_at::{ReadAt, read_exactly};
use crate::error::{Error, Failure};

/// The headers of a checkpoint's files that one process read, so that others open the checkpoint without reading them
/// ([`Checkpoint::open_with`](crate::Checkpoint::open_with)). Empty by default.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ShardHeaders {
    /// The index as JSON, if there is one.
    pub index: Option<Vec<u8>>,
    /// The headers, in the order of the file names.
    pub files: Vec<ShardHeader>,
}

/// The header of one version of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardHeader {
    /// The size of the file.
    pub nbytes: u64,
    /// The version, as the file system or the server reports it.
    pub version: String,
    /// The bytes before the data section.
    pub bytes: Vec<u8>,
}

impl ShardHeaders {
    /// Return the header of the only file.
    pub(crate) fn of_file(&self) -> Option<&ShardHeader> {
        match (&self.index, &*self.files) {
            (None, [only]) => Some(only),
            _ => None,
        }
    }

    /// Return the index and the version of the first shard.
    #[cfg(feature = "remote")]
    pub(crate) fn of_index(&self) -> Option<(&[u8], &str)> {
        Some((self.index.as_deref()?, &self.files.first()?.version))
    }

    /// Return the header of shard `number`.
    pub(crate) fn of_shard(&self, number: usize) -> Option<&ShardHeader> {
        self.index.as_ref().and(self.files.get(number))
    }
}

impl ShardHeader {
    /// Read the header of `source` for other processes. `None` if they read it as fast themselves.
    pub(super) fn read(
        source: &dyn ReadAt,
        header: &Header,
        stop: StopFlag<'_>,
    ) -> Result<Option<ShardHeader>, Failure> {
        let Some(version) = source.version() else {
            return Ok(None);
        };
        let mut bytes = vec![0; saturating_usize(header.data_start())];
        read_exactly(source, 0, &mut bytes, stop)?;
        Ok(Some(ShardHeader {
            nbytes: source.nbytes(),
            version,
            bytes,
        }))
    }

    /// Return whether `source` has the version that was read.
    pub(super) fn is_of(&self, source: &dyn ReadAt) -> bool {
        self.nbytes == source.nbytes() && source.version().as_ref() == Some(&self.version)
    }
}

/// Bytes that the first read takes, and those of a long header that lie in memory at a time. Most headers are shorter,
/// so that it is the only read; and it is little enough to stay in a core's cache.
pub(crate) const START_NBYTES: u64 = 64 << 10;

/// Bytes of the length before the header.
const PREFIX_NBYTES: usize = 8;

/// Reads the header into memory of our own, never from a mapping: what was checked cannot change afterwards.
/// `path` is for the errors.
///
/// # Errors
/// [`Error::Header`]; [`Error::Read`].
pub fn read_header(source: &dyn ReadAt, path: Option<&Path>, limits: &Limits) -> Result<Header, Error> {
    let in_file = |fault| Error::Header {
        path: path.map(Path::to_owned),
        fault,
    };
    let unread = |failure: Failure| failure.about(path, None);
    let mut start = vec![0; saturating_usize(source.nbytes().min(START_NBYTES))];
    read_exactly(source, 0, &mut start, StopFlag::never()).map_err(unread)?;
    let head_nbytes = Header::head_nbytes(&start, source.nbytes(), limits).map_err(in_file)?;
    if head_nbytes > to_u64(start.len()) {
        // Each window is a read, and where it is beginning one that costs, one more read for all of it costs less.
        if source.gap_nbytes() == 0
            && let Some(header) = read_through_window(source, head_nbytes, &mut start).map_err(unread)?
        {
            return Ok(header);
        }
        // The window was written over.
        start.resize(saturating_usize(head_nbytes), 0);
        read_exactly(source, 0, &mut start, StopFlag::never()).map_err(unread)?;
    }
    Header::parse(&start, source.nbytes(), limits).map_err(in_file)
}

/// Reads a header that is as common writers write it, without ever holding all of it: half of the time that opening
/// 100,000 tensors took went into fresh pages for its 13 MB. `window` holds the start of the file, and then one part
/// of the header after the other. `None` means that the header has to be read whole.
fn read_through_window(
    source: &dyn ReadAt,
    head_nbytes: u64,
    window: &mut [u8],
) -> Result<Option<Header>, Failure> {
    let mut header = HeaderWindow::new(head_nbytes, source.nbytes());
    let (mut position, mut begin, mut end) = (to_u64(window.len()), PREFIX_NBYTES, window.len());
    loop {
        match header.feed(&window[begin..end]) {
            None | Some(0) => return Ok(None),
            Some(taken) => begin += taken,
        }
        if begin == end && position == head_nbytes {
            return Ok(header.finish());
        }
        window.copy_within(begin..end, 0);
        (begin, end) = (0, end - begin);
        let more = saturating_usize(head_nbytes - position).min(window.len() - end);
        read_exactly(source, position, &mut window[end..end + more], StopFlag::never())?;
        position += to_u64(more);
        end += more;
    }
}
