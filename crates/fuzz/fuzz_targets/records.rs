//! No text makes the readers of shared-tensor and digest records panic, and they write every accepted record as they
//! read it. If tensors, names and parts of files are combined into another file, each tensor has its bytes under its
//! new name.
#![no_main]

mod folder;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use folder::place;
use ingot_format::{
    CHECKSUMS_KEY, Checksums, Dtype, Excerpt, Format, LayoutOptions, SHARED_KEY, SharedName, Spec, layout,
    nbytes, parse_shared, render_shared,
};
use ingot_io::binding::{Alias, Inherit, Pick, Role, aliases, assemble, save_pieces};
use ingot_io::{Algorithm, Archive, OpenOptions, SaveOptions, Unwatched};
use libfuzzer_sys::arbitrary::{Result, Unstructured};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    // Most inputs are a text, which takes a hundredth of the time of files.
    match input.split_first() {
        Some((b'F', rest)) => {
            let _ = followed(&mut Unstructured::new(rest));
        }
        Some((_, rest)) => read(&String::from_utf8_lossy(rest)),
        None => {}
    }
});

/// Reads a text as each kind of record.
fn read(text: &str) {
    match parse_shared(text) {
        Ok(mut names) => {
            let known = names.clone();
            let again = render_shared(&mut names);
            assert_eq!(parse_shared(&again), Ok(known));
        }
        Err(fault) => assert!(!fault.to_string().chars().any(char::is_control), "{fault}"),
    }
    match Checksums::parse(text) {
        Ok(record) => {
            let again = record.render();
            let read = Checksums::parse(&again);
            assert!(read.is_ok_and(|read| read.algorithm() == record.algorithm() && read.iter().eq(record.iter())));
        }
        Err(fault) => assert!(!fault.to_string().chars().any(char::is_control), "{fault}"),
    }
}

const NAMES: &[&str] = &["a", "b", "c", "d", "e", "w\"ö", "ingot.shared"];

/// A tensor under a name, with the name that its bytes encode.
#[derive(Clone, Debug, PartialEq)]
struct Meant {
    dtype: Dtype,
    shape: Vec<u64>,
    bytes: Vec<u8>,
}

/// A file, the contents of its tensors, and whether its digests are correct.
struct Source {
    file: Archive,
    path: PathBuf,
    tensors: Vec<Meant>,
    is_true: bool,
}

fn followed(input: &mut Unstructured<'_>) -> Result<()> {
    let mut sources = Vec::new();
    for number in 0..input.int_in_range(1..=2)? {
        sources.push(source(input, number)?);
    }
    let done = put_together(input, &sources);
    for source in &sources {
        let _ = fs::remove_file(&source.path);
    }
    done
}

fn source(input: &mut Unstructured<'_>, number: u8) -> Result<Source> {
    const DTYPES: &[Dtype] = &[
        Dtype::U8,
        Dtype::F16,
        Dtype::F32,
        Dtype::F4,
        Dtype::F6_E2M3,
        Dtype::C64,
    ];
    let mut named: Vec<(&str, Meant)> = Vec::new();
    for &name in NAMES {
        if !input.ratio(1, 2)? {
            continue;
        }
        let dtype = *input.choose(DTYPES)?;
        let mut shape = Vec::new();
        for _ in 0..input.int_in_range(0..=3)? {
            shape.push(input.int_in_range(0..=4)?);
        }
        if let Ok(count) = nbytes(dtype, &shape) {
            let first = 64 * number + 16 * named.len() as u8;
            let bytes = (0..count).map(|at| first.wrapping_add(at as u8)).collect();
            named.push((name, Meant { dtype, shape, bytes }));
        }
    }
    let shared = shared(input)?;
    let (digests, is_true) = digests(input, &named)?;
    let pairs = [(SHARED_KEY, shared), (CHECKSUMS_KEY, digests)];
    let pairs: Vec<(&str, &str)> = pairs
        .iter()
        .filter_map(|(key, text)| Some((*key, text.as_deref()?)))
        .collect();
    let specs: Vec<Spec<'_>> = named
        .iter()
        .map(|(name, meant)| Spec {
            name,
            dtype: meant.dtype,
            shape: &meant.shape,
        })
        .collect();
    let layout = known(layout(&specs, Some(&pairs), Format::Safetensors));
    let mut file = layout.head;
    let mut tensors = Vec::new();
    for number in layout.order {
        file.extend_from_slice(&named[number].1.bytes);
        tensors.push(named[number].1.clone());
    }
    let path = place(&format!("source-{number}"));
    known(fs::write(&path, file));
    let file = known(Archive::open(&path, &OpenOptions::default()));
    Ok(Source {
        file,
        path,
        tensors,
        is_true,
    })
}

/// A record of shared tensors, which may belong to another file.
fn shared(input: &mut Unstructured<'_>) -> Result<Option<String>> {
    match input.int_in_range(0..=7)? {
        0 => return Ok(None),
        1 => return Ok(Some(input.arbitrary()?)),
        _ => {}
    }
    let mut names: Vec<SharedName> = Vec::new();
    for _ in 0..input.int_in_range(0..=5)? {
        let name = (*input.choose(NAMES)?).to_owned();
        let of = (*input.choose(NAMES)?).to_owned();
        let part = match input.ratio(1, 3)? {
            true => None,
            false => {
                let (mut shape, mut stride) = (Vec::new(), Vec::new());
                for _ in 0..input.int_in_range(0..=2)? {
                    shape.push(input.int_in_range(1..=3)?);
                    stride.push(input.int_in_range(0..=4)?);
                }
                Excerpt::new(shape, stride, input.int_in_range(0..=4)?)
            }
        };
        if names.iter().all(|other| other.name != name) {
            names.push(SharedName { name, of, part });
        }
    }
    Ok(Some(render_shared(&mut names)))
}

/// A record of digests, and whether they match the tensors.
fn digests(input: &mut Unstructured<'_>, named: &[(&str, Meant)]) -> Result<(Option<String>, bool)> {
    match input.int_in_range(0..=7)? {
        0..=2 => return Ok((None, true)),
        3 => return Ok((Some(input.arbitrary()?), false)),
        _ => {}
    }
    let algorithm = *input.choose(&Algorithm::ALL)?;
    let mut pairs = Vec::new();
    for (name, meant) in named {
        if input.ratio(3, 4)? {
            pairs.push((*name, algorithm.digest(&meant.bytes).to_string().into()));
        }
    }
    let record = known(Checksums::new(algorithm.name(), pairs.into_iter()));
    Ok((Some(record.render()), true))
}

fn put_together(input: &mut Unstructured<'_>, sources: &[Source]) -> Result<()> {
    let files = sources
        .iter()
        .map(|source| (Some(source.path.as_path()), source.file.header()));
    let added = match aliases(files) {
        Ok(added) => added,
        Err(fault) => {
            assert!(!fault.to_string().chars().any(char::is_control), "{fault}");
            return Ok(());
        }
    };
    let tensors = sources
        .iter()
        .flat_map(|source| (0..source.tensors.len()).map(move |number| (source, number, Role::Tensor)));
    let others = added.iter().map(|alias| {
        let role = alias.part.as_ref().map_or(Role::Alias, Role::Part);
        (&sources[alias.file], alias.number, role)
    });
    let (mut picks, mut expected) = (Vec::new(), BTreeMap::new());
    let mut names: Vec<&str> = NAMES
        .iter()
        .chain(&["f", "g", "h", "i", "j", "k", "l"])
        .copied()
        .collect();
    for (source, number, role) in tensors.chain(others) {
        if input.ratio(2, 3)? && !names.is_empty() {
            let name = names.swap_remove(input.choose_index(names.len())?);
            picks.push(Pick {
                tensor: source.file.tensor(number).expect("it is there"),
                name,
                role,
            });
            expected.insert(name.to_owned(), source.tensors[number].part(role));
        }
    }
    let options = SaveOptions::new().durable(false);
    let (format, order, path) = (Format::Safetensors, LayoutOptions::default(), place("new"));
    match assemble(
        &path,
        |pieces, watch| save_pieces(&path, pieces, &options, watch),
        &picks,
        None,
        Inherit::Digests,
        format,
        &order,
        &Unwatched,
    ) {
        Ok(()) => {
            let is_true = sources.iter().all(|source| source.is_true);
            assert_eq!(meant(&path, is_true), expected);
        }
        // A tensor cannot be half of a byte.
        Err(fault) => assert_eq!(fault.code(), "invalid-alias", "{fault}"),
    }
    let _ = fs::remove_file(&path);
    Ok(())
}

impl Meant {
    /// A target of an alias.
    fn part(&self, role: Role<'_>) -> Meant {
        let Role::Part(part) = role else {
            return self.clone();
        };
        // Of two elements in a byte, both are selected.
        let unit = self.dtype.bits().max(8) as usize / 8;
        let mut places = vec![part.begin() as usize];
        for (&count, &step) in part.shape().iter().zip(part.stride()) {
            places = places
                .iter()
                .flat_map(|place| (0..count).map(move |at| place + (at * step) as usize))
                .collect();
        }
        let element = |at: usize| &self.bytes[at * unit..(at + 1) * unit];
        let mut shape = part.shape().to_vec();
        if let Some(last) = shape.last_mut().filter(|_| self.dtype == Dtype::F4) {
            *last *= 2;
        }
        Meant {
            dtype: self.dtype,
            shape,
            bytes: places.into_iter().flat_map(element).copied().collect(),
        }
    }
}

/// Returns the tensors that the names of the file at `path` refer to. Checks digests that should be correct.
fn meant(path: &Path, is_true: bool) -> BTreeMap<String, Meant> {
    let archive = known(Archive::open(path, &OpenOptions::default()));
    let (header, file) = (archive.header(), known(fs::read(path)));
    let data = &file[header.data_start() as usize..];
    let tensors: Vec<Meant> = header
        .entries()
        .map(|entry| Meant {
            dtype: entry.dtype,
            shape: entry.shape.to_vec(),
            bytes: data[entry.begin as usize..entry.end as usize].to_vec(),
        })
        .collect();
    let stored = header
        .entries()
        .map(|entry| entry.name.to_owned())
        .zip(tensors.iter().cloned());
    let mut all: BTreeMap<String, Meant> = stored.collect();
    let text = header.metadata().and_then(|metadata| metadata.get(CHECKSUMS_KEY));
    if let Some(text) = text.filter(|_| is_true) {
        let record = known(Checksums::parse(text));
        let algorithm = Algorithm::from_name(record.algorithm());
        for (name, digest) in record.iter() {
            let found = algorithm
                .zip(all.get(name))
                .map(|(algorithm, meant)| algorithm.digest(&meant.bytes));
            assert_eq!(
                found.map(|found| found.to_string()).as_deref(),
                Some(digest),
                "{name:?}"
            );
        }
    }
    for Alias {
        name, number, part, ..
    } in known(aliases([(Some(path), header)].into_iter()))
    {
        let role = part.as_ref().map_or(Role::Alias, Role::Part);
        assert!(
            all.insert(name.clone(), tensors[number].part(role)).is_none(),
            "{name:?} occurs twice"
        );
    }
    all
}

fn known<T, E: std::fmt::Display>(found: std::result::Result<T, E>) -> T {
    match found {
        Ok(found) => found,
        Err(fault) => panic!("{fault}"),
    }
}
