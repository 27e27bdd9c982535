//! Reading the header of a file.

use std::path::Path;

use ingot_format::{Header, HeaderWindow, Limits, to_u64, to_usize};

use crate::error::{Error, Failure};
use crate::source::{Source, read_exactly};

/// Bytes that the first read takes, and those of a long header that lie in memory at a time. Most headers are shorter,
/// so that it is the only read; and it is little enough to stay in a core's cache.
const START_NBYTES: u64 = 64 << 10;

/// Bytes of the length before the header.
const PREFIX_NBYTES: usize = 8;

/// Reads the header into memory of our own, never from a mapping: what was checked cannot change afterwards.
/// `path` is for the errors.
pub(crate) fn read_header(
    source: &dyn Source,
    path: Option<&Path>,
    limits: &Limits,
) -> Result<Header, Error> {
    let in_file = |fault| Error::Header {
        path: path.map(Path::to_owned),
        fault,
    };
    let unread = |failure: Failure| failure.about(path, None);
    let mut start = vec![0; size(source.nbytes().min(START_NBYTES))];
    read_exactly(source, 0, &mut start).map_err(unread)?;
    let head_nbytes = Header::head_nbytes(&start, source.nbytes(), limits).map_err(in_file)?;
    if head_nbytes > to_u64(start.len()) {
        if let Some(header) = read_through_window(source, head_nbytes, &mut start).map_err(unread)? {
            return Ok(header);
        }
        // The window was written over.
        start.resize(size(head_nbytes), 0);
        read_exactly(source, 0, &mut start).map_err(unread)?;
    }
    Header::parse(&start, source.nbytes(), limits).map_err(in_file)
}

/// Reads a header that is as common writers write it, without ever holding all of it: half of the time that opening
/// 100,000 tensors took went into fresh pages for its 13 MB. `window` holds the start of the file, and then one part
/// of the header after the other. `None` means that the header has to be read whole.
fn read_through_window(
    source: &dyn Source,
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
        let more = size(head_nbytes - position).min(window.len() - end);
        read_exactly(source, position, &mut window[end..end + more])?;
        position += to_u64(more);
        end += more;
    }
}

/// A size that memory can have; one that it cannot have fails when it is asked for.
fn size(nbytes: u64) -> usize {
    to_usize(nbytes).unwrap_or(usize::MAX)
}
