//! Writing the patch between two versions.

use std::collections::{BTreeMap, HashSet};
use std::path::Path;
use std::sync::Mutex;

use ingot_format::{DELTA_KEY, DeltaRecord, Dtype, Format, Layout, LayoutOptions, Spec, Version};

use super::changes::{Changes, Codec, Comparison, Encoded, Encoding, Part, width};
use super::patch::{intact, values_dtype};
use super::version::{ChunkDigests, covers_data, digest, hashed, head, id};
use crate::checkpoint::Checkpoint;
use crate::digest::{Algorithm, Keep, NewHeader};
use crate::edit::held::Guard;
use crate::error::{Error, unstorable};
use crate::file::{Archive, Tensor};
use crate::fold::fold;
use crate::options::{ReadOptions, SaveOptions};
use crate::payload::{Payload, Produce};
use crate::save::{Pieces, save_pieces};
use crate::watch::{After, Watch};

/// A tensor of a patch.
pub(super) struct NewTensor<'a> {
    pub(super) name: String,
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<u64>,
    pub(super) payload: Payload<'a>,
}

impl<'a> NewTensor<'a> {
    /// Return a list of bytes.
    pub(super) fn bytes(name: String, payload: Payload<'a>) -> NewTensor<'a> {
        NewTensor {
            name,
            dtype: Dtype::U8,
            shape: vec![payload.nbytes()],
            payload,
        }
    }
}

/// Write a patch of these tensors at `path`, with a digest of each.
pub(super) fn write_patch(
    path: &Path,
    record: &DeltaRecord,
    tensors: &[NewTensor<'_>],
    options: &SaveOptions,
    watch: &dyn Watch,
) -> Result<(), Error> {
    let specs: Vec<Spec<'_>> = tensors
        .iter()
        .map(|tensor| Spec {
            name: &tensor.name,
            dtype: tensor.dtype,
            shape: &tensor.shape,
        })
        .collect();
    let keep = Keep {
        tensors: Some(Algorithm::Xxh3),
        model_spec: false,
    };
    let text = record.render();
    let pairs = [(DELTA_KEY, &*text)];
    let new = NewHeader::new(
        &specs,
        Some(&pairs),
        Format::Safetensors,
        &LayoutOptions::default(),
        keep,
    );
    let new = new.map_err(unstorable(path))?;
    let Layout { order, .. } = new.layout();
    let payloads: Vec<Payload<'_>> = order
        .iter()
        .map(|&number| tensors[number].payload.clone())
        .collect();
    save_pieces(path, Pieces::of_new(&new, &payloads), options, watch)
}

/// Write the patch from `base` to `new` at `path`. `index` is the text of the index of `new`, if it has one, and `step` the
/// step of the training that made it.
///
/// Both are read once; parts of tensors with many changes are read again when memory for the changes is full.
///
/// # Errors
/// Errors of reading; [`Failure::Changed`](crate::Failure::Changed) if a file changes meanwhile;
/// [`Failure::Digest`](crate::Failure::Digest) if the headers of both are equal, have digests of all tensors, and the data
/// differs; as [`save()`](crate::save()).
#[allow(clippy::too_many_arguments, reason = "of what, where, and how")]
pub fn diff(
    base: &Checkpoint,
    new: &Checkpoint,
    index: Option<&[u8]>,
    step: Option<u64>,
    path: &Path,
    read: &ReadOptions,
    options: &SaveOptions,
    watch: &dyn Watch,
) -> Result<(), Error> {
    base.prepare_all(watch)?;
    new.prepare_all(watch)?;
    let both = Both::of(base.all()?, new.all()?);
    let widths = both.pairs.iter().map(|[old, _]| width(old.entry().dtype));
    let comparison = Comparison::new(widths.collect());
    let [of_pairs, of_old, of_new] = both.sizes();
    let total = of_pairs + of_old + of_new;
    let after = |before: u64| After { watch, before, total };
    let changes = fold(&both.pairs, &comparison, read, &after(0))?;
    let of_removed = hashed(&both.old, read, &after(of_pairs))?;
    let of_added = hashed(&both.new, read, &after(of_pairs + of_old))?;

    let heads = |checkpoint: &Checkpoint| -> Result<Vec<Vec<u8>>, Error> {
        checkpoint.all_files()?.into_iter().map(head).collect()
    };
    let (old_heads, new_heads) = (heads(base)?, heads(new)?);
    let files = new.all_files()?;
    let version = |files: &[&Archive], heads: &[Vec<u8>], digest: String| {
        let covers = covers_data(files.iter().map(|file| file.header()));
        let id = id(heads, (!covers).then_some(&*digest));
        Version { id, digest }
    };
    let old_digest = both.digest(0, &changes, &both.old, of_removed);
    let new_digest = both.digest(1, &changes, &both.new, of_added);
    let old_version = version(&base.all_files()?, &old_heads, old_digest);
    let new_version = version(&files, &new_heads, new_digest);
    if old_version.id == new_version.id && old_version.digest != new_version.digest {
        // The digests in the headers are equal and the data is not, so one of the two is corrupt.
        intact(base.all_files()?, watch)?;
        intact(new.all_files()?, watch)?;
    }
    let record = DeltaRecord {
        base: old_version,
        result: new_version,
        step,
        nbytes: files.iter().map(|file| file.header().file_nbytes()).collect(),
        files: match index {
            Some(_) => new.file_names().map(std::borrow::Cow::into_owned).collect(),
            None => Vec::new(),
        },
        index: index.and_then(|_| Some(new.path()?.file_name()?.to_string_lossy().into_owned())),
        added: both.added(),
        removed: both.removed(),
    };
    let plans: Vec<Plan<'_>> = both
        .pairs
        .iter()
        .zip(&changes)
        .filter_map(|(pair, changes)| Plan::of(pair, changes))
        .collect();
    let mut tensors = heads_and_index(&new_heads, index);
    tensors.extend(plans.iter().flat_map(Plan::tensors));
    tensors.extend(both.new.iter().map(|tensor| whole(*tensor)));
    let check = || {
        let mut all = base.all_files()?;
        all.extend(new.all_files()?);
        all.iter().try_for_each(|file| file.check_unchanged())
    };
    let guard = Guard::new(watch, &check);
    let saved = write_patch(path, &record, &tensors, options, &guard);
    guard.outcome(saved)
}

/// Return the tensors of a patch that have the headers and the index of the result.
pub(super) fn heads_and_index<'a>(heads: &'a [Vec<u8>], index: Option<&'a [u8]>) -> Vec<NewTensor<'a>> {
    let headers = heads.iter().enumerate();
    let headers =
        headers.map(|(number, head)| NewTensor::bytes(format!("header/{number}"), Payload::from(&**head)));
    let index = index.map(|text| NewTensor::bytes("index".to_owned(), Payload::from(text)));
    headers.chain(index).collect()
}

/// The tensors of two versions.
struct Both<'a> {
    /// Those of one dtype and shape in both.
    pairs: Vec<[Tensor<'a>; 2]>,
    /// The others.
    old: Vec<Tensor<'a>>,
    new: Vec<Tensor<'a>>,
}

impl<'a> Both<'a> {
    fn of(old: Vec<Tensor<'a>>, new: Vec<Tensor<'a>>) -> Both<'a> {
        let mut olds: BTreeMap<&str, Tensor<'_>> = old
            .into_iter()
            .map(|tensor| (tensor.entry().name, tensor))
            .collect();
        let (mut pairs, mut others) = (Vec::new(), Vec::new());
        for tensor in new {
            let entry = tensor.entry();
            let is_alike =
                |old: &Tensor<'_>| (old.entry().dtype, old.entry().shape) == (entry.dtype, entry.shape);
            if olds.get(entry.name).is_some_and(is_alike)
                && let Some(old) = olds.remove(entry.name)
            {
                pairs.push([old, tensor]);
            } else {
                others.push(tensor);
            }
        }
        Both {
            pairs,
            old: olds.into_values().collect(),
            new: others,
        }
    }

    /// Return the bytes of the pairs, and of the others.
    fn sizes(&self) -> [u64; 3] {
        let nbytes = |tensors: &[Tensor<'_>]| -> u64 {
            tensors
                .iter()
                .map(|tensor| tensor.entry().nbytes())
                .fold(0, u64::saturating_add)
        };
        [
            nbytes(self.pairs.as_flattened()),
            nbytes(&self.old),
            nbytes(&self.new),
        ]
    }

    /// Return the digest of the data of the version on this side.
    fn digest(
        &self,
        side: usize,
        changes: &[Changes],
        others: &[Tensor<'_>],
        of_others: Vec<ChunkDigests>,
    ) -> String {
        let pairs = self.pairs.iter().zip(changes);
        let pairs = pairs.map(|(pair, changes)| (pair[side].entry().name, changes.digests[side].clone()));
        let others = others.iter().map(|tensor| tensor.entry().name).zip(of_others);
        digest(&pairs.chain(others).collect())
    }

    fn added(&self) -> Vec<String> {
        names_without(&self.new, &self.old)
    }

    fn removed(&self) -> Vec<String> {
        names_without(&self.old, &self.new)
    }
}

/// Return the sorted names of `tensors` that are not names of `others`.
fn names_without(tensors: &[Tensor<'_>], others: &[Tensor<'_>]) -> Vec<String> {
    let others: HashSet<&str> = others.iter().map(|tensor| tensor.entry().name).collect();
    let names = tensors.iter().map(|tensor| tensor.entry().name);
    let mut names: Vec<String> = names
        .filter(|name| !others.contains(name))
        .map(ToOwned::to_owned)
        .collect();
    names.sort_unstable();
    names
}

fn whole(tensor: Tensor<'_>) -> NewTensor<'_> {
    let entry = tensor.entry();
    NewTensor {
        name: format!("whole/{}", entry.name),
        dtype: entry.dtype,
        shape: entry.shape.to_owned(),
        payload: tensor.archive().payload(entry.begin, entry.end),
    }
}

/// How the patch stores a changed tensor.
enum Plan<'a> {
    Whole(Tensor<'a>),
    Sparse(Tensor<'a>, Codec, Box<[Encoded<'a>; 2]>),
}

impl<'a> Plan<'a> {
    /// Return the smallest way to store the changes of a pair; `None` if the two are equal.
    fn of([old, new]: &[Tensor<'a>; 2], changes: &'a Changes) -> Option<Plan<'a>> {
        let count = changes.tally.changed;
        if count == 0 {
            return None;
        }
        let (codec, bits, nbytes) = changes.tally.clone().best();
        let width = width(new.entry().dtype);
        if nbytes.saturating_add(count * width) >= new.entry().nbytes() {
            return Some(Plan::Whole(*new));
        }
        let encoded = |part, nbytes| Encoded {
            changes,
            pair: [old, new].map(|tensor| tensor.archive().payload(tensor.entry().begin, tensor.entry().end)),
            width,
            part,
            nbytes,
            state: Mutex::new(Encoding::default()),
        };
        let positions = encoded(Part::Positions(codec, bits), nbytes);
        let values = encoded(Part::Values, count * width);
        Some(Plan::Sparse(*new, codec, Box::new([positions, values])))
    }

    fn tensors(&self) -> Vec<NewTensor<'_>> {
        match self {
            Plan::Whole(tensor) => vec![whole(*tensor)],
            Plan::Sparse(tensor, codec, parts) => {
                let (entry, [positions, values]) = (tensor.entry(), &**parts);
                sparse(entry.name, entry.dtype, *codec, positions, values)
            }
        }
    }
}

/// Return the two tensors of a patch for changed elements of a tensor of this name and dtype.
pub(super) fn sparse<'a>(
    name: &str,
    dtype: Dtype,
    codec: Codec,
    positions: &'a dyn Produce,
    values: &'a dyn Produce,
) -> Vec<NewTensor<'a>> {
    let part = match codec {
        Codec::Gaps => "gaps",
        Codec::Runs => "runs",
    };
    let positions = NewTensor::bytes(format!("{part}/{name}"), Payload::Produced(positions));
    let values = NewTensor {
        name: format!("values/{name}"),
        dtype: values_dtype(dtype),
        shape: vec![values.nbytes() / width(dtype)],
        payload: Payload::Produced(values),
    };
    vec![positions, values]
}
