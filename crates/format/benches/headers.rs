//! Benchmarks parsing and rendering headers against the crates of the two formats.
//!
//! The two sides alternate, each first in every other round, after an assertion that both return the same entries or the
//! same bytes. The first round is not counted. The output is the median time in microseconds, and the ratio of the two:
//! above 1, ours is faster. Divide a time by the number of tensors for the time per tensor.
//!
//! `cargo bench -p ingot-format --bench headers`, or `-- 100` for another number of rounds.

#![allow(
    clippy::expect_used,
    clippy::print_stdout,
    reason = "a bench has no caller to return errors to"
)]

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::hint::black_box;
use std::time::{Duration, Instant};

use ingot_format::{Dtype, Format, Header, Layout, Limits, Spec, layout, nbytes, to_u64, to_usize};

const COUNTS: [usize; 3] = [100, 10_000, 100_000];
const ROUNDS: usize = 31;
/// Minimum time of one side in each round, so that the clock's resolution does not matter.
const ROUND: Duration = Duration::from_millis(20);
const SHAPE: [u64; 2] = [2, 3];
const UPSTREAM_SHAPE: [usize; 2] = [2, 3];

/// Names like those of large language models, already sorted, as they usually are.
fn names(count: usize) -> Vec<String> {
    (0..count)
        .map(|number| {
            format!(
                "model.layers.{:03}.self_attn.q_proj.weight_{number:06}",
                number / 200
            )
        })
        .collect()
}

fn specs(names: &[String]) -> Vec<Spec<'_>> {
    names
        .iter()
        .map(|name| Spec {
            name,
            dtype: Dtype::BF16,
            shape: &SHAPE,
        })
        .collect()
}

/// A whole file, its tensors filled with zeros.
fn file(new: &Layout) -> Vec<u8> {
    let mut file = new.head.clone();
    file.resize(
        to_usize(new.header.file_nbytes()).expect("the file fits in memory"),
        0,
    );
    file
}

fn parse(file: &[u8]) -> Header {
    Header::parse(file, to_u64(file.len()), &Limits::default()).expect("the file is right")
}

/// A tensor for the upstream writers.
struct Zeros;

impl Zeros {
    fn data() -> &'static [u8] {
        &[0; 12]
    }
}

impl safetensors::View for Zeros {
    fn dtype(&self) -> safetensors::Dtype {
        safetensors::Dtype::BF16
    }
    fn shape(&self) -> &[usize] {
        &UPSTREAM_SHAPE
    }
    fn data(&self) -> Cow<'_, [u8]> {
        Zeros::data().into()
    }
    fn data_len(&self) -> usize {
        Zeros::data().len()
    }
}

impl bintensors::View for Zeros {
    fn dtype(&self) -> bintensors::Dtype {
        bintensors::Dtype::BF16
    }
    fn shape(&self) -> &[usize] {
        &UPSTREAM_SHAPE
    }
    fn data(&self) -> Cow<'_, [u8]> {
        Zeros::data().into()
    }
    fn data_len(&self) -> usize {
        Zeros::data().len()
    }
}

type Places = BTreeMap<String, (String, Vec<u64>, u64, u64)>;

fn our_places(header: &Header) -> Places {
    header
        .entries()
        .map(|entry| {
            let place = (
                entry.dtype.code().to_owned(),
                entry.shape.to_vec(),
                entry.begin,
                entry.end,
            );
            (entry.name.to_owned(), place)
        })
        .collect()
}

/// Both crates describe a tensor by a struct with the same fields.
macro_rules! upstream_places {
    ($metadata:expr) => {
        $metadata
            .tensors()
            .into_iter()
            .map(|(name, info)| {
                let shape = info.shape.iter().copied().map(to_u64).collect();
                let (begin, end) = info.data_offsets;
                (
                    name,
                    (format!("{:?}", info.dtype), shape, to_u64(begin), to_u64(end)),
                )
            })
            .collect::<Places>()
    };
}

fn main() {
    let rounds = std::env::args()
        .skip(1)
        .find_map(|argument| argument.parse().ok());
    let rounds = rounds.unwrap_or(ROUNDS);
    let cores = std::thread::available_parallelism().map_or(0, |cores| cores.get());
    println!("headers, {rounds} rounds, {cores} cores");
    println!("| what | tensors | ingot, us | peer, us | ratio | lowest | highest |");
    println!("|---|---|---|---|---|---|---|");
    for count in COUNTS {
        parse_headers(count, rounds);
        render_headers(count, rounds);
    }
}

/// Times the two in turn, and prints a row.
fn compare<A, B>(
    what: &str,
    count: usize,
    rounds: usize,
    mut ours: impl FnMut() -> A,
    mut theirs: impl FnMut() -> B,
) {
    let mut times = [Vec::new(), Vec::new()];
    for round in 0..=rounds {
        for side in [round % 2, 1 - round % 2] {
            let took = match side {
                0 => microseconds(&mut ours),
                _ => microseconds(&mut theirs),
            };
            if round > 0 {
                times[side].push(took);
            }
        }
    }
    let ratios = times[0].iter().zip(&times[1]).map(|(ours, theirs)| theirs / ours);
    let ratios = sorted(ratios.collect());
    let [ours, theirs] = times.map(|times| sorted(times)[rounds / 2]);
    println!(
        "| {what} | {count} | {ours:.1} | {theirs:.1} | {:.2} | {:.2} | {:.2} |",
        theirs / ours,
        ratios[0],
        ratios[rounds - 1]
    );
}

/// Returns the mean time of one call of `work` in a round.
fn microseconds<R>(work: &mut impl FnMut() -> R) -> f64 {
    let begun = Instant::now();
    let mut times = 0_u32;
    while begun.elapsed() < ROUND {
        black_box(work());
        times += 1;
    }
    begun.elapsed().as_secs_f64() * 1e6 / f64::from(times)
}

fn sorted(mut times: Vec<f64>) -> Vec<f64> {
    times.sort_by(f64::total_cmp);
    times
}

fn parse_headers(count: usize, rounds: usize) {
    let names = names(count);
    let specs = specs(&names);
    let file_of = |format| file(&layout(&specs, None, format).expect("the tensors can be laid out"));

    let safe = file_of(Format::Safetensors);
    let (_, metadata) = safetensors::SafeTensors::read_metadata(&safe).expect("upstream reads it");
    assert_eq!(our_places(&parse(&safe)), upstream_places!(metadata));
    let theirs = || safetensors::SafeTensors::read_metadata(black_box(&safe));
    compare(
        "parse safetensors",
        count,
        rounds,
        || parse(black_box(&safe)),
        theirs,
    );

    let bt = file_of(Format::Bintensors);
    let (_, metadata) = bintensors::BinTensors::read_metadata(&bt).expect("upstream reads it");
    assert_eq!(our_places(&parse(&bt)), upstream_places!(metadata));
    let theirs = || bintensors::BinTensors::read_metadata(black_box(&bt));
    compare(
        "parse bintensors",
        count,
        rounds,
        || parse(black_box(&bt)),
        theirs,
    );
}

/// Upstream has no call that renders a header alone, so both sides make the whole file; each tensor has 12 bytes.
fn render_headers(count: usize, rounds: usize) {
    assert_eq!(
        nbytes(Dtype::BF16, &SHAPE).ok(),
        Some(to_u64(Zeros::data().len()))
    );
    let names = names(count);
    let specs = specs(&names);
    let ours = |format| {
        let new = layout(black_box(&specs), None, format).expect("the tensors can be laid out");
        let mut file = new.head;
        for _ in &new.order {
            file.extend_from_slice(Zeros::data());
        }
        file
    };
    let pairs = || names.iter().map(|name| (name, Zeros));

    let safe = || safetensors::serialize(pairs(), None).expect("upstream writes it");
    assert!(ours(Format::Safetensors) == safe());
    compare(
        "render safetensors",
        count,
        rounds,
        || ours(Format::Safetensors),
        safe,
    );

    let bt = || bintensors::serialize(pairs(), &None).expect("upstream writes it");
    assert!(ours(Format::Bintensors) == bt());
    compare(
        "render bintensors",
        count,
        rounds,
        || ours(Format::Bintensors),
        bt,
    );
}
