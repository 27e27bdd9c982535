//! A copy of payloads, so that their owner may change them while the copy is written.

use std::ops::Range;
use std::path::Path;
use std::sync::{Mutex, OnceLock};
use std::thread;

use ingot_format::{Layout, StopFlag, locked, to_usize};

use super::write::pieces::{PIECE, Pieces};
use crate::error::{Error, Failure, of_step, step, unstorable};
use crate::pages::Pages;
use crate::payload::{Payload, prove_sizes};
use crate::watch::Watch;
use crate::workers::{Reading, share};

/// Bytes of memory that one thread requests at once. A multiple of the size of every huge page.
const BLOCK: usize = 32 << 20;
const PIECES_IN_BLOCK: usize = BLOCK / PIECE;
/// From this size on, threads copy.
const PARALLEL: u64 = 8 << 20;
/// The most threads that copy.
const THREADS: usize = 16;

/// Blocks of snapshots that were written, for the next ones.
static SPARE: Spare = Spare(Mutex::new(Vec::new()));

/// Blocks of [`BLOCK`] bytes that no snapshot uses. They are offered to the system, which takes their pages when it needs
/// memory.
///
/// A training job takes a snapshot again and again, and finding memory takes longer than filling it.
#[derive(Debug)]
struct Spare(Mutex<Vec<Pages>>);

impl Spare {
    /// Remove and return at most `most` blocks. Their bytes do not matter.
    fn take(&self, most: usize) -> Vec<Pages> {
        // After a fork, a lock that another thread held stays locked. So a locked one counts as empty.
        let Ok(mut spare) = self.0.try_lock() else {
            return Vec::new();
        };
        let first = spare.len().saturating_sub(most);
        spare.split_off(first)
    }

    fn keep(&self, blocks: impl Iterator<Item = Pages>) {
        if let Ok(mut spare) = self.0.try_lock() {
            let whole = blocks.filter(|block| block.len() == BLOCK);
            spare.extend(whole.filter_map(Pages::offered));
        }
    }
}

/// The bytes of payloads, copied.
///
/// Most of the time goes into finding memory, so the memory is of huge pages, each populated just before it is written to, and
/// kept for the next snapshot.
///
/// ```
/// use ingot_format::{Dtype, Format, Spec, layout};
/// use ingot_io::binding::Snapshot;
/// use ingot_io::{Payload, SaveOptions, Unwatched};
///
/// let folder = tempfile::tempdir()?;
/// let path = folder.path().join("step-1.safetensors");
/// let mut weights = *b"12345678";
/// let new = layout(&[Spec { name: "w", dtype: Dtype::F32, shape: &[2] }], None, Format::Safetensors)?;
/// let copy = Snapshot::take(&new, &[Payload::from(&weights[..])], &path, &Unwatched)?;
/// weights.fill(0); // training goes on
/// copy.save(&path, &new.into(), &SaveOptions::default(), &Unwatched)?;
/// assert!(std::fs::read(&path)?.ends_with(b"12345678"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Snapshot {
    blocks: Vec<Pages>,
}

impl Drop for Snapshot {
    fn drop(&mut self) {
        SPARE.keep(self.blocks.drain(..));
    }
}

impl Snapshot {
    /// Copy `payloads`, one for each tensor of `layout`, in order. Errors name the destination file `path`.
    ///
    /// # Errors
    /// [`Failure::Unstorable`] if the size of a payload is not the size of its tensor, [`Failure::OutOfMemory`],
    /// [`Failure::Write`] if a payload fails to produce its bytes, [`Failure::Interrupted`].
    pub fn take(
        layout: &Layout,
        payloads: &[Payload<'_>],
        path: &Path,
        watch: &dyn Watch,
    ) -> Result<Snapshot, Error> {
        let sized = prove_sizes(&layout.header, payloads)
            .and_then(|()| Pieces::of_data(&[], layout.header.data_nbytes(), payloads));
        let pieces = sized.map_err(unstorable(path))?;
        let count = pieces.count().div_ceil(PIECES_IN_BLOCK);
        let blocks: Vec<OnceLock<Pages>> = (0..count).map(|_| OnceLock::new()).collect();
        let spare = Mutex::new(SPARE.take(to_usize(pieces.nbytes()).unwrap_or(0) / BLOCK));
        let copy = |block: usize, stop: StopFlag<'_>| -> Result<usize, Error> {
            // Each block is copied by one thread, so nothing is there yet.
            let _ = blocks[block].set(copied(&pieces, block, &spare, path, stop)?);
            Ok(0)
        };
        let threads = if pieces.nbytes() < PARALLEL {
            1
        } else {
            thread::available_parallelism().map_or(1, |cores| cores.get().min(THREADS))
        };
        let (ours, any) = (0..count).partition::<Vec<_>, _>(|&block| is_fetched(&pieces, block));
        share(Reading::on(1), ours, pieces.nbytes(), copy, watch)?;
        share(Reading::on(threads), any, pieces.nbytes(), copy, watch)?;
        Ok(Snapshot {
            // A missing block would be detected by `save`, which counts the bytes.
            blocks: blocks.into_iter().filter_map(OnceLock::into_inner).collect(),
        })
    }

    /// Return the copy in the order of the payloads, in the blocks of its memory.
    #[must_use]
    pub(crate) fn payloads(&self) -> Vec<Payload<'_>> {
        let blocks = self.blocks.iter();
        blocks.map(|block| Payload::from(block.bytes())).collect()
    }
}

fn pieces_of(pieces: &Pieces<'_>, block: usize) -> Range<usize> {
    let first = block * PIECES_IN_BLOCK;
    first..pieces.count().min(first + PIECES_IN_BLOCK)
}

/// Return whether only the calling thread can copy this block.
fn is_fetched(pieces: &Pieces<'_>, block: usize) -> bool {
    pieces_of(pieces, block).any(|piece| pieces.is_fetched(piece))
}

/// Copy a block, into one of `spare` if it is a whole one.
fn copied(
    pieces: &Pieces<'_>,
    block: usize,
    spare: &Mutex<Vec<Pages>>,
    path: &Path,
    stop: StopFlag<'_>,
) -> Result<Pages, Error> {
    let lens = pieces_of(pieces, block).map(|piece| pieces.len(piece));
    let len = lens.sum();
    let kept = (len == BLOCK).then(|| locked(spare).pop()).flatten();
    let mut copy = kept.map_or_else(|| Pages::allocate(len), Ok).map_err(|source| {
        let failure = Failure::OutOfMemory {
            nbytes: pieces.nbytes(),
            source: Some(source),
        };
        failure.about(Some(path), None)
    })?;
    copy.want_huge(0..len);
    let mut begin = 0;
    for piece in pieces_of(pieces, block) {
        let range = begin..begin + pieces.len(piece);
        // Faulting pages in one by one costs more than copying does.
        copy.populate(range.clone());
        begin = range.end;
        pieces
            .fill(piece, &mut copy.bytes_mut()[range], stop)
            .map_err(|source| of_step(step::READ, source).in_save(path, pieces.nbytes()))?;
    }
    Ok(copy)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{SaveOptions, Unwatched};
    use ingot_format::{Dtype, Format, LayoutOptions, Spec, to_u64};
    use std::io;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn a_snapshot_has_the_bytes_and_keeps_them() {
        let folder = tempfile::tempdir().unwrap();
        for len in [0, 1, 5 << 20, BLOCK - 1, BLOCK, 2 * BLOCK + 7] {
            let mut bytes: Vec<u8> = (0..len).map(|n| u8::try_from(n % 251).unwrap()).collect();
            let layout = layout_of(&[len, 3]);
            let expected = [&layout.head[..], &bytes, b"end"].concat();
            let payloads = [Payload::from(&bytes[..]), Payload::from(&b"end"[..])];
            let snapshot = Snapshot::take(&layout, &payloads, Path::new("file"), &Unwatched).unwrap();
            bytes.fill(0);
            let path = folder.path().join("file");
            snapshot
                .save(&path, &layout.into(), &SaveOptions::default(), &Unwatched)
                .unwrap();
            assert!(std::fs::read(&path).unwrap() == expected, "{len}");
            assert_eq!(snapshot.blocks.len(), (len + 3).div_ceil(BLOCK));
        }
    }

    #[test]
    fn whole_blocks_are_kept_for_the_next_snapshot() {
        let spare = Spare(Mutex::new(Vec::new()));
        spare.keep(
            [5, BLOCK, BLOCK]
                .into_iter()
                .map(|len| Pages::allocate(len).unwrap()),
        );
        let kept = if cfg!(target_os = "linux") { 2 } else { 0 };
        assert_eq!(spare.take(1).len(), kept.min(1));
        let rest = spare.take(5);
        assert_eq!(rest.len(), kept / 2);
        assert!(rest.iter().all(|block| block.len() == BLOCK));
        let _held = spare.0.lock().unwrap();
        assert!(spare.take(1).is_empty());
    }

    #[test]
    fn a_snapshot_gets_its_digests() {
        let specs = [Spec {
            name: "a",
            dtype: Dtype::U8,
            shape: &[8],
        }];
        let keep = crate::digest::Keep {
            tensors: Some(crate::Algorithm::Blake3),
            ..Default::default()
        };
        let options = LayoutOptions::default();
        let sealed =
            crate::digest::NewHeader::new(&specs, None, Format::Safetensors, &options, keep).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let payloads = [Payload::from(&b"12345678"[..])];
        let snapshot = Snapshot::take(sealed.layout(), &payloads, &path, &Unwatched).unwrap();
        snapshot
            .save(&path, &sealed, &SaveOptions::default(), &Unwatched)
            .unwrap();
        assert!(std::fs::read(&path).unwrap().ends_with(b"12345678"));
        assert!(crate::verify(&path, None, &Unwatched).unwrap().is_ok());
    }

    /// The layout of U8 tensors with these numbers of elements.
    fn layout_of(lens: &[usize]) -> Layout {
        let names: Vec<String> = (0..lens.len()).map(|number| number.to_string()).collect();
        let shapes: Vec<[u64; 1]> = lens.iter().map(|&len| [to_u64(len)]).collect();
        let spec = |(name, shape)| Spec {
            name,
            dtype: Dtype::U8,
            shape,
        };
        let named = names
            .iter()
            .map(String::as_str)
            .zip(shapes.iter().map(|shape| &shape[..]));
        let specs: Vec<Spec<'_>> = named.map(spec).collect();
        ingot_format::layout(&specs, None, Format::Safetensors).unwrap()
    }

    #[test]
    fn a_snapshot_for_another_layout_is_refused() {
        let bytes = [7; 8];
        let (short, whole) = (Payload::from(&bytes[..4]), Payload::from(&bytes[..]));
        for payloads in [vec![short], vec![], vec![whole.clone(), whole.clone()]] {
            let taken = Snapshot::take(&layout_of(&[8]), &payloads, Path::new("file"), &Unwatched);
            assert!(
                taken.is_err_and(|fault| matches!(fault.failure(), Failure::Unstorable(_))),
                "{payloads:?}"
            );
        }
        let mut snapshot = Snapshot::take(&layout_of(&[8]), &[whole], Path::new("file"), &Unwatched).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let save = |snapshot: &Snapshot, nbytes| {
            snapshot.save(
                &path,
                &layout_of(&[nbytes]).into(),
                &SaveOptions::default(),
                &Unwatched,
            )
        };
        assert!(save(&snapshot, 9).is_err_and(|fault| matches!(fault.failure(), Failure::Unstorable(_))));
        snapshot.blocks.clear();
        assert!(save(&snapshot, 8).is_err_and(|fault| matches!(fault.failure(), Failure::Unstorable(_))));
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn an_interrupted_snapshot_says_so() {
        struct Now;
        impl Watch for Now {
            fn interrupted(&self) -> bool {
                true
            }
        }
        let bytes = vec![1; 2 * BLOCK];
        let layout = layout_of(&[bytes.len()]);
        let taken = Snapshot::take(&layout, &[Payload::from(&bytes[..])], Path::new("file"), &Now);
        assert!(taken.as_ref().is_err_and(Error::is_interrupted));
    }

    /// A byte that has to be fetched, and the number of requests for it.
    #[derive(Debug, Default)]
    struct Absent(AtomicUsize);

    impl crate::Produce for Absent {
        fn nbytes(&self) -> u64 {
            1
        }

        fn produce(&self, _: u64, _: &mut [u8]) -> io::Result<()> {
            self.0.fetch_add(1, Ordering::Relaxed);
            Ok(())
        }
    }

    #[test]
    fn what_has_to_be_fetched_is_fetched_once() {
        let near = vec![0; usize::try_from(PARALLEL).unwrap()];
        let absent = Absent::default();
        let payloads = [Payload::from(&near[..]), Payload::Produced(&absent)];
        Snapshot::take(
            &layout_of(&[near.len(), 1]),
            &payloads,
            Path::new("file"),
            &Unwatched,
        )
        .unwrap();
        assert_eq!(absent.0.into_inner(), 1);
    }

    /// Its first two reads wait for each other, for a minute at most.
    #[derive(Debug, Default)]
    struct Together(AtomicUsize);

    impl crate::payload::Gather for Together {
        fn nbytes(&self) -> u64 {
            to_u64(2 * BLOCK)
        }

        fn waits(&self) -> bool {
            false
        }

        fn read(&self, _: u64, _: &mut [u8], _: ingot_format::StopFlag<'_>) -> io::Result<()> {
            self.0.fetch_add(1, Ordering::Relaxed);
            let begin = std::time::Instant::now();
            while self.0.load(Ordering::Relaxed) < 2 {
                match begin.elapsed().as_secs() < 60 {
                    true => thread::yield_now(),
                    false => return Err(io::ErrorKind::TimedOut.into()),
                }
            }
            Ok(())
        }
    }

    #[test]
    fn threads_copy_beside_the_calling_one() {
        if thread::available_parallelism().map_or(1, usize::from) == 1 {
            eprintln!("not run: there is one core");
            return;
        }
        let together = Together::default();
        let payloads = [Payload::Gathered(&together)];
        Snapshot::take(&layout_of(&[2 * BLOCK]), &payloads, Path::new("file"), &Unwatched).unwrap();
    }

    #[test]
    fn only_blocks_with_something_to_fetch_are_the_calling_threads() {
        let (near, absent) = (vec![0; BLOCK], Absent::default());
        let of_pieces = |count: usize| Payload::from(&near[..count * PIECE]);
        // In the first piece of a block, in another piece, and in the last one.
        for before in [PIECES_IN_BLOCK, PIECES_IN_BLOCK + 2, 2 * PIECES_IN_BLOCK - 1] {
            let first = of_pieces(PIECES_IN_BLOCK);
            let payloads = [
                first.clone(),
                of_pieces(before - PIECES_IN_BLOCK),
                Payload::Produced(&absent),
                first,
            ];
            let pieces = Pieces::of_data(&[], payloads.iter().map(Payload::nbytes).sum(), &payloads).unwrap();
            assert_eq!(
                [0, 1, 2].map(|block| is_fetched(&pieces, block)),
                [false, true, false],
                "{before}"
            );
        }
    }
}
