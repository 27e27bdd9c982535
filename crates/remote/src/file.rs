//! A remote file of one version, read in ranges.

use std::io::{self, Read};
use std::ops::Range;
use std::sync::Mutex;

use ingot_format::{StopFlag, locked, to_u64, to_usize};

use crate::fault::{FaultKind, Result};
use crate::fetch::{Answer, Resource};
use crate::http::client::Response;
use crate::http::pace::{Deadline, Pace};
use crate::http::retry::Tries;
use crate::options::RemoteOptions;
use crate::pin::{Pin, add_line, line};

/// Bytes of the first request. The header of a file with about 1,300 tensors fits, which is nearly every shard of a
/// model. A new connection takes four round trips to send as many. Twice as many would take one more, which is as long as
/// a second request for a longer header.
pub const START_NBYTES: u64 = 128 << 10;

/// Bytes of the first request if only the sizes and versions of many files are needed.
const SHORT_START_NBYTES: u64 = 4 << 10;

/// Largest file that is read whole from a server without ranges: as large as one range, or as the request if that is
/// larger.
const WHOLE_NBYTES: u64 = 8 << 20;

/// Gaps of at most this many bytes are read and discarded instead of starting a new request: a connection brings as many
/// while a request of 10 ms is on its way.
pub const GAP_NBYTES: u64 = 128 << 10;

/// Most bytes of one allocation for the start of a file. Its size is a claim of the file.
const STEP_NBYTES: usize = 64 << 10;

/// Connections to one host at once, about as many as browsers and the clients of object stores use.
pub const READS_AT_ONCE: usize = 16;

/// Keys of the lines for another process: the commit of the Hub, and the region of a bucket.
const COMMIT: &str = "commit";
const REGION: &str = "region";

/// Return the region of the bucket in the [description](RemoteFile::description) from another process.
pub fn described_region(description: &str) -> Option<&str> {
    line(description, REGION)
}

/// A file behind a URL, of one version.
#[derive(Debug)]
pub struct RemoteFile {
    resource: Resource,
    pin: Pin,
    /// The first bytes, which the first answer brought.
    start: Vec<u8>,
    /// Whether the server sent the requested range and not the whole file.
    gives_parts: bool,
    /// Whether the server sends no ranges, and the file is too large for `start`.
    is_whole: bool,
    /// The size of the file after it was replaced, if it was, and if that is known.
    changed: Mutex<Option<Option<u64>>>,
}

impl RemoteFile {
    /// Return a file from the size, the [description](RemoteFile::description) and the first bytes that another process
    /// read. Nothing is requested. `None` if the description is of another kind of file, such as one in a cache.
    pub fn known(resource: Resource, nbytes: u64, description: &str, start: Vec<u8>) -> Option<RemoteFile> {
        let commit = line(description, COMMIT).map(ToOwned::to_owned);
        Some(RemoteFile {
            pin: Pin::of_lines(nbytes, description)?,
            resource: resource.of_commit(commit),
            start,
            gives_parts: true,
            is_whole: false,
            changed: Mutex::new(None),
        })
    }

    /// Open a file with a request for its first bytes.
    pub fn begin(resource: Resource, start_nbytes: u64, stop: StopFlag<'_>) -> Result<RemoteFile> {
        RemoteFile::begun(resource, start_nbytes, [WHOLE_NBYTES, WHOLE_NBYTES], stop)
    }

    /// Open a file that will be read whole, also from a server without ranges.
    pub fn of_whole(resource: Resource, stop: StopFlag<'_>) -> Result<RemoteFile> {
        RemoteFile::begun(resource, START_NBYTES, [WHOLE_NBYTES, u64::MAX], stop)
    }

    /// Open one of many files that will be read whole, with little memory for each.
    pub fn of_many(resource: Resource, stop: StopFlag<'_>) -> Result<RemoteFile> {
        RemoteFile::begun(resource, SHORT_START_NBYTES, [SHORT_START_NBYTES, u64::MAX], stop)
    }

    /// Open a file. From a server without ranges, files of up to `held` bytes are kept in memory, and larger ones of up to
    /// `whole` bytes are read later.
    fn begun(
        resource: Resource,
        start: u64,
        [held, whole]: [u64; 2],
        stop: StopFlag<'_>,
    ) -> Result<RemoteFile> {
        let attempt = |deadline: Deadline<'_>| {
            let asked = 0..start;
            let answer = resource.ask(&asked, None, deadline)?;
            let (mut pin, expected) = (answer.pin.clone(), answer.nbytes);
            let gives_parts = answer.part.is_some();
            if !gives_parts && expected.is_some_and(|nbytes| nbytes > held && nbytes <= whole) {
                return Ok((pin, None, gives_parts));
            }
            let body = resource.body(answer, held.max(start), deadline)?;
            let body = body.ok_or(FaultKind::RangeIgnored(asked, expected))?;
            if expected.is_none() {
                pin.nbytes = to_u64(body.len());
            }
            Ok((pin, Some(body), gives_parts))
        };
        let (pin, start, gives_parts) = Tries::new(&resource.client().options, stop).run(attempt)?;
        Ok(RemoteFile {
            resource,
            pin,
            is_whole: start.is_none(),
            start: start.unwrap_or_default(),
            gives_parts,
            changed: Mutex::new(None),
        })
    }

    /// Return the size in bytes.
    pub fn nbytes(&self) -> u64 {
        self.pin.nbytes
    }

    /// Return the first bytes, as many as were requested.
    pub fn start(&self) -> &[u8] {
        &self.start
    }

    /// Request more of the first bytes, until there are `nbytes` of them.
    pub fn extend_start(&mut self, nbytes: u64, stop: StopFlag<'_>) -> Result<()> {
        let held = to_u64(self.start.len());
        if nbytes > held {
            let rest = self.ranges(held..nbytes, stop).all()?;
            self.start.extend_from_slice(&rest);
        }
        Ok(())
    }

    /// Return the commit of the Hub that the file is of.
    pub fn commit(&self) -> Option<String> {
        self.resource.linked().commit
    }

    /// Return the tag of the Hub: the SHA-256 of a file that is stored outside Git.
    pub fn linked_etag(&self) -> Option<String> {
        self.resource.linked().etag
    }

    /// Return a text that no other file and no other version has, or `None` if the server does not distinguish versions.
    pub fn version(&self) -> Option<String> {
        let (url, version) = (self.resource.home().unsigned(), self.pin.version()?);
        Some(format!("{url}\n{version}"))
    }

    /// Return a text that differs between all versions of the file, for a cache of its bytes. `None` if the server names
    /// neither a strong tag nor a commit, or sends no ranges.
    pub fn cache_version(&self) -> Option<String> {
        let version = || Some(format!("commit {}", self.commit()?));
        self.gives_parts
            .then(|| self.pin.strong_version().or_else(version))?
    }

    /// Return the name of the file in a cache.
    pub fn cache_name(&self) -> String {
        self.resource.cache_name()
    }

    /// Return the options of requests.
    pub fn options(&self) -> &RemoteOptions {
        self.resource.client().options()
    }

    /// Return the version as lines that another process needs, beside the size, to read the rest of the file. They are
    /// not secret. `None` if the server does not distinguish versions or may not send ranges.
    pub fn description(&self) -> Option<String> {
        let mut lines = self.pin.to_lines();
        if lines.is_empty() || !self.gives_parts {
            return None;
        }
        add_line(&mut lines, COMMIT, self.commit().as_ref());
        add_line(&mut lines, REGION, self.resource.client().options.region.as_ref());
        Some(lines)
    }

    /// Whether the server sends no ranges, so that the file can only be read whole.
    pub fn is_whole(&self) -> bool {
        self.is_whole
    }

    /// Return a reader of the whole file.
    pub fn all<'s>(&'s self, stop: StopFlag<'s>) -> impl Read {
        self.reader(0..self.pin.nbytes, stop)
    }

    /// Return a reader of a range, which must lie in the file.
    pub fn reader<'s>(&'s self, range: Range<u64>, stop: StopFlag<'s>) -> impl Read + 's {
        self.ranges(range, stop)
    }

    fn ranges<'s>(&'s self, range: Range<u64>, stop: StopFlag<'s>) -> RangeReader<'s> {
        RangeReader {
            file: self,
            range,
            stop,
            open: None,
            tries: None,
        }
    }

    /// Free the first bytes, unless they are the whole file.
    pub fn free_start(&mut self) {
        if to_u64(self.start.len()) < self.pin.nbytes {
            self.start = Vec::new();
        }
    }

    /// Return the last known size: `None` if the file was replaced by one whose size is unknown.
    pub fn nbytes_now(&self) -> Option<u64> {
        match *locked(&self.changed) {
            None => Some(self.pin.nbytes),
            Some(now) => now.filter(|&now| now != self.pin.nbytes),
        }
    }
}

/// A reader of a range. After a failure it requests the rest again.
#[derive(Debug)]
struct RangeReader<'s> {
    file: &'s RemoteFile,
    /// The bytes that are not read yet.
    range: Range<u64>,
    stop: StopFlag<'s>,
    open: Option<(Response, Pace<'s>)>,
    /// `None` before the first request.
    tries: Option<Tries<'s>>,
}

impl<'s> RangeReader<'s> {
    /// Read the whole range.
    fn all(mut self) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        while !self.range.is_empty() {
            let at = bytes.len();
            bytes.resize(at + STEP_NBYTES, 0);
            let count = self.next(&mut bytes[at..])?;
            bytes.truncate(at + count);
        }
        Ok(bytes)
    }

    fn left(&self) -> usize {
        to_usize(self.range.end - self.range.start).unwrap_or(usize::MAX)
    }

    fn tries(&mut self) -> &mut Tries<'s> {
        let options = &self.file.resource.client().options;
        self.tries.get_or_insert_with(|| Tries::new(options, self.stop))
    }

    fn next(&mut self, dest: &mut [u8]) -> Result<usize> {
        let most = self.left().min(dest.len());
        if most == 0 {
            return Ok(0);
        }
        loop {
            let fault = match self.attempt(&mut dest[..most]) {
                Ok(count) => {
                    self.range.start += to_u64(count);
                    if self.range.is_empty()
                        && let Some((response, _)) = self.open.take()
                    {
                        self.file.resource.client().give_back(response);
                    }
                    return Ok(count);
                }
                Err(fault) => fault,
            };
            // The progress so far has renewed the deadline.
            if let Some((_, pace)) = self.open.take() {
                self.tries().deadline = pace.deadline();
            }
            if let FaultKind::Changed(now) = fault.kind() {
                locked(&self.file.changed).get_or_insert(*now);
            }
            self.tries().after(fault)?;
        }
    }

    /// Read once, after a request for the rest of the range unless its answer is being read.
    fn attempt(&mut self, dest: &mut [u8]) -> Result<usize> {
        let deadline = self.tries().deadline;
        let file = self.file;
        let (response, pace) = match &mut self.open {
            Some(open) => open,
            none => {
                let answer = file.resource.ask(&self.range, Some(&file.pin), deadline)?;
                let response = file.checked(answer, &self.range)?;
                none.insert((response, file.resource.pace(deadline)))
            }
        };
        match response.read(dest, pace)? {
            0 => Err(FaultKind::Short(self.range.end - self.range.start, 0).into()),
            count => Ok(count),
        }
    }
}

impl RemoteFile {
    /// Check that an answer has the requested range. A whole file will do only if it was requested from its start.
    fn checked(&self, answer: Answer, asked: &Range<u64>) -> Result<Response> {
        let (part, nbytes) = (answer.part, answer.nbytes);
        if let Some(part) = part {
            if part == *asked {
                return Ok(answer.response);
            }
            let got = format!("bytes {}..{}", part.start, part.end);
            return Err(FaultKind::OtherRange(asked.clone(), got).into());
        }
        if nbytes.is_some() {
            self.pin.check(&answer.pin)?;
        }
        if self.is_whole && asked.start == 0 && nbytes.is_some() {
            return Ok(answer.response);
        }
        Err(FaultKind::RangeIgnored(asked.clone(), nbytes).into())
    }
}

impl Read for RangeReader<'_> {
    fn read(&mut self, dest: &mut [u8]) -> io::Result<usize> {
        // The range may begin in the bytes of the first answer.
        let held = to_usize(self.range.start).and_then(|at| self.file.start.get(at..));
        let held = held.unwrap_or_default();
        if self.open.is_none() && !held.is_empty() {
            let count = held.len().min(dest.len()).min(self.left());
            dest[..count].copy_from_slice(&held[..count]);
            self.range.start += to_u64(count);
            return Ok(count);
        }
        Ok(self.next(dest)?)
    }
}
