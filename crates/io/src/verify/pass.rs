//! Feed digests with the bytes of files. The runs of the files are planned and read as any others, and shown to the
//! digests.

use crate::digest::{Digests, SUBTREE_NBYTES};
use crate::error::{Failure, InFile};
use crate::file::ReadAt;
use crate::options::ReadOptions;
use crate::read::input::Witness;
use crate::read::plan::{FileRun, joined};
use crate::read::run::{looking, show};
use crate::watch::Watch;
use crate::workers::Reading;

/// The number of bytes that are read at once if they have to be hashed in order: small enough to be in the cache at
/// their turn, and large enough to make the cost of waking another thread negligible.
const PIECE_NBYTES: usize = 1 << 20;

/// The most memory for pieces that wait for a network or for earlier pieces, all together.
const WAITING_NBYTES: usize = 128 << 20;

/// The number of bytes that are read at once if they may be hashed in any order: small enough to be still in a core's own
/// cache when they are hashed (2026-11, 1 GiB of the page cache by BLAKE3, two cores with 1 MiB each: 143 ms by 128 KiB, 139 ms
/// by 512 KiB, 137 ms by 1 MiB).
const STEP_NBYTES: u64 = 4 * SUBTREE_NBYTES;

/// Feeds the bytes of a source to digests.
pub(super) struct Feeding<'a> {
    pub(super) source: &'a dyn ReadAt,
    pub(super) all: Vec<&'a Digests>,
}

impl Witness for Feeding<'_> {
    /// Bytes that are hashed in order are read completely while another thread hashes, and so are bytes whose reads
    /// wait.
    fn step_nbytes(&self) -> u64 {
        if self.source.waits() || self.all.iter().any(|digests| digests.in_order()) {
            u64::MAX
        } else {
            STEP_NBYTES
        }
    }

    fn cut(&self, position: u64, most: u64) -> u64 {
        let cut = |end, digests: &&Digests| digests.cut(position, end - position);
        self.all.iter().fold(position + most, cut)
    }

    fn see(&self, position: u64, bytes: &[u8]) {
        self.all.iter().for_each(|digests| digests.feed(position, bytes));
    }

    fn end(&self) {
        self.all.iter().for_each(|digests| digests.end());
    }
}

/// The ranges that digests need of their files, each with the file's number.
pub(super) fn wanted(files: &[Feeding<'_>]) -> Vec<FileRun> {
    let of_file = |(file, feeding): (usize, &Feeding<'_>)| {
        let mut runs: Vec<_> = feeding.all.iter().flat_map(|digests| digests.runs()).collect();
        runs.sort_unstable_by_key(|run| run.start);
        runs.into_iter().map(move |run| (file, run)).collect::<Vec<_>>()
    };
    joined(files.iter().enumerate().flat_map(of_file))
}

/// Read these runs of the files, and feed them to the digests.
pub(super) fn feed(files: &[Feeding<'_>], runs: &[FileRun], watch: &dyn Watch) -> Result<(), InFile> {
    let sources: Vec<_> = files.iter().map(|feeding| feeding.source).collect();
    let witnesses: Vec<&dyn Witness> = files.iter().map(|feeding| feeding as _).collect();
    show(&sources, &witnesses, runs, reading(&sources, runs), watch)
}

/// As [`feed`], for all ranges that digests need of one source.
pub(super) fn feed_all(source: &dyn ReadAt, digests: &Digests, watch: &dyn Watch) -> Result<(), Failure> {
    let files = [Feeding {
        source,
        all: vec![digests],
    }];
    feed(&files, &wanted(&files), watch).map_err(|fault| fault.failure)
}

/// Choose threads and chunks for runs whose pieces must be hashed in order.
pub(super) fn reading(sources: &[&dyn ReadAt], runs: &[FileRun]) -> Reading {
    let reading = looking(sources, runs, &ReadOptions::default());
    let most = if reading.waits {
        (WAITING_NBYTES / reading.threads).max(PIECE_NBYTES)
    } else {
        PIECE_NBYTES
    };
    Reading {
        chunk_nbytes: reading.chunk_nbytes.min(most),
        ..reading
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::mpsc::channel;
    use std::thread;
    use std::time::Duration;

    use super::*;
    use crate::digest::Algorithm;
    use crate::watch::Unwatched;

    const NBYTES: u64 = 40 << 20;

    /// Fails from 5 MiB on, after a while.
    #[derive(Debug)]
    struct Broken {
        waits: bool,
        panics: bool,
    }

    impl ReadAt for Broken {
        fn nbytes(&self) -> u64 {
            NBYTES
        }

        fn read_at(&self, position: u64, dest: &mut [u8]) -> io::Result<usize> {
            if position >> 20 == 5 {
                thread::sleep(Duration::from_millis(20));
                assert!(!self.panics, "planted");
                return Err(io::Error::other("the cable was pulled"));
            }
            Ok(dest.len())
        }

        fn waits(&self) -> bool {
            self.waits
        }
    }

    /// Fails after a minute if `end` is not called for a failed task.
    #[test]
    fn a_read_that_fails_ends_those_that_wait_for_its_bytes() {
        for (waits, algorithm) in [false, true]
            .into_iter()
            .flat_map(|waits| Algorithm::ALL.map(|algorithm| (waits, algorithm)))
        {
            let (tell, told) = channel();
            thread::spawn(move || {
                let digests = Digests::new(algorithm, Some(0..NBYTES));
                let broken = Broken { waits, panics: false };
                let outcome = feed_all(&broken, &digests, &Unwatched);
                let position = match outcome {
                    Err(Failure::Read { position, .. }) => Some(position),
                    _ => None,
                };
                tell.send((position, digests.finish())).unwrap();
            });
            let (position, digests) = told.recv_timeout(Duration::from_secs(60)).unwrap();
            assert_eq!(position.map(|position| position >> 20), Some(5), "{algorithm}");
            assert_eq!(digests, [None], "{algorithm}");
        }
    }

    #[test]
    fn a_read_that_panics_ends_those_that_wait_for_its_bytes() {
        for waits in [false, true] {
            let (tell, told) = channel();
            thread::spawn(move || {
                let digests = Digests::new(Algorithm::Sha256, Some(0..NBYTES));
                let broken = Broken { waits, panics: true };
                let feed = || feed_all(&broken, &digests, &Unwatched);
                tell.send(catch_unwind(AssertUnwindSafe(feed)).is_err()).unwrap();
            });
            assert!(told.recv_timeout(Duration::from_secs(60)).unwrap());
        }
    }
}
