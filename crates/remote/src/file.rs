//! A remote file of one version: its bytes, in ranges, as they come.

use std::io::{self, Read};
use std::ops::Range;
use std::sync::Mutex;

use ingot_format::{to_u64, to_usize};

use crate::fault::{Fault, FaultKind};
use crate::fetch::{Answer, Resource};
use crate::http::client::Response;
use crate::http::pace::{Deadline, Pace};
use crate::http::retry::Tries;
use crate::pin::{Pin, add_line, line};
use ingot_format::StopFlag;
use ingot_format::locked;

/// Bytes that the first request asks for. The headers of files of about 1,300 tensors fit, which is nearly every shard
/// of a model, so that nothing more need be asked. A new connection takes four round trips to bring as many, and every
/// doubling would cost one more, which is what asking for the rest costs where there is one.
pub const START_NBYTES: u64 = 128 << 10;

/// The same where many files are asked for, and only for their size and version.
const SHORT_START_NBYTES: u64 = 4 << 10;

/// A server that gives no parts may give a whole file of up to this size: no more than one part would have. Where more
/// than this is asked for, it may give as much.
const WHOLE_NBYTES: u64 = 8 << 20;

/// Bytes between two runs that are read and thrown away, rather than asking a second time: what a connection brings
/// while a request of some 10 ms is on its way.
pub const GAP_NBYTES: u64 = 128 << 10;

/// Bytes that memory is made for at once, where a file says how many there are.
const STEP_NBYTES: usize = 64 << 10;

/// As many connections as browsers and the clients of object stores keep to one host, give or take.
pub const READS_AT_ONCE: usize = 16;

/// Of what one process tells another: the commit of the Hub, and the region in which a bucket lies.
const COMMIT: &str = "commit";
const REGION: &str = "region";

/// The region of the bucket, where another process has [told](RemoteFile::told) it.
pub fn told_region(told: &str) -> Option<&str> {
    line(told, REGION)
}

/// A file behind a URL, of one version.
#[derive(Debug)]
pub struct RemoteFile {
    resource: Resource,
    pin: Pin,
    /// The first bytes, which came with the size.
    start: Vec<u8>,
    /// Whether the server gave the part that it was asked for, and not the file.
    gives_parts: bool,
    /// Whether the server gives no parts, and the file is too large to be kept in `start`.
    is_whole: bool,
    /// What was found when the file turned out to be another: its size, where that is known.
    changed: Mutex<Option<Option<u64>>>,
}

impl RemoteFile {
    /// A file of which another process has told the size, the [version](RemoteFile::told) and the first bytes: nothing is
    /// asked for. `None` where that was told of a file of another kind, such as one in a cache.
    pub fn known(resource: Resource, nbytes: u64, told: &str, start: Vec<u8>) -> Option<RemoteFile> {
        Some(RemoteFile {
            pin: Pin::of_lines(nbytes, told)?,
            resource: resource.of_commit(line(told, COMMIT).map(ToOwned::to_owned)),
            start,
            gives_parts: true,
            is_whole: false,
            changed: Mutex::new(None),
        })
    }

    /// Asks for the start of a file.
    pub fn begin(resource: Resource, start_nbytes: u64, stop: StopFlag<'_>) -> Result<RemoteFile, Fault> {
        RemoteFile::begun(resource, start_nbytes, WHOLE_NBYTES, WHOLE_NBYTES, stop)
    }

    /// The same, also of a server that gives no parts.
    pub fn of_whole(resource: Resource, stop: StopFlag<'_>) -> Result<RemoteFile, Fault> {
        RemoteFile::begun(resource, START_NBYTES, WHOLE_NBYTES, u64::MAX, stop)
    }

    /// The same, of one file of many, so that little of each is kept.
    pub fn of_many(resource: Resource, stop: StopFlag<'_>) -> Result<RemoteFile, Fault> {
        RemoteFile::begun(resource, SHORT_START_NBYTES, SHORT_START_NBYTES, u64::MAX, stop)
    }

    /// Of a server that gives no parts, files of up to `whole_nbytes` are taken, and those of up to `held_nbytes` at once.
    fn begun(
        resource: Resource,
        start_nbytes: u64,
        held_nbytes: u64,
        whole_nbytes: u64,
        stop: StopFlag<'_>,
    ) -> Result<RemoteFile, Fault> {
        let mut tries = Tries::new(&resource.client().options, stop);
        let begun = loop {
            match begin(&resource, start_nbytes, held_nbytes, whole_nbytes, tries.deadline) {
                Ok(begun) => break begun,
                Err(fault) => tries.after(fault)?,
            }
        };
        Ok(RemoteFile {
            resource,
            pin: begun.pin,
            start: begun.start,
            gives_parts: begun.gives_parts,
            is_whole: begun.is_whole,
            changed: Mutex::new(None),
        })
    }

    /// Its size in bytes.
    pub fn nbytes(&self) -> u64 {
        self.pin.nbytes
    }

    /// The first bytes, as many of them as were asked for.
    pub fn start(&self) -> &[u8] {
        &self.start
    }

    /// Asks for more of the first bytes, until there are `nbytes` of them.
    pub fn extend_start(&mut self, nbytes: u64, stop: StopFlag<'_>) -> Result<(), Fault> {
        let held = to_u64(self.start.len());
        if nbytes > held {
            let rest = self.ranges(held..nbytes, stop).all()?;
            self.start.extend_from_slice(&rest);
        }
        Ok(())
    }

    /// The commit of the Hub that the file is of.
    pub fn commit(&self) -> Option<String> {
        self.resource.linked().commit
    }

    /// The tag by which the Hub knows the file: the SHA-256 of one that is kept outside of Git.
    pub fn linked_etag(&self) -> Option<String> {
        self.resource.linked().etag
    }

    /// What no other file, and no other version of this one, is called; `None` where nothing tells versions apart.
    pub fn version(&self) -> Option<String> {
        Some(format!(
            "{}\n{}",
            self.resource.home().unsigned(),
            self.pin.version()?
        ))
    }

    /// What another process has to know of the version, beside the size, to read the rest of it: no secret. `None` where
    /// nothing tells versions apart, and where the server may give no parts.
    pub fn told(&self) -> Option<String> {
        let mut told = self.pin.to_lines();
        if told.is_empty() || !self.gives_parts {
            return None;
        }
        add_line(&mut told, COMMIT, self.commit().as_ref());
        add_line(&mut told, REGION, self.resource.client().options.region.as_ref());
        Some(told)
    }

    /// Whether it is given whole or not at all.
    pub fn is_whole(&self) -> bool {
        self.is_whole
    }

    /// All of its bytes, as they come.
    pub fn all<'s>(&'s self, stop: StopFlag<'s>) -> impl Read {
        self.reader(0..self.pin.nbytes, stop)
    }

    /// The bytes of a range that lies in the file, as they come.
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

    /// Lets go of the bytes that came with the size, unless they are the whole file.
    pub fn let_go(&mut self) {
        if to_u64(self.start.len()) < self.pin.nbytes {
            self.start = Vec::new();
        }
    }

    /// The size of the file as far as it is known by now: `None` where it was found to be another, of a size that
    /// nobody has said.
    pub fn nbytes_now(&self) -> Option<u64> {
        match *locked(&self.changed) {
            None => Some(self.pin.nbytes),
            Some(now) => now.filter(|&now| now != self.pin.nbytes),
        }
    }
}

/// What the first answer says.
#[derive(Default)]
struct Begun {
    /// The version, with the size.
    pin: Pin,
    start: Vec<u8>,
    gives_parts: bool,
    is_whole: bool,
}

/// Asks for the first bytes.
fn begin(
    resource: &Resource,
    nbytes: u64,
    held_nbytes: u64,
    whole_nbytes: u64,
    deadline: Deadline<'_>,
) -> Result<Begun, Fault> {
    let asked = 0..nbytes;
    let answer = resource.ask(&asked, None, deadline)?;
    let gives_parts = matches!(answer, Answer::Part { .. });
    let (response, expected, pin) = match answer {
        Answer::Nothing => return Ok(Begun::default()),
        // Its body is asked for when it is wanted.
        Answer::Whole {
            nbytes: Some(nbytes),
            pin,
            ..
        } if nbytes > held_nbytes && nbytes <= whole_nbytes => {
            return Ok(Begun {
                pin,
                start: Vec::new(),
                gives_parts: false,
                is_whole: true,
            });
        }
        Answer::Part { response, range, pin } => (response, Some(range.end), pin),
        Answer::Whole {
            response,
            nbytes,
            pin,
        } => (response, nbytes, pin),
    };
    let start = resource.body(response, expected, held_nbytes.max(nbytes), deadline)?;
    let start = start.ok_or(FaultKind::RangeIgnored {
        asked,
        nbytes: expected,
    })?;
    let pin = match expected {
        Some(_) => pin,
        None => pin.of(to_u64(start.len())),
    };
    Ok(Begun {
        pin,
        start,
        gives_parts,
        is_whole: false,
    })
}

/// The bytes of a range, as they come. What breaks off is asked for again, from where it broke off.
#[derive(Debug)]
struct RangeReader<'s> {
    file: &'s RemoteFile,
    /// What is still to come.
    range: Range<u64>,
    stop: StopFlag<'s>,
    open: Option<(Response, Pace<'s>)>,
    /// From the first request on.
    tries: Option<Tries<'s>>,
}

impl RangeReader<'_> {
    /// All of its bytes.
    fn all(mut self) -> Result<Vec<u8>, Fault> {
        let mut bytes = Vec::new();
        while !self.range.is_empty() {
            // As they come: how many there are is what the file says of itself.
            let at = bytes.len();
            bytes.resize(at + STEP_NBYTES, 0);
            let count = self.next(&mut bytes[at..])?;
            bytes.truncate(at + count);
        }
        Ok(bytes)
    }

    fn next(&mut self, dest: &mut [u8]) -> Result<usize, Fault> {
        loop {
            let left = self.range.end - self.range.start;
            if left == 0 || dest.is_empty() {
                return Ok(0);
            }
            let most = to_usize(left).unwrap_or(usize::MAX).min(dest.len());
            match self.attempt(&mut dest[..most]) {
                Ok(count) => {
                    self.range.start += to_u64(count);
                    if self.range.is_empty()
                        && let Some((response, _)) = self.open.take()
                    {
                        self.file.resource.client().give_back(response);
                    }
                    return Ok(count);
                }
                Err(fault) => {
                    // What came until then leaves time for the rest.
                    if let (Some((_, pace)), Some(tries)) = (self.open.take(), &mut self.tries) {
                        tries.deadline = pace.deadline();
                    }
                    if let FaultKind::Changed { nbytes_now } = fault.kind() {
                        locked(&self.file.changed).get_or_insert(*nbytes_now);
                    }
                    match &mut self.tries {
                        Some(tries) => tries.after(fault)?,
                        None => return Err(fault),
                    }
                }
            }
        }
    }

    /// Reads once; asks for what is left, where nothing is on its way.
    fn attempt(&mut self, dest: &mut [u8]) -> Result<usize, Fault> {
        let resource = &self.file.resource;
        let tries = self
            .tries
            .get_or_insert_with(|| Tries::new(&resource.client().options, self.stop));
        let (response, pace) = match &mut self.open {
            Some(open) => open,
            none => {
                let answer = resource.ask(&self.range, Some(&self.file.pin), tries.deadline)?;
                let response = part_of(answer, &self.range, &self.file.pin, self.file.is_whole)?;
                none.insert((response, resource.pace(tries.deadline)))
            }
        };
        match response.read(dest, pace)? {
            0 => Err(FaultKind::Short {
                expected: self.range.end - self.range.start,
                found: 0,
            }
            .into()),
            count => Ok(count),
        }
    }
}

/// Nothing but the part that was asked for: a whole file is not one, unless all of it was asked for.
fn part_of(answer: Answer, asked: &Range<u64>, pin: &Pin, is_whole: bool) -> Result<Response, Fault> {
    match answer {
        Answer::Part { response, range, .. } if range == *asked => Ok(response),
        Answer::Part { range, .. } => Err(FaultKind::OtherRange {
            asked: asked.clone(),
            got: format!("bytes {}..{}", range.start, range.end),
        }
        .into()),
        Answer::Nothing => Err(FaultKind::Changed { nbytes_now: Some(0) }.into()),
        Answer::Whole {
            response,
            nbytes,
            pin: here,
        } => {
            if nbytes.is_some() {
                pin.check(&here)?;
            }
            if is_whole && asked.start == 0 && nbytes.is_some() {
                Ok(response)
            } else {
                Err(FaultKind::RangeIgnored {
                    asked: asked.clone(),
                    nbytes,
                }
                .into())
            }
        }
    }
}

impl Read for RangeReader<'_> {
    fn read(&mut self, dest: &mut [u8]) -> io::Result<usize> {
        // A reader may begin among the bytes that came with the size.
        let held = to_usize(self.range.start)
            .and_then(|at| self.file.start.get(at..))
            .unwrap_or_default();
        if self.open.is_none() && !held.is_empty() {
            let left = to_usize(self.range.end - self.range.start).unwrap_or(usize::MAX);
            let count = held.len().min(dest.len()).min(left);
            dest[..count].copy_from_slice(&held[..count]);
            self.range.start += to_u64(count);
            return Ok(count);
        }
        Ok(self.next(dest)?)
    }
}
