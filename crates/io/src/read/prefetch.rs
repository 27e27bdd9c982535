//! Reading tensors in the background, before they are used.

use std::sync::Arc;
use std::time::Duration;

use ingot_format::Index;

use super::buffer::Buffer;
use super::job::Job;
use super::{Part, about, read_to, warm_behind_mappings};
use crate::checkpoint::Checkpoint;
use crate::device::Onto;
use crate::error::{Error, Failure};
use crate::file::{Tensor, TensorId};
use crate::options::ReadOptions;
use crate::sync::thread::{self, JoinHandle};
use crate::sync::{Condvar, Mutex, MutexGuard, PoisonError, locked};
use crate::watch::Watch;

/// How often a waiting caller checks whether to stop.
const WATCH_INTERVAL: Duration = Duration::from_millis(50);

/// The largest share of the bytes ahead in one batch: while one batch is returned, others are read.
const PARTS: u64 = 4;

/// A tensor to read, or a part of it.
#[derive(Clone, Debug)]
pub struct Request {
    /// The tensor, as [`Checkpoint::id`] returns it.
    pub tensor: TensorId,
    /// The part to read; `None` for the whole tensor.
    pub index: Option<Vec<Index>>,
    /// The device to read onto; `None` for the host.
    pub onto: Option<Arc<Onto>>,
}

/// Tensors that a thread reads in the background, each handed out once.
///
/// Tensors that wait to be handed out take no more memory than `ahead` allows, or than one tensor if that is larger. If the
/// file is mapped, its bytes are brought into the page cache, and the tensors are views. Dropping it stops the thread, waits
/// for it, and frees the tensors that were not handed out.
///
/// ```
/// use std::sync::Arc;
///
/// use ingot_io::binding::{Prefetch, Request};
/// use ingot_io::{Checkpoint, CheckpointOptions, Dtype, ReadOptions, TensorView, Unwatched, serialize_to_file};
///
/// let folder = tempfile::tempdir()?;
/// let path = folder.path().join("model.safetensors");
/// let two = TensorView::new(Dtype::F32, vec![2], b"12345678")?;
/// serialize_to_file([("a", &two), ("b", &two)], None, &path)?;
///
/// let model = Arc::new(Checkpoint::open(&path, &CheckpointOptions::default())?);
/// let request = |name| Ok::<_, ingot_io::Error>(Request { tensor: model.id(name)?, index: None, onto: None });
/// let requests = vec![request("b")?, request("a")?];
/// let ahead = Prefetch::new(Arc::clone(&model), requests, 64 << 20, ReadOptions::default());
/// while let Some((rank, fetched)) = ahead.next(&Unwatched)? {
///     println!("{rank}: {:?}", fetched.shape);
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Prefetch {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
    process: u32,
}

#[derive(Debug)]
struct Shared {
    checkpoint: Arc<Checkpoint>,
    requests: Vec<Request>,
    options: ReadOptions,
    ahead: u64,
    state: Mutex<Progress>,
    changed: Condvar,
}

#[derive(Debug)]
struct Progress {
    slots: Vec<RequestState>,
    /// The first request that the thread has not started.
    begun: usize,
    /// The first request that was not returned.
    first: usize,
    /// Bytes that are read or being read, but not returned yet.
    held: u64,
    /// Whether the thread will continue to read.
    is_running: bool,
    /// Whether the thread waits for space.
    is_full: bool,
    is_closed: bool,
}

#[derive(Debug)]
enum RequestState {
    Waiting,
    Reading,
    Ready(Result<Part, Error>),
    Taken,
}

impl Prefetch {
    /// Start to read `requests`, in this order, with at most `ahead` bytes waiting to be returned.
    #[must_use]
    pub fn new(
        checkpoint: Arc<Checkpoint>,
        requests: Vec<Request>,
        ahead: u64,
        options: ReadOptions,
    ) -> Prefetch {
        let state = Progress {
            slots: requests.iter().map(|_| RequestState::Waiting).collect(),
            begun: 0,
            first: 0,
            held: 0,
            is_running: true,
            is_full: false,
            is_closed: false,
        };
        let shared = Arc::new(Shared {
            checkpoint,
            requests,
            options,
            ahead,
            state: Mutex::new(state),
            changed: Condvar::new(),
        });
        let of_thread = Arc::clone(&shared);
        let thread = thread::Builder::new()
            .name("ingot-prefetch".to_owned())
            .spawn(move || {
                // Even if the thread panics, so that no caller waits for it forever.
                let _leave = Leave(&of_thread);
                of_thread.read_all();
            })
            .ok();
        if thread.is_none() {
            // The system refuses the thread: each caller reads its tensor.
            shared.locked().is_running = false;
        }
        Prefetch {
            shared,
            thread: Mutex::new(thread),
            process: std::process::id(),
        }
    }

    /// Wait for the next request that was not handed out, and return it with its place among the requests; `None` after the
    /// last.
    ///
    /// # Errors
    /// The error of reading it, once; [`Failure::Interrupted`] if `watch` stops the wait; [`Failure::Closed`].
    pub fn next(&self, watch: &dyn Watch) -> Result<Option<(usize, Part)>, Error> {
        self.refuse_child()?;
        let first = self.shared.locked().first;
        for rank in first..self.shared.requests.len() {
            let part = self.take(rank, watch);
            if !part.as_ref().is_err_and(Error::is_interrupted) {
                self.shared.locked().first = rank + 1;
            }
            if let Some(part) = part? {
                return Ok(Some((rank, part)));
            }
        }
        Ok(None)
    }

    /// Wait for request `rank`, and return it; `None` if it was returned before, or there are fewer. If the thread has
    /// not started it, the caller reads it at once.
    ///
    /// # Errors
    /// As [`Prefetch::next`].
    pub fn take(&self, rank: usize, watch: &dyn Watch) -> Result<Option<Part>, Error> {
        self.refuse_child()?;
        let shared = &self.shared;
        let mut state = shared.locked();
        loop {
            if state.is_closed {
                return Err(shared.closed());
            }
            let is_next = state.begun == rank && state.is_running && !state.is_full;
            match state.slots.get_mut(rank) {
                None | Some(RequestState::Taken) => return Ok(None),
                Some(slot @ RequestState::Waiting) if !is_next => {
                    *slot = RequestState::Taken;
                    drop(state);
                    let part = shared.read(rank, watch);
                    if part.as_ref().is_err_and(Error::is_interrupted) {
                        // Nothing was handed out: the next call returns it.
                        shared.put_back(rank);
                    }
                    return part.map(Some);
                }
                Some(slot @ RequestState::Ready(_)) => {
                    if let RequestState::Ready(outcome) = std::mem::replace(slot, RequestState::Taken) {
                        state.held = state.held.saturating_sub(shared.nbytes(rank));
                        shared.changed.notify_all();
                        return outcome.map(Some);
                    }
                }
                Some(RequestState::Waiting | RequestState::Reading) => {}
            }
            state = shared
                .changed
                .wait_timeout(state, WATCH_INTERVAL)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
            drop(state);
            if watch.interrupted() {
                return Err(Failure::Interrupted.into());
            }
            state = shared.locked();
        }
    }

    /// Fail in a child after a fork, which has no reading thread and whose locks may stay locked forever.
    fn refuse_child(&self) -> Result<(), Error> {
        if self.process == std::process::id() {
            Ok(())
        } else {
            Err(self.shared.closed())
        }
    }

    /// Stops reading and frees the remaining tensors. May be called more than once.
    pub fn close(&self) {
        if self.refuse_child().is_err() {
            return;
        }
        let thread = locked(&self.thread).take();
        {
            let mut state = self.shared.locked();
            state.is_closed = true;
            state.slots.clear();
        }
        self.shared.changed.notify_all();
        if let Some(thread) = thread {
            // A panic in it has been reported on its own thread.
            let _ = thread.join();
        }
    }
}

impl Drop for Prefetch {
    fn drop(&mut self) {
        self.close();
        // In a child the thread belongs to the parent, so it can be neither joined nor detached.
        let thread = self.thread.get_mut().unwrap_or_else(PoisonError::into_inner);
        std::mem::forget(thread.take());
    }
}

impl Watch for Shared {
    fn interrupted(&self) -> bool {
        self.locked().is_closed
    }
}

impl Shared {
    /// The work of the thread.
    fn read_all(&self) {
        while let Some(ranks) = self.next_batch() {
            let outcomes = self.read_batch(ranks);
            let mut state = self.locked();
            for (rank, outcome) in outcomes {
                if let Some(slot @ RequestState::Reading) = state.slots.get_mut(rank) {
                    *slot = RequestState::Ready(outcome);
                }
            }
            drop(state);
            self.changed.notify_all();
        }
    }

    /// Wait for space, and return the ranks to read next; `None` at the end.
    fn next_batch(&self) -> Option<Vec<usize>> {
        let mut state = self.locked();
        loop {
            while matches!(state.slots.get(state.begun), Some(RequestState::Taken)) {
                state.begun += 1;
            }
            if state.is_closed || state.begun >= self.requests.len() {
                return None;
            }
            let (ranks, nbytes) = self.batch(&state);
            if state.held == 0 || state.held.saturating_add(nbytes) <= self.ahead {
                for &rank in &ranks {
                    state.slots[rank] = RequestState::Reading;
                    state.begun = rank + 1;
                }
                state.held += nbytes;
                return Some(ranks);
            }
            state.is_full = true;
            self.changed.notify_all();
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.is_full = false;
        }
    }

    /// The requests of the next batch, and the number of their bytes.
    fn batch(&self, state: &Progress) -> (Vec<usize>, u64) {
        let (mut ranks, mut total) = (Vec::new(), 0_u64);
        for rank in state.begun..self.requests.len() {
            if !matches!(state.slots[rank], RequestState::Waiting) {
                continue;
            }
            let nbytes = self.nbytes(rank);
            if !ranks.is_empty() && total.saturating_add(nbytes) > self.ahead / PARTS {
                break;
            }
            ranks.push(rank);
            total = total.saturating_add(nbytes);
        }
        (ranks, total)
    }

    /// Read a batch at once, or one by one if that fails, so that each request has its own error.
    fn read_batch(&self, ranks: Vec<usize>) -> Vec<(usize, Result<Part, Error>)> {
        if let Ok(fetched) = self.read_at_once(&ranks, self) {
            return ranks.into_iter().zip(fetched.into_iter().map(Ok)).collect();
        }
        let wanted = ranks.into_iter().take_while(|_| !self.interrupted());
        wanted.map(|rank| (rank, self.read(rank, self))).collect()
    }

    fn read_at_once(&self, ranks: &[usize], watch: &dyn Watch) -> Result<Vec<Part>, Error> {
        let jobs = ranks.iter().map(|&rank| self.job(rank));
        let jobs = jobs.collect::<Result<Vec<_>, _>>()?;
        let whole = ranks.iter().zip(&jobs).filter(|(rank, _)| {
            self.requests[**rank].index.is_none() && self.requests[**rank].onto.is_none()
        });
        let tensors: Vec<Tensor<'_>> = whole.map(|(_, job)| *job.tensor()).collect();
        warm_behind_mappings(&tensors, &self.options, self)?;
        let buffers = read_to(&jobs, &self.options, watch)?;
        Ok(jobs.iter().zip(buffers).map(fetched).collect())
    }

    fn read(&self, rank: usize, watch: &dyn Watch) -> Result<Part, Error> {
        let job = self.job(rank)?;
        let buffers = about(&job, read_to([&job], &self.options, watch));
        // One job has one buffer.
        Ok(fetched((&job, buffers?.swap_remove(0))))
    }

    fn job(&self, rank: usize) -> Result<Job<'_>, Error> {
        let request = &self.requests[rank];
        let tensor = self.checkpoint.tensor(request.tensor)?;
        let job = Job::new(tensor, request.index.as_deref().unwrap_or_default(), None)?;
        Ok(job.onto(request.onto.as_deref()))
    }

    fn put_back(&self, rank: usize) {
        let mut state = self.locked();
        state.begun = state.begun.min(rank);
        if let Some(slot) = state.slots.get_mut(rank) {
            *slot = RequestState::Waiting;
        }
    }

    /// The bytes that count for a request: never less than it takes.
    fn nbytes(&self, rank: usize) -> u64 {
        let tensor = self.checkpoint.tensor(self.requests[rank].tensor);
        tensor.map_or(0, |tensor| tensor.entry().nbytes())
    }

    fn closed(&self) -> Error {
        Failure::Closed.about(self.checkpoint.path(), None)
    }

    fn locked(&self) -> MutexGuard<'_, Progress> {
        locked(&self.state)
    }
}

fn fetched((job, buffer): (&Job<'_>, Buffer)) -> Part {
    Part {
        shape: job.shape().to_owned(),
        buffer,
        strides: None,
    }
}

/// Records, when dropped, that the thread has ended.
struct Leave<'a>(&'a Shared);

impl Drop for Leave<'_> {
    fn drop(&mut self) {
        let mut state = self.0.locked();
        state.is_running = false;
        // The callers that wait for these read them.
        for slot in &mut state.slots {
            if matches!(slot, RequestState::Reading) {
                *slot = RequestState::Waiting;
            }
        }
        drop(state);
        self.0.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use ingot_format::to_u64;

    use super::*;
    use crate::options::CheckpointOptions;
    use crate::serialize::safetensors::{Dtype, TensorView, serialize};
    use crate::sync::in_every_order;
    use crate::watch::Unwatched;

    const NBYTES: usize = 100;

    /// Start to read all tensors, and hold two at most.
    fn ahead(path: &Path) -> Prefetch {
        let model = Arc::new(Checkpoint::open(path, &CheckpointOptions::default()).unwrap());
        let request = |name| Request {
            tensor: model.id(name).unwrap(),
            index: None,
            onto: None,
        };
        let requests = NAMES.map(request).to_vec();
        Prefetch::new(model, requests, 2 * to_u64(NBYTES), ReadOptions::default())
    }

    fn letter(fetched: &Part) -> char {
        match &fetched.buffer {
            Buffer::Host(region) => char::from(region.to_vec()[NBYTES - 1]),
            Buffer::Device(_) => panic!("it was asked for in the memory of the host"),
        }
    }

    const NAMES: [&str; 5] = ["a", "b", "c", "d", "e"];

    /// Runs `test` on a file of tensors that hold their names.
    fn with_file(test: impl Fn(&Path) + Send + Sync + 'static) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        let bytes = NAMES.map(|name| name.repeat(NBYTES).into_bytes());
        let view = |bytes| TensorView::new(Dtype::U8, vec![NBYTES], bytes).unwrap();
        let views = NAMES.iter().zip(&bytes).map(|(name, bytes)| (*name, view(bytes)));
        std::fs::write(&path, serialize(views, None).unwrap()).unwrap();
        in_every_order(move || test(&path));
    }

    #[test]
    fn in_every_order_of_threads_each_tensor_is_handed_out_once() {
        with_file(|path| {
            let ahead = ahead(path);
            let by_name = |rank| {
                let found = ahead.take(rank, &Unwatched).unwrap();
                found.map(|found| (rank, letter(&found)))
            };
            let mut handed_out = thread::scope(|scope| {
                let other = scope.spawn(|| [4, 1, 4].map(by_name));
                let next = || ahead.next(&Unwatched).unwrap();
                let mut found: Vec<_> = std::iter::from_fn(next)
                    .map(|(rank, found)| (rank, letter(&found)))
                    .collect();
                found.extend(other.join().unwrap().into_iter().flatten());
                found
            });
            handed_out.sort_unstable();
            assert_eq!(handed_out, [(0, 'a'), (1, 'b'), (2, 'c'), (3, 'd'), (4, 'e')]);
        });
    }

    #[test]
    fn in_the_child_of_a_fork_it_is_closed_whatever_locks_were_held() {
        with_file(|path| {
            let mut ahead = ahead(path);
            while ahead.next(&Unwatched).unwrap().is_some() {}
            // The state in a child that was forked while another thread held both locks.
            ahead.process = 0;
            let (shared, thread) = (Arc::clone(&ahead.shared), locked(&ahead.thread).take());
            let held = shared.locked();
            assert!(
                ahead
                    .next(&Unwatched)
                    .is_err_and(|fault| fault.code() == "closed")
            );
            assert!(
                ahead
                    .take(0, &Unwatched)
                    .is_err_and(|fault| fault.code() == "closed")
            );
            ahead.close();
            drop(ahead);
            drop(held);
            thread.unwrap().join().unwrap();
        });
    }

    #[test]
    fn in_every_order_of_threads_it_closes_while_it_reads_and_while_it_waits_for_room() {
        with_file(|path| {
            let ahead = ahead(path);
            thread::scope(|scope| {
                let reader = scope.spawn(|| ahead.take(2, &Unwatched));
                ahead.close();
                match reader.join().unwrap() {
                    Ok(found) => assert_eq!(found.map(|found| letter(&found)), Some('c')),
                    Err(fault) => assert!(matches!(fault.failure(), Failure::Closed)),
                }
            });
            assert!(
                ahead
                    .next(&Unwatched)
                    .is_err_and(|fault| fault.code() == "closed")
            );
        });
    }
}
