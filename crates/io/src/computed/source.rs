//! The source of the bytes of a computed checkpoint, and the makers of its tensors.

use std::fmt::Debug;
use std::io::{self, Read};
use std::ops::Range;
use std::sync::Arc;

use ingot_format::{Dtype, Layout, Spec, StopFlag, saturating_usize, to_u64, to_usize};

use crate::checkpoint::Checkpoint;
use crate::error::Error;
use crate::file::{Archive, ReadAt};

/// Computes the bytes of one tensor.
pub(crate) trait Make: Debug + Send + Sync {
    /// Return the number of bytes that are best computed together, such as the size of an element or of a block. Calls of
    /// [`Make::fill`] begin at a multiple of it and end at a multiple of it or at the end of the tensor.
    fn unit_nbytes(&self) -> usize {
        1
    }

    /// Fill `dest` with the bytes of the tensor from `begin` on. Many threads call this at once; scratch memory is bounded
    /// by a few MiB. Read inputs by [`Tensor::read_at`](crate::Tensor).
    ///
    /// # Errors
    /// Errors of reading the inputs, which name their file and tensor; [`Failure::Interrupted`] soon after `stop` is set.
    fn fill(&self, inputs: &Checkpoint, begin: u64, dest: &mut [u8], stop: StopFlag<'_>)
    -> Result<(), Error>;
}

/// A tensor of a computed checkpoint.
#[derive(Debug)]
pub(crate) struct Made {
    pub(crate) name: String,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<u64>,
    pub(crate) maker: Box<dyn Make>,
}

impl Made {
    pub(super) fn spec(&self) -> Spec<'_> {
        Spec {
            name: &self.name,
            dtype: self.dtype,
            shape: &self.shape,
        }
    }
}

/// A file that stores only the header. Its data is computed by the makers of its tensors.
#[derive(Debug)]
pub(super) struct Computed {
    inputs: Arc<Checkpoint>,
    /// The bytes before the data.
    head: Vec<u8>,
    /// The tensors with data, in the order of their positions.
    tensors: Vec<Placed>,
    nbytes: u64,
}

/// A maker, and the bytes of the file that it computes.
#[derive(Debug)]
struct Placed {
    span: Range<u64>,
    maker: Box<dyn Make>,
}

impl Computed {
    /// Return the source of the file that `layout` describes, which is the layout of `made`.
    pub(super) fn new(inputs: Arc<Checkpoint>, layout: Layout, made: Vec<Made>) -> Computed {
        let mut makers: Vec<_> = made.into_iter().map(|made| Some(made.maker)).collect();
        let start = layout.header.data_start();
        let tensors = layout.order.iter().zip(layout.header.entries());
        let tensors = tensors.filter_map(|(&number, entry)| {
            let maker = makers.get_mut(number)?.take()?;
            let span = start + entry.begin..start + entry.end;
            (!span.is_empty()).then_some(Placed { span, maker })
        });
        Computed {
            tensors: tensors.collect(),
            nbytes: layout.header.file_nbytes(),
            head: layout.head,
            inputs,
        }
    }

    /// Fill the front of `dest` with bytes from `position` on, and return how many: the bytes of one tensor, or of the header.
    fn fill(&self, position: u64, dest: &mut [u8], stop: StopFlag<'_>) -> io::Result<usize> {
        if let Some(rest) = to_usize(position).and_then(|at| self.head.get(at..))
            && !rest.is_empty()
        {
            let count = rest.len().min(dest.len());
            dest[..count].copy_from_slice(&rest[..count]);
            return Ok(count);
        }
        let number = self.tensors.partition_point(|tensor| tensor.span.end <= position);
        let Some(tensor) = self.tensors.get(number) else {
            return Ok(0);
        };
        let count = saturating_usize(tensor.span.end - position).min(dest.len());
        let filled = tensor.fill(&self.inputs, position, &mut dest[..count], stop);
        filled.map_err(io::Error::other)?;
        Ok(count)
    }

    /// Return the input files that are open.
    fn files(&self) -> impl Iterator<Item = &Archive> {
        self.inputs.opened().into_iter()
    }
}

impl Placed {
    /// Fill `dest` from `position` of the file on. The maker is called with whole units: units that are not wholly inside
    /// `dest` are computed in scratch memory.
    fn fill(
        &self,
        inputs: &Checkpoint,
        position: u64,
        dest: &mut [u8],
        stop: StopFlag<'_>,
    ) -> Result<(), Error> {
        let (nbytes, unit) = (
            self.span.end - self.span.start,
            to_u64(self.maker.unit_nbytes().max(1)),
        );
        let (begin, end) = (
            position - self.span.start,
            position - self.span.start + to_u64(dest.len()),
        );
        // The whole units inside; none if all bytes belong to one unit.
        let first = begin.next_multiple_of(unit).min(end);
        let last = if end == nbytes { end } else { end - end % unit };
        let last = last.max(first);
        let (head, rest) = dest.split_at_mut(saturating_usize(first - begin));
        let (whole, tail) = rest.split_at_mut(saturating_usize(last - first));
        self.fill_part(inputs, begin, head, stop)?;
        if !whole.is_empty() {
            self.maker.fill(inputs, first, whole, stop)?;
        }
        self.fill_part(inputs, last, tail, stop)
    }

    /// Fill `dest` with a part of one unit, from byte `begin` of the tensor on.
    fn fill_part(
        &self,
        inputs: &Checkpoint,
        begin: u64,
        dest: &mut [u8],
        stop: StopFlag<'_>,
    ) -> Result<(), Error> {
        if dest.is_empty() {
            return Ok(());
        }
        let unit = to_u64(self.maker.unit_nbytes().max(1));
        let start = begin - begin % unit;
        let end = (start + unit).min(self.span.end - self.span.start);
        let mut bytes = vec![0; saturating_usize(end - start)];
        self.maker.fill(inputs, start, &mut bytes, stop)?;
        let skip = saturating_usize(begin - start);
        dest.copy_from_slice(&bytes[skip..skip + dest.len()]);
        Ok(())
    }
}

impl ReadAt for Computed {
    fn nbytes(&self) -> u64 {
        self.nbytes
    }

    fn read_at(&self, position: u64, dest: &mut [u8]) -> io::Result<usize> {
        self.fill(position, dest, StopFlag::never())
    }

    fn stream<'s>(&'s self, span: Range<u64>, stop: StopFlag<'s>) -> Option<Box<dyn Read + 's>> {
        Some(Box::new(Reader {
            computed: self,
            span,
            stop,
        }))
    }

    fn backend(&self) -> (&'static str, &'static str) {
        (
            "computed",
            "the tensors are computed from the tensors of the source",
        )
    }

    fn waits(&self) -> bool {
        self.files().any(|file| file.source().waits())
    }

    fn reads_at_once(&self) -> usize {
        let files = self.files().filter(|file| file.source().waits());
        files.map(|file| file.source().reads_at_once()).min().unwrap_or(1)
    }

    fn is_cold(&self, _span: &Range<u64>) -> bool {
        // Only the makers know which bytes of the inputs a span needs.
        self.files()
            .any(|file| file.source().is_cold(&(0..file.source().nbytes())))
    }

    fn nbytes_now(&self) -> io::Result<Option<u64>> {
        self.files()
            .try_for_each(Archive::check_unchanged)
            .map_err(io::Error::other)?;
        Ok(Some(self.nbytes))
    }
}

/// The bytes of a span, which are computed as they are read.
struct Reader<'s> {
    computed: &'s Computed,
    span: Range<u64>,
    stop: StopFlag<'s>,
}

impl Read for Reader<'_> {
    fn read(&mut self, dest: &mut [u8]) -> io::Result<usize> {
        let most = saturating_usize(self.span.end.saturating_sub(self.span.start)).min(dest.len());
        if most == 0 {
            return Ok(0);
        }
        let count = self
            .computed
            .fill(self.span.start, &mut dest[..most], self.stop)?;
        self.span.start += to_u64(count);
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use ingot_format::{Format, layout};

    use super::*;
    use crate::computed::compute;
    use crate::error::Failure;
    use crate::file::MemorySource;
    use crate::options::{OpenOptions, ReadOptions};
    use crate::watch::Unwatched;

    /// Doubles the bytes of an input, three at a time.
    #[derive(Debug)]
    struct Doubled(&'static str);

    impl Make for Doubled {
        fn unit_nbytes(&self) -> usize {
            3
        }

        fn fill(
            &self,
            inputs: &Checkpoint,
            begin: u64,
            dest: &mut [u8],
            stop: StopFlag<'_>,
        ) -> Result<(), Error> {
            let input = inputs.find(self.0)?;
            let end = begin + to_u64(dest.len());
            assert!(
                begin.is_multiple_of(3)
                    && (end.is_multiple_of(3) || end == input.entry().end - input.entry().begin)
            );
            input.read_at(begin, dest, stop)?;
            dest.iter_mut().for_each(|byte| *byte *= 2);
            Ok(())
        }
    }

    fn doubled(name: &str, of: &'static str, nbytes: u64) -> Made {
        Made {
            name: name.to_owned(),
            dtype: Dtype::U8,
            shape: vec![nbytes],
            maker: Box::new(Doubled(of)),
        }
    }

    fn input() -> Arc<Checkpoint> {
        let shape = |n| [n];
        let (first, second) = (shape(10), shape(7));
        let specs = [("a", &first), ("b", &second)].map(|(name, shape)| Spec {
            name,
            dtype: Dtype::U8,
            shape,
        });
        let mut file = layout(&specs, None, Format::Safetensors).unwrap().head;
        file.extend(1..=17);
        Arc::new(
            Archive::from_source(MemorySource::new(file), &OpenOptions::default())
                .unwrap()
                .into(),
        )
    }

    fn computed(made: Vec<Made>) -> Checkpoint {
        compute(input(), made, &[("title", "new")], Format::Safetensors).unwrap()
    }

    #[test]
    fn any_range_of_a_computed_file_has_the_bytes_of_the_whole_file() {
        let made = computed(vec![
            doubled("y", "b", 7),
            doubled("none", "a", 0),
            doubled("x", "a", 10),
        ]);
        let source = made.file(0).unwrap().source();
        let nbytes = source.nbytes();
        let range = |begin: u64, end: u64| {
            let mut bytes = vec![0; saturating_usize(end - begin)];
            crate::file::read_exactly(source, begin, &mut bytes, StopFlag::never()).unwrap();
            bytes
        };
        let whole = range(0, nbytes);
        assert_eq!(
            whole[whole.len() - 17..whole.len() - 10],
            [22, 24, 26, 28, 30, 32, 34]
        );
        assert_eq!(whole[whole.len() - 10..], [2, 4, 6, 8, 10, 12, 14, 16, 18, 20]);
        for begin in nbytes - 20..=nbytes {
            for end in begin..=nbytes {
                assert_eq!(
                    range(begin, end),
                    whole[saturating_usize(begin)..saturating_usize(end)]
                );
            }
        }
        assert_eq!(source.read_at(nbytes, &mut [0]).unwrap(), 0);
    }

    #[test]
    fn a_computed_tensor_is_read_like_a_stored_one() {
        let made = computed(vec![doubled("x", "a", 10)]);
        let found = made
            .find("x")
            .unwrap()
            .read(&ReadOptions::new(), &Unwatched)
            .unwrap();
        assert_eq!(found.to_vec(), [2, 4, 6, 8, 10, 12, 14, 16, 18, 20]);
        let metadata = made.file(0).unwrap().header().metadata().unwrap().get("title");
        assert_eq!(metadata, Some("new"));
    }

    #[test]
    fn an_error_of_an_input_keeps_its_tensor_and_code() {
        let made = computed(vec![doubled("x", "missing", 10)]);
        let fault = made
            .find("x")
            .unwrap()
            .read(&ReadOptions::new(), &Unwatched)
            .unwrap_err();
        assert_eq!(
            (fault.code(), fault.tensor()),
            ("unknown-tensor", Some("missing"))
        );
    }

    #[test]
    fn two_tensors_of_one_name_are_refused() {
        let made = vec![doubled("x", "a", 10), doubled("x", "b", 7)];
        let fault = compute(input(), made, &[], Format::Safetensors).unwrap_err();
        assert!(matches!(fault.failure(), Failure::Unstorable(_)));
    }
}
