//! A part of a tensor of another file whose elements are not contiguous.

use std::io;

use ingot_format::{Excerpt, StopFlag, to_u64, to_usize};

use super::{Gather, Payload};

/// The most bytes to read per requested byte: one read of a few pages is faster than a read for each element.
const WASTE: u64 = 64;
/// The most bytes to read at once for separate elements, except for a single element. Each thread of a save holds as
/// many.
const SPAN_NBYTES: u64 = 8 << 20;
/// The number of elements that are searched at a time.
const AT_ONCE: u64 = 1 << 16;

/// The elements of `part`, row by row.
#[derive(Debug)]
pub(crate) struct Scattered<'a> {
    tensor: Payload<'a>,
    part: Excerpt,
    /// Bytes of an element.
    unit: u64,
}

impl<'a> Scattered<'a> {
    pub(crate) fn new(tensor: Payload<'a>, part: Excerpt, unit: u64) -> Scattered<'a> {
        Scattered { tensor, part, unit }
    }

    /// Fills `into` with the whole elements from `first` on.
    fn elements(&self, first: u64, into: &mut [u8], stop: StopFlag<'_>) -> io::Result<()> {
        let width = to_usize(self.unit).ok_or(io::ErrorKind::OutOfMemory)?;
        let count = to_u64(into.len() / width);
        let places: Vec<u64> = (first..first + count)
            .map(|number| self.part.place(number))
            .collect();
        let (Some(&begin), Some(&last)) = (places.iter().min(), places.iter().max()) else {
            return Ok(());
        };
        if (last - begin) / WASTE > count {
            for (place, element) in places.iter().zip(into.chunks_exact_mut(width)) {
                self.tensor.read(place * self.unit, element, stop)?;
            }
            return Ok(());
        }
        let span = (last + 1 - begin).saturating_mul(self.unit);
        if span > SPAN_NBYTES && count > 1 {
            let (earlier, later) = into.split_at_mut(into.len() / width / 2 * width);
            let half = to_u64(earlier.len() / width);
            self.elements(first, earlier, stop)?;
            return self.elements(first + half, later, stop);
        }
        let nbytes = to_usize(span).ok_or(io::ErrorKind::OutOfMemory)?;
        let mut span = vec![0; nbytes];
        self.tensor.read(begin * self.unit, &mut span, stop)?;
        for (place, element) in places.iter().zip(into.chunks_exact_mut(width)) {
            // The position is inside of `span`, which is in memory, so it fits.
            let at = to_usize((place - begin) * self.unit).unwrap_or(0);
            element.copy_from_slice(&span[at..at + width]);
        }
        Ok(())
    }
}

impl Gather for Scattered<'_> {
    fn nbytes(&self) -> u64 {
        self.part.count() * self.unit
    }

    fn waits(&self) -> bool {
        self.tensor.waits()
    }

    fn read(&self, begin: u64, into: &mut [u8], stop: StopFlag<'_>) -> io::Result<()> {
        let mut done = 0;
        while done < into.len() {
            let at = begin + to_u64(done);
            let (first, inside) = (at / self.unit, at % self.unit);
            let rest = to_u64(into.len() - done);
            let whole = (rest / self.unit).min(AT_ONCE);
            let few = |n: u64| to_usize(n).ok_or(io::ErrorKind::OutOfMemory);
            let step = if inside == 0 && whole > 0 {
                let step = few(whole * self.unit)?;
                self.elements(first, &mut into[done..done + step], stop)?;
                step
            } else {
                // A piece that begins or ends inside of an element.
                let mut element = vec![0; few(self.unit)?];
                self.elements(first, &mut element, stop)?;
                let inside = few(inside)?;
                let step = (element.len() - inside).min(into.len() - done);
                into[done..done + step].copy_from_slice(&element[inside..inside + step]);
                step
            };
            done += step;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Watch;
    use proptest::prelude::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    proptest! {
        #[test]
        fn gives_the_bytes_of_a_nested_loop(
            dims in proptest::collection::vec((1..6_u64, 0..300_u64), 0..4),
            begin in 0..5_u64,
            unit in prop_oneof![Just(1_u64), Just(2), Just(8)],
            cut in any::<prop::sample::Index>(),
        ) {
            let (shape, stride) = dims.into_iter().unzip();
            let part = Excerpt::new(shape, stride, begin).unwrap();
            let data: Vec<u8> = (0..part.end() * unit).map(|n| u8::try_from(n % 251).unwrap()).collect();
            let naive: Vec<u8> = (0..part.count())
                .flat_map(|number| {
                    let at = usize::try_from(part.place(number) * unit).unwrap();
                    data[at..at + usize::try_from(unit).unwrap()].to_vec()
                })
                .collect();
            let gathered = Scattered::new(Payload::from(&*data), part, unit);
            prop_assert_eq!(gathered.nbytes(), to_u64(naive.len()));
            let cut = cut.index(naive.len());
            let mut found = vec![0; naive.len()];
            gathered.read(0, &mut found[..cut], StopFlag::never()).unwrap();
            gathered.read(to_u64(cut), &mut found[cut..], StopFlag::never()).unwrap();
            prop_assert_eq!(found, naive);
        }
    }

    /// A tensor whose bytes depend on their positions. It records the largest request.
    #[derive(Debug)]
    struct Endless {
        most: AtomicUsize,
        waits: bool,
    }

    impl Gather for Endless {
        fn nbytes(&self) -> u64 {
            u64::MAX
        }

        fn waits(&self) -> bool {
            self.waits
        }

        fn read(&self, begin: u64, into: &mut [u8], _: StopFlag<'_>) -> io::Result<()> {
            self.most.fetch_max(into.len(), Ordering::Relaxed);
            let bytes = (begin..).map(|position| u8::try_from(position % 251).unwrap());
            into.iter_mut().zip(bytes).for_each(|(byte, of)| *byte = of);
            Ok(())
        }
    }

    fn endless(waits: bool) -> Endless {
        let most = AtomicUsize::new(0);
        Endless { most, waits }
    }

    #[test]
    fn elements_that_lie_far_apart_are_read_by_bounded_spans() {
        let endless = endless(false);
        let part = Excerpt::new(vec![AT_ONCE], vec![40], 3).unwrap();
        let gathered = Scattered::new(Payload::Gathered(&endless), part, 8);
        let mut found = vec![0; to_usize(gathered.nbytes()).unwrap()];
        gathered.read(0, &mut found, StopFlag::never()).unwrap();
        for (number, element) in (0..).zip(found.chunks(8)) {
            let begin = (3 + 40 * number) * 8;
            assert!(
                element
                    .iter()
                    .copied()
                    .eq((begin..begin + 8).map(|at| u8::try_from(at % 251).unwrap()))
            );
        }
        let most = to_u64(endless.most.into_inner());
        assert!(8 < most && most <= SPAN_NBYTES, "{most}");
    }

    #[test]
    fn reading_a_payload_tells_nothing_of_how_far_the_file_is() {
        struct Untold;
        impl Watch for Untold {
            fn progressed(&self, done: u64, total: u64) {
                panic!("told of {done} of {total}");
            }
        }
        for waits in [false, true] {
            let mut found = [0; 3];
            let endless = endless(waits);
            let payload = Payload::Gathered(&endless);
            payload.read_watched(5, &mut found, &Untold).unwrap();
            assert_eq!(found, [5, 6, 7]);
        }
    }
}
