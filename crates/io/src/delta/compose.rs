//! One patch for several patches in a row.

use std::collections::BTreeSet;
use std::io;
use std::path::Path;
use std::sync::Mutex;

use ingot_format::{DeltaRecord, Entry, StopFlag, locked, to_u64};

use super::changes::{Codec, Encoding, Part, Tally, width};
use super::diff::{NewTensor, heads_and_index, sparse, write_patch};
use super::numbers::{Bytes, in_memory};
use super::patch::{Change, ChangedRun, Layer, Patch, Patched, Walk, stored, unusable};
use crate::edit::held::Guard;
use crate::error::{Error, PatchFault};
use crate::options::SaveOptions;
use crate::payload::{Payload, Produce};
use crate::watch::Watch;

/// Write the patch from the base of the first patch to the result of the last at `path`. Each patch is for the result of
/// the one before.
///
/// An element that changes and changes back stays in the patch, since the base is not read.
///
/// # Errors
/// [`Failure::Patch`](crate::Failure::Patch) if there are no patches, if one is not for the result of the one before, or
/// was not proven; errors of reading; as [`save()`](crate::save()).
pub fn compose(
    patches: &[&Patch],
    path: &Path,
    options: &SaveOptions,
    watch: &dyn Watch,
) -> Result<(), Error> {
    let (Some(first), Some(last)) = (patches.first(), patches.last()) else {
        return Err(PatchFault::Invalid("expected one patch or more, found none".to_owned()).about(None));
    };
    patches.iter().try_for_each(|patch| patch.check_proven())?;
    for pair in patches.windows(2) {
        let (expected, found) = (&pair[1].record().base, &pair[0].record().result);
        if expected != found {
            let (expected, found) = (expected.id.clone(), found.id.clone());
            return Err(PatchFault::WrongBase { expected, found }.about(pair[1].path()));
        }
    }
    let (added, removed) = names(patches);
    let record = DeltaRecord {
        base: first.record().base.clone(),
        added,
        removed,
        ..last.record().clone()
    };
    let heads: Vec<Vec<u8>> = last.files.iter().map(|file| file.head.clone()).collect();
    let entries = last.files.iter().flat_map(|file| file.header.entries());
    let stacks = entries.filter_map(|entry| Stack::of(entry, patches).transpose());
    let stacks = stacks.collect::<Result<Vec<_>, _>>()?;
    let planned = stacks.iter().map(Planned::of).collect::<Result<Vec<_>, _>>()?;
    let mut tensors = heads_and_index(&heads, last.index());
    tensors.extend(planned.iter().flat_map(Planned::tensors));
    let check = || {
        patches
            .iter()
            .try_for_each(|patch| patch.archive()?.check_unchanged())
    };
    let guard = Guard::new(watch, &check);
    let saved = write_patch(path, &record, &tensors, options, &guard);
    guard.outcome(saved)
}

/// Return the names of tensors that only the last result has, and that only the first base has.
fn names(patches: &[&Patch]) -> (Vec<String>, Vec<String>) {
    let (mut added, mut removed) = (BTreeSet::new(), BTreeSet::new());
    for patch in patches {
        for name in &patch.record().removed {
            if !added.remove(name) {
                removed.insert(name.clone());
            }
        }
        for name in &patch.record().added {
            if !removed.remove(name) {
                added.insert(name.clone());
            }
        }
    }
    (added.into_iter().collect(), removed.into_iter().collect())
}

/// The changes of a tensor in several patches.
#[derive(Debug)]
struct Stack<'a> {
    entry: Entry<'a>,
    /// The bytes of the tensor, if a patch has all of them.
    whole: Option<Payload<'a>>,
    /// The later changes, the earliest first.
    layers: Vec<Layer<'a>>,
}

impl<'a> Stack<'a> {
    /// Return the changes of the tensor; `None` if no patch changes it.
    fn of(entry: Entry<'a>, patches: &[&'a Patch]) -> Result<Option<Stack<'a>>, Error> {
        let mut stack = Stack {
            entry,
            whole: None,
            layers: Vec::new(),
        };
        for patch in patches.iter().rev() {
            let before = patch.entry(entry.name);
            if before.is_some_and(|before| (before.dtype, before.shape) != (entry.dtype, entry.shape)) {
                return Err(patch
                    .invalid("a later patch has another dtype or shape".to_owned())
                    .of(entry.name));
            }
            let archive = patch.archive()?;
            match patch.changes.get(entry.name) {
                Some(Change::Whole(number)) => {
                    stack.whole = Some(stored(archive, *number));
                    break;
                }
                Some(Change::Sparse(sparse)) => stack.layers.push(Layer { archive, sparse }),
                None => {}
            }
        }
        stack.layers.reverse();
        Ok((stack.whole.is_some() || !stack.layers.is_empty()).then_some(stack))
    }

    fn merge(&self) -> io::Result<Merge<'a>> {
        let tops = self.layers.iter().map(|&layer| Top::new(layer));
        Ok(Merge {
            tops: tops.collect::<Result<_, _>>()?,
            end: 0,
        })
    }
}

/// The runs of one patch.
#[derive(Debug)]
struct Top<'a> {
    walk: Walk<'a>,
    run: Option<ChangedRun>,
    values: Bytes<'a>,
    width: u64,
}

impl<'a> Top<'a> {
    fn new(Layer { archive, sparse }: Layer<'a>) -> io::Result<Top<'a>> {
        let mut walk = sparse.runs(archive, StopFlag::never())?;
        Ok(Top {
            run: walk.next()?,
            walk,
            values: Bytes::new(stored(archive, sparse.values), 0, StopFlag::never()),
            width: sparse.width,
        })
    }
}

/// The runs of several patches, in which the later patch wins.
#[derive(Debug)]
struct Merge<'a> {
    tops: Vec<Top<'a>>,
    /// The end of the last run.
    end: u64,
}

/// Elements that change, and the patch that has their values.
#[derive(Clone, Copy, Debug)]
struct Merged {
    begin: u64,
    end: u64,
    top: usize,
}

impl Merge<'_> {
    fn next(&mut self) -> io::Result<Option<Merged>> {
        for top in &mut self.tops {
            while top.run.is_some_and(|run| run.end <= self.end) {
                top.run = top.walk.next()?;
            }
        }
        let begins = || {
            let runs = self.tops.iter().enumerate();
            runs.filter_map(|(top, layer)| Some((top, layer.run?.begin.max(self.end))))
        };
        let Some(begin) = begins().map(|(_, begin)| begin).min() else {
            return Ok(None);
        };
        let top = begins().filter(|pair| pair.1 == begin).map(|pair| pair.0).max();
        let Some((top, run)) = top.and_then(|top| Some((top, self.tops[top].run?))) else {
            return Ok(None);
        };
        let next = begins().filter(|pair| pair.0 > top).map(|pair| pair.1).min();
        let end = next.map_or(run.end, |next| next.min(run.end));
        self.end = end;
        Ok(Some(Merged { begin, end, top }))
    }

    /// Append the values of a run.
    fn values(&mut self, found: Merged, out: &mut Vec<u8>) -> io::Result<()> {
        let top = &mut self.tops[found.top];
        let Some(run) = top.run else {
            return Ok(());
        };
        let filled = out.len();
        out.resize(filled + in_memory((found.end - found.begin) * top.width)?, 0);
        top.values.seek((run.index + found.begin - run.begin) * top.width);
        top.values.copy(&mut out[filled..])
    }
}

/// The tensors of the new patch for a stack.
enum Planned<'a> {
    Whole(Entry<'a>, Patched<'a>),
    Sparse(Entry<'a>, Codec, Box<[Restacked<'a>; 2]>),
}

impl<'a> Planned<'a> {
    fn of(stack: &'a Stack<'a>) -> Result<Planned<'a>, Error> {
        if let Some(base) = &stack.whole {
            let (base, layers) = (base.clone(), stack.layers.clone());
            return Ok(Planned::Whole(stack.entry, Patched { base, layers }));
        }
        let tally = tally(stack).map_err(|fault| match stack.layers.first() {
            Some(layer) => unusable(layer.archive, stack.entry.name, fault),
            None => PatchFault::Invalid(fault.to_string()).about(None),
        })?;
        let count = tally.changed;
        let (codec, bits, nbytes) = tally.best();
        let restacked = |part, nbytes| Restacked {
            stack,
            part,
            nbytes,
            state: Mutex::default(),
        };
        let positions = restacked(Part::Positions(codec, bits), nbytes);
        let values = restacked(Part::Values, count * width(stack.entry.dtype));
        Ok(Planned::Sparse(stack.entry, codec, Box::new([positions, values])))
    }

    fn tensors(&self) -> Vec<NewTensor<'_>> {
        match self {
            Planned::Whole(entry, patched) => vec![NewTensor {
                name: format!("whole/{}", entry.name),
                dtype: entry.dtype,
                shape: entry.shape.to_owned(),
                payload: Payload::Gathered(patched),
            }],
            Planned::Sparse(entry, codec, parts) => {
                let [positions, values] = &**parts;
                sparse(entry.name, entry.dtype, *codec, positions, values)
            }
        }
    }
}

fn tally(stack: &Stack<'_>) -> io::Result<Tally> {
    let (mut merge, mut tally, mut end) = (stack.merge()?, Tally::default(), 0);
    while let Some(found) = merge.next()? {
        tally.run(found.begin - end, found.end - found.begin);
        end = found.end;
    }
    Ok(tally)
}

/// The number of runs that are merged at once.
const RUNS: usize = 4096;

/// The bytes of a tensor of the new patch, made run by run.
#[derive(Debug)]
struct Restacked<'a> {
    stack: &'a Stack<'a>,
    part: Part,
    nbytes: u64,
    state: Mutex<(Encoding, Option<Merge<'a>>)>,
}

impl Restacked<'_> {
    fn refill(&self, merge: &mut Merge<'_>, encoding: &mut Encoding) -> io::Result<bool> {
        let (mut runs, mut end) = (Vec::new(), merge.end);
        while runs.len() < RUNS
            && let Some(found) = merge.next()?
        {
            if self.part == Part::Values {
                encoding.append(|out| merge.values(found, out))?;
            }
            runs.push((found.begin - end, found.end - found.begin));
            end = found.end;
        }
        if let Part::Positions(codec, bits) = self.part {
            encoding.pack(codec, bits, &runs);
        }
        Ok(!runs.is_empty())
    }
}

impl Produce for Restacked<'_> {
    fn nbytes(&self) -> u64 {
        self.nbytes
    }

    fn produce(&self, begin: u64, into: &mut [u8]) -> io::Result<()> {
        let mut state = locked(&self.state);
        let (encoding, merge) = &mut *state;
        if begin == 0 || merge.is_none() {
            *merge = Some(self.stack.merge()?);
        }
        let Some(merge) = merge else {
            return Ok(());
        };
        encoding.take(begin, into, |encoding| self.refill(merge, encoding))?;
        if begin + to_u64(into.len()) == self.nbytes {
            // Each tensor has buffers for each patch: only those that are written need them.
            *state = <(Encoding, Option<Merge<'_>>)>::default();
        }
        Ok(())
    }
}
