//! Loads of 1 GiB into private memory, compared with a plain loop that reads the same file.
//!
//! The two alternate, and swap their order every time. The file is in the page cache. The loop reads 8 MiB at a time, on one
//! thread, into new memory. Every loaded byte is compared with the written one. The output is the median of the seconds, and
//! the ratio of the rates: above 1, ingot is faster.
//!
//! `cargo bench -p ingot-io --bench loads`, or `-- 64` for another number of MiB. For Windows, on wine:
//! `scripts/test-windows bench --package ingot-io --bench loads`.

#![allow(
    clippy::expect_used,
    clippy::print_stdout,
    reason = "a bench has nobody to report to"
)]

use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;
use std::time::Instant;

use ingot_format::{Dtype, Format, Spec, layout, to_u64, to_usize};
use ingot_io::{Archive, Backend, Job, OpenOptions, ReadOptions, Unwatched, read};

const MIB: usize = 1 << 20;
const TENSORS: usize = 16;
const ROUNDS: usize = 9;
/// Bytes that the loop reads at once. The bench also writes and compares files in chunks of this size.
const CHUNK_NBYTES: usize = 8 * MIB;

/// Loads the file, compares its bytes, and returns the seconds that the load took.
type Loader<'a> = dyn Fn(&Path) -> f64 + 'a;

fn main() {
    let mib = std::env::args()
        .skip(1)
        .find_map(|argument| argument.parse().ok());
    let tensor_nbytes = mib.unwrap_or(1024_usize) * MIB / TENSORS;
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("model.safetensors");
    let head_nbytes = write(&path, tensor_nbytes);

    let sides: [&Loader<'_>; 2] = [&|path| ours(path, tensor_nbytes), &|path| {
        plain(path, head_nbytes)
    }];
    let mut seconds = [Vec::new(), Vec::new()];
    for round in 0..=ROUNDS {
        for side in [round % 2, 1 - round % 2] {
            let took = sides[side](&path);
            if round > 0 {
                seconds[side].push(took);
            }
        }
    }
    report(&seconds, TENSORS * tensor_nbytes);
}

/// Writes a file of tensors of this size, whose bytes depend on their position. Returns the start of its data.
fn write(path: &Path, tensor_nbytes: usize) -> usize {
    let names: Vec<String> = (0..TENSORS).map(|number| format!("{number:02}")).collect();
    let shape = [to_u64(tensor_nbytes)];
    let specs = names.iter().map(|name| Spec {
        name,
        dtype: Dtype::U8,
        shape: &shape,
    });
    let specs: Vec<Spec<'_>> = specs.collect();
    let head = layout(&specs, None, Format::Safetensors)
        .expect("names are short")
        .head;
    let mut file = File::create(path).expect("a file");
    file.write_all(&head).expect("room for the head");
    each_chunk(TENSORS * tensor_nbytes, |begin, nbytes| {
        file.write_all(&pattern(begin, nbytes))
            .expect("room for the data");
    });
    file.sync_all().expect("a disk");
    head.len()
}

/// Returns the expected bytes of the data from `begin` on, which is a multiple of eight.
fn pattern(begin: usize, nbytes: usize) -> Vec<u8> {
    let mixed = |place: usize| to_u64(place).wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes();
    (begin / 8..(begin + nbytes) / 8).flat_map(mixed).collect()
}

fn each_chunk(nbytes: usize, mut work: impl FnMut(usize, usize)) {
    for begin in (0..nbytes).step_by(CHUNK_NBYTES) {
        work(begin, CHUNK_NBYTES.min(nbytes - begin));
    }
}

fn ours(path: &Path, tensor_nbytes: usize) -> f64 {
    let options = OpenOptions::new().backend(Backend::Pread);
    let began = Instant::now();
    let archive = Archive::open(path, &options).expect("it was written");
    let parts = archive.tensors().map(Job::from);
    let parts: Vec<Job<'_>> = parts.collect();
    let regions = read(&parts, &ReadOptions::default(), &Unwatched).expect("all bytes");
    let took = began.elapsed().as_secs_f64();
    assert_eq!(regions.len(), TENSORS);
    let mut found = vec![0; CHUNK_NBYTES];
    for (number, region) in regions.iter().enumerate() {
        each_chunk(tensor_nbytes, |begin, nbytes| {
            let found = &mut found[..nbytes];
            assert_eq!(region.memory().copy_to(region.at() + begin, found), nbytes);
            let at = number * tensor_nbytes + begin;
            assert!(found == pattern(at, nbytes), "bytes at {at}");
        });
    }
    took
}

fn plain(path: &Path, head_nbytes: usize) -> f64 {
    let began = Instant::now();
    let mut file = File::open(path).expect("it was written");
    let nbytes = file.metadata().expect("it is open").len();
    let mut bytes = vec![0; to_usize(nbytes).expect("memory for all")];
    for chunk in bytes.chunks_mut(CHUNK_NBYTES) {
        file.read_exact(chunk).expect("all bytes");
    }
    let took = began.elapsed().as_secs_f64();
    let data = &bytes[head_nbytes..];
    each_chunk(data.len(), |begin, nbytes| {
        assert!(
            data[begin..begin + nbytes] == pattern(begin, nbytes),
            "bytes at {begin}"
        );
    });
    took
}

fn report(seconds: &[Vec<f64>; 2], nbytes: usize) {
    let sorted = |mut seconds: Vec<f64>| {
        seconds.sort_by(f64::total_cmp);
        seconds
    };
    let ratios = seconds[0]
        .iter()
        .zip(&seconds[1])
        .map(|(ours, plain)| plain / ours);
    let ratios = sorted(ratios.collect());
    let [ours, plain] = seconds.clone().map(|seconds| sorted(seconds)[ROUNDS / 2]);
    let cores = std::thread::available_parallelism().map_or(0, |cores| cores.get());
    let (mib, system) = (nbytes / MIB, std::env::consts::OS);
    println!("{mib} MiB in {TENSORS} tensors, warm, {ROUNDS} rounds, {cores} cores, {system}");
    println!("| ingot, s | plain reads, s | ratio | lowest | highest |");
    println!("|---|---|---|---|---|");
    println!(
        "| {ours:.3} | {plain:.3} | {:.2} | {:.2} | {:.2} |",
        plain / ours,
        ratios[0],
        ratios[ROUNDS - 1]
    );
}
