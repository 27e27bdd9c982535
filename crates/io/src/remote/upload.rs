//! Saving to a store: parts of a file are filled from the payloads and sent at once, in bounded memory and without a copy
//! on the disk.
//!
//! A part is a copy of its bytes, so that a part that is sent again has the same bytes. All parts have one size, except the
//! last. Parts with bytes of the header go last if the header keeps digests of the data.

use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use ingot_format::{FormatError, StopFlag, saturating_usize, to_u64};
use ingot_remote::{Client, Fault, Location, Part, Parts, RemoteOptions, Upload, redacted};

use super::session::{fault_of, region_of};
use crate::digest::{NewHeader, Sealing};
use crate::error::{Error, Failure, Step, of_step, step, unstorable};
use crate::file::{LocalFile, ReadAt, check_unchanged, read_exactly};
use crate::pages::Pages;
use crate::payload::{Gather, Payload};
use crate::save::{Closing, Ending, PIECE, Pieces, Ring, Snapshot};
use crate::sync::{AtomicUsize, Mutex, Ordering, locked};
use crate::watch::{Asked, POLL, Watch};
use crate::workers::{Team, watched};

/// The largest file that is sent in one request.
const WHOLE_NBYTES: u64 = 16 << 20;
/// The smallest part. Stores accept 5 MiB; larger parts need fewer requests.
const PART_NBYTES: u64 = 8 << 20;
/// The most parts of a file, in all stores.
const MOST_PARTS: u64 = 10_000;
/// Parts that are sent at once: as many as are read from a URL at once.
const AT_ONCE: usize = 16;
/// Bytes of all parts in memory, unless a single one is larger.
const MEMORY_NBYTES: u64 = 192 << 20;

/// How a file is saved to a store.
#[derive(Clone, Debug)]
pub struct UploadOptions {
    /// Replace an object that exists. If not, the request of the store that makes the object is a conditional one.
    pub overwrite: bool,
    /// How the store is reached.
    pub remote: RemoteOptions,
}

/// Write the file that consists of `pieces` to the object at `url`.
///
/// The object appears when it is complete, or not at all. The parts of a failed upload are removed; the parts of a process
/// that was killed stay, invisible, until a lifecycle rule of the bucket removes them.
///
/// # Errors
/// [`Failure::Open`] if the object exists and is to be kept, the URL cannot be written to, or an option does not fit;
/// [`Failure::Unstorable`] if `pieces` could not be made; [`Failure::Write`], which contains a [`Fault`], or the error of a
/// payload; [`Failure::Interrupted`].
pub fn upload_pieces(
    url: &str,
    pieces: Result<Pieces<'_>, FormatError>,
    options: &UploadOptions,
    watch: &dyn Watch,
) -> Result<(), Error> {
    let shown = redacted(url);
    let path = Path::new(&shown);
    let pieces = pieces.map_err(unstorable(path))?;
    in_region(&options.remote, |remote| {
        let begin = |stop: StopFlag<'_>| begin(url, remote, options.overwrite, stop);
        let upload = waited(begin, path, watch)?;
        write(&upload, &pieces, path, watch)
    })
}

/// Write the file at `file`, which may have any contents, to the object at `url`, and return its size.
///
/// # Errors
/// As [`upload_pieces`]. [`Failure::Open`], [`Failure::Read`] and [`Failure::Changed`] of the file: no object is made from a
/// file that was written to meanwhile.
pub fn upload_file(file: &Path, url: &str, options: &UploadOptions, watch: &dyn Watch) -> Result<u64, Error> {
    let whole = WholeFile::open(file)?;
    let payload = [Payload::Gathered(&whole)];
    upload_pieces(url, Ok(Pieces::of_bytes(&payload)), options, watch)?;
    Ok(whole.nbytes())
}

/// Fail if an object of `nbytes` bytes that is written to `url` later, without replacing another, could not be written: if
/// an object exists, or if the store would replace it.
///
/// # Errors
/// As [`upload_pieces`].
pub fn check_upload(url: &str, nbytes: u64, remote: &RemoteOptions, watch: &dyn Watch) -> Result<(), Error> {
    let shown = redacted(url);
    let check = |remote: &RemoteOptions, stop: StopFlag<'_>| {
        let upload = begin(url, remote, false, stop)?;
        upload.check_absent(stop)?;
        upload.check_condition(PartPlan::new(nbytes).count > 1, stop)
    };
    in_region(remote, |remote| {
        waited(|stop| check(remote, stop), Path::new(&shown), watch)
    })
}

/// Remove the objects at `urls`, and return how many are removed: all before the first that the store refuses to remove.
///
/// # Errors
/// The error of the first object, if the store refuses to remove it; [`Failure::Interrupted`].
pub fn remove_objects(urls: &[String], remote: &RemoteOptions, watch: &dyn Watch) -> Result<usize, Error> {
    let mut removed = 0;
    for url in urls {
        let shown = redacted(url);
        let outcome = in_region(remote, |remote| {
            let remove = |stop: StopFlag<'_>| begin(url, remote, true, stop)?.remove(stop);
            waited(remove, Path::new(&shown), watch)
        });
        match outcome {
            Ok(()) => removed += 1,
            Err(_) if removed > 0 => break,
            Err(error) => return Err(error),
        }
    }
    Ok(removed)
}

/// Call `work` with the options, and again with the region of the bucket if the store names another one.
fn in_region<T>(
    remote: &RemoteOptions,
    work: impl Fn(&RemoteOptions) -> Result<T, Error>,
) -> Result<T, Error> {
    match work(remote) {
        Err(error) if remote.region.is_none() && region_of(&error).is_some() => {
            let mut remote = remote.clone();
            remote.region = region_of(&error).map(ToOwned::to_owned);
            work(&remote)
        }
        outcome => outcome,
    }
}

/// A file that must not change while it is read.
#[derive(Debug)]
struct WholeFile<'p> {
    file: LocalFile,
    path: &'p Path,
}

impl WholeFile<'_> {
    fn open(path: &Path) -> Result<WholeFile<'_>, Error> {
        let file = LocalFile::open(path)?;
        Ok(WholeFile { file, path })
    }
}

impl Gather for WholeFile<'_> {
    fn nbytes(&self) -> u64 {
        self.file.nbytes()
    }

    fn waits(&self) -> bool {
        false
    }

    fn read(&self, begin: u64, into: &mut [u8], stop: StopFlag<'_>) -> io::Result<()> {
        let read = read_exactly(&self.file, begin, into, stop);
        // After each read: the bytes of all parts are then of one version.
        let unchanged = check_unchanged(&self.file, Some(self.path));
        let read = read.map_err(|failure| failure.about(Some(self.path), None));
        unchanged.and(read).map_err(io::Error::other)
    }
}

impl Snapshot {
    /// Write the file of `head`, for which the copy was taken, to the object at `url`.
    ///
    /// # Errors
    /// As [`upload_pieces`].
    pub fn upload(
        &self,
        url: &str,
        head: &NewHeader,
        options: &UploadOptions,
        watch: &dyn Watch,
    ) -> Result<(), Error> {
        upload_pieces(url, Pieces::of_all(head, &self.payloads()), options, watch)
    }
}

fn begin(url: &str, options: &RemoteOptions, overwrite: bool, stop: StopFlag<'_>) -> Result<Upload, Fault> {
    match Location::find(url, options, stop)? {
        Location::Remote(remote) => Upload::new(&Arc::new(Client::new(options.clone())), &remote, overwrite),
        Location::Cached(..) => Err(Fault::address("expected a URL of a store")),
    }
}

fn write(upload: &Upload, pieces: &Pieces<'_>, path: &Path, watch: &dyn Watch) -> Result<(), Error> {
    let plan = PartPlan::new(pieces.nbytes());
    waited(|stop| upload.check_condition(plan.count > 1, stop), path, watch)?;
    if plan.count == 1 {
        return send_all(&Sink::Whole(upload), plan, pieces, path, watch);
    }
    match write_parts(upload, plan, pieces, path, watch) {
        Err(error) if fault_of(&error).is_some_and(|fault| upload.needs_new_parts(fault)) => {
            write_parts(upload, plan, pieces, path, watch)
        }
        outcome => outcome,
    }
}

fn write_parts(
    upload: &Upload,
    plan: PartPlan,
    pieces: &Pieces<'_>,
    path: &Path,
    watch: &dyn Watch,
) -> Result<(), Error> {
    let sink = Sink::Parts(waited(|stop| upload.parts(stop), path, watch)?);
    let sent = send_all(&sink, plan, pieces, path, watch);
    if let (Err(_), Sink::Parts(parts)) = (&sent, &sink) {
        parts.abort();
    }
    sent
}

/// Return the result of requests, while this thread polls the watch.
fn waited<T: Send>(
    work: impl FnOnce(StopFlag<'_>) -> Result<T, Fault> + Send,
    path: &Path,
    watch: &dyn Watch,
) -> Result<T, Error> {
    let outcome = watched(true, work, &Asked(watch))?;
    outcome.map_err(|fault| failed(path, fault))
}

fn failed(path: &Path, fault: Fault) -> Error {
    let failure = match fault.code() {
        "interrupted" => Failure::Interrupted,
        "exists" | "unconditional-store" => Failure::Open(fault.into()),
        _ if fault.is_misuse() => Failure::Open(fault.into()),
        _ => {
            return of_step(step::UPLOAD, fault.into()).in_save(path, 0);
        }
    };
    failure.about(Some(path), None)
}

/// How a file is divided into parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PartPlan {
    /// A whole number of pieces.
    pieces: usize,
    count: usize,
}

impl PartPlan {
    fn new(nbytes: u64) -> PartPlan {
        let part_nbytes = if nbytes <= WHOLE_NBYTES {
            nbytes.max(1)
        } else {
            nbytes.div_ceil(MOST_PARTS).max(PART_NBYTES)
        };
        let pieces = part_nbytes.div_ceil(to_u64(PIECE));
        let part_nbytes = pieces.saturating_mul(to_u64(PIECE));
        PartPlan {
            pieces: saturating_usize(pieces),
            count: saturating_usize(nbytes.div_ceil(part_nbytes).max(1)),
        }
    }

    fn part_nbytes(self) -> usize {
        self.pieces.saturating_mul(PIECE)
    }

    /// Return the parts that are sent at once.
    fn at_once(self) -> usize {
        let most = saturating_usize(MEMORY_NBYTES / to_u64(self.part_nbytes()));
        self.count.min(most.clamp(1, AT_ONCE))
    }
}

/// The object that the parts become.
enum Sink<'u> {
    /// In one request.
    Whole(&'u Upload),
    Parts(Parts<'u>),
}

impl Sink<'_> {
    fn send(&self, number: usize, bytes: &[u8], stop: StopFlag<'_>) -> Result<Option<Part>, Fault> {
        match self {
            Sink::Whole(upload) => upload.put(bytes, stop).map(|()| None),
            Sink::Parts(parts) => {
                let number = u32::try_from(number + 1).unwrap_or(u32::MAX);
                parts.send(number, bytes, stop).map(Some)
            }
        }
    }
}

/// Send all parts, and complete the object.
fn send_all(
    sink: &Sink<'_>,
    plan: PartPlan,
    pieces: &Pieces<'_>,
    path: &Path,
    watch: &dyn Watch,
) -> Result<(), Error> {
    let threads = plan.at_once();
    let buffers = if pieces.fetched.is_empty() { 0 } else { threads + 1 };
    let mut sender = PartSender {
        pieces,
        plan,
        sink,
        path,
        sealing: pieces.sealed.map(NewHeader::begin),
        next: AtomicUsize::new(0),
        team: Team::new(pieces.nbytes(), watch),
        ring: Ring::new(buffers, plan.part_nbytes()).step(step::UPLOAD)?,
        held: Mutex::default(),
        sent: Mutex::new(vec![None; plan.count]),
    };
    sender.send_with(threads)?;
    sender.send_held(watch)?;
    let Sink::Parts(parts) = sink else {
        return Ok(());
    };
    let sent = std::mem::take(&mut *locked(&sender.sent));
    let all: Vec<Part> = sent.into_iter().flatten().collect();
    if all.len() != plan.count {
        let message = format!("{} parts were sent, expected {}", all.len(), plan.count);
        return Err(io::Error::new(io::ErrorKind::UnexpectedEof, message)).step(step::UPLOAD);
    }
    // A watch may stop the call because a source of the bytes has changed.
    if watch.interrupted() {
        return Err(Failure::Interrupted.into());
    }
    waited(|stop| parts.complete(&all, pieces.nbytes(), stop), path, watch)
}

struct PartSender<'w, 'a> {
    pieces: &'w Pieces<'a>,
    plan: PartPlan,
    sink: &'w Sink<'w>,
    path: &'w Path,
    sealing: Option<Sealing<'w>>,
    /// The next part that no thread has taken.
    next: AtomicUsize,
    team: Team<'w, Error>,
    /// Parts that the calling thread has filled.
    ring: Ring,
    /// Parts with bytes of a header that keeps digests, or the whole object.
    held: Mutex<Vec<(usize, Pages)>>,
    sent: Mutex<Vec<Option<Part>>>,
}

impl PartSender<'_, '_> {
    fn send_with(&self, threads: usize) -> Result<(), Error> {
        let failing = |outcome: Result<(), Error>| outcome.unwrap_or_else(|fault| self.team.fail(fault));
        let work = || {
            let mut ending = Ending(self.sealing.as_ref());
            match self.work() {
                Ok(()) => ending.0 = None,
                Err(fault) => self.team.fail(fault),
            }
        };
        if !self
            .team
            .spread("ingot-upload", threads, work, || failing(self.fetch()))
        {
            let source = io::Error::from(io::ErrorKind::OutOfMemory);
            return Err(source)
                .step("start a thread")
                .map_err(|fault: Error| fault.in_save(self.path, 0));
        }
        self.team.tell();
        self.team.outcome()
    }

    /// Send parts: those that the calling thread fills, or else any.
    fn work(&self) -> Result<(), Error> {
        if !self.pieces.fetched.is_empty() {
            while !self.team.stopped()
                && let Some((part, buffer)) = self.ring.next()
            {
                let buffer = match self.send(part, buffer)? {
                    Some(buffer) => buffer,
                    None => self.buffer()?,
                };
                self.ring.give_back(buffer);
            }
            return Ok(());
        }
        let mut spare = None;
        while !self.team.stopped() {
            let part = self.next.fetch_add(1, Ordering::Relaxed);
            if part >= self.plan.count {
                break;
            }
            let mut buffer = match spare.take() {
                Some(buffer) => buffer,
                None => self.buffer()?,
            };
            self.fill(part, &mut buffer)?;
            spare = self.send(part, buffer)?;
        }
        Ok(())
    }

    /// Fill all parts on the calling thread, since only it can read some payloads.
    fn fetch(&self) -> Result<(), Error> {
        let _closing = Closing(&self.ring);
        if self.pieces.fetched.is_empty() {
            return Ok(());
        }
        for part in 0..self.plan.count {
            let mut buffer = loop {
                if !self.team.poll() {
                    return Ok(());
                }
                if let Some(buffer) = self.ring.empty(POLL) {
                    break buffer;
                }
            };
            self.fill(part, &mut buffer)?;
            self.ring.put(part, buffer);
        }
        Ok(())
    }

    fn buffer(&self) -> Result<Pages, Error> {
        let nbytes = self.plan.part_nbytes();
        Pages::allocate(nbytes).map_err(|source| {
            Failure::OutOfMemory {
                nbytes: to_u64(nbytes),
                source: Some(source),
            }
            .into()
        })
    }

    /// Copy the bytes of a part, and compute their digests.
    fn fill(&self, part: usize, buffer: &mut Pages) -> Result<(), Error> {
        let first = part * self.plan.pieces;
        let mut begin = 0;
        for piece in first..self.pieces.count().min(first + self.plan.pieces) {
            let len = self.pieces.len(piece);
            let bytes = &mut buffer.bytes_mut()[begin..begin + len];
            let filled = self.pieces.fill(piece, bytes, self.team.stop());
            filled.map_err(|source| of_step(step::READ, source).in_save(self.path, 0))?;
            if let Some(sealing) = &self.sealing {
                sealing.feed(self.pieces.range(piece).start, bytes);
            }
            begin += len;
        }
        Ok(())
    }

    /// Send a part, or keep it until the digests are known, or until all bytes are read if it is the whole object. Returns
    /// the buffer after it was sent.
    fn send(&self, part: usize, buffer: Pages) -> Result<Option<Pages>, Error> {
        let range = self.range(part);
        let kept = if self.head_end() > range.start || matches!(self.sink, Sink::Whole(_)) {
            locked(&self.held).push((part, buffer));
            None
        } else {
            self.send_bytes(part, &buffer, self.team.stop())?;
            Some(buffer)
        };
        self.team.did(range.end - range.start);
        Ok(kept)
    }

    fn send_bytes(&self, part: usize, buffer: &Pages, stop: StopFlag<'_>) -> Result<(), Error> {
        let range = self.range(part);
        let bytes = &buffer.bytes()[..saturating_usize(range.end - range.start)];
        let sent = self.sink.send(part, bytes, stop);
        locked(&self.sent)[part] = sent.map_err(|fault| failed(self.path, fault))?;
        Ok(())
    }

    /// Send the parts that were kept, with the digests in the header, unless the watch stops the call.
    fn send_held(&mut self, watch: &dyn Watch) -> Result<(), Error> {
        if watch.interrupted() {
            return Err(Failure::Interrupted.into());
        }
        let head = match self.sealing.take() {
            Some(sealing) => {
                let sealed = sealing.layout().step(step::SEAL);
                sealed.map_err(|fault| fault.in_save(self.path, 0))?.head
            }
            None => Vec::new(),
        };
        let mut held = std::mem::take(&mut *locked(&self.held));
        // In order: a failure is then the same each time.
        held.sort_by_key(|(part, _)| *part);
        let this = &*self;
        let send = |stop: StopFlag<'_>| {
            for (part, mut buffer) in held {
                let Range { start, end } = this.range(part);
                let start = saturating_usize(start).min(head.len());
                let end = saturating_usize(end).min(head.len());
                buffer.bytes_mut()[..end - start].copy_from_slice(&head[start..end]);
                this.send_bytes(part, &buffer, stop)?;
            }
            Ok(())
        };
        watched(true, send, &Asked(watch))?
    }

    /// Return the end of the header that is not complete before all data is read, or zero.
    fn head_end(&self) -> u64 {
        self.pieces
            .sealed
            .map_or(0, |new| to_u64(new.layout().head.len()))
    }

    /// Return the range of a part in the file.
    fn range(&self, part: usize) -> Range<u64> {
        let part_nbytes = to_u64(self.plan.part_nbytes());
        let start = to_u64(part).saturating_mul(part_nbytes);
        start..start.saturating_add(part_nbytes).min(self.pieces.nbytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_have_one_size_and_their_number_is_limited() {
        const MIB: u64 = 1 << 20;
        for (nbytes, part_nbytes, count) in [
            (0, 4 * MIB, 1),
            (1, 4 * MIB, 1),
            (16 * MIB, 16 * MIB, 1),
            (16 * MIB + 1, 8 * MIB, 3),
            (80_000 * MIB, 8 * MIB, 10_000),
            (80_000 * MIB + 1, 12 * MIB, 6_667),
            (5 << 40, 528 * MIB, 9_930),
        ] {
            let plan = PartPlan::new(nbytes);
            assert_eq!(
                (to_u64(plan.part_nbytes()), to_u64(plan.count)),
                (part_nbytes, count),
                "{nbytes}"
            );
            let memory = to_u64(plan.at_once()) * part_nbytes;
            assert!(memory <= MEMORY_NBYTES || plan.at_once() == 1);
        }
    }
}
