//! Headers parsed and rendered, against the crates of the two formats.
//!
//! Each group first asserts that both sides give the same entries, or the same bytes. A time divided by the number
//! in its name is the time for one tensor.
//!
//! `cargo bench -p ingot-format --bench headers`

#![allow(
    missing_docs,
    reason = "criterion's macros write functions without documentation"
)]
#![allow(clippy::expect_used, reason = "a bench has nobody to report to")]

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::hint::black_box;

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use ingot_format::{Dtype, Format, Header, Layout, Limits, Spec, layout, nbytes, to_u64, to_usize};

const COUNTS: [usize; 3] = [100, 10_000, 100_000];
const SHAPE: [u64; 2] = [2, 3];
const UPSTREAM_SHAPE: [usize; 2] = [2, 3];

/// Names as large language models have them, already in order, as callers mostly give them.
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

fn group<'c>(bench: &'c mut Criterion, name: &str, count: usize) -> BenchmarkGroup<'c, WallTime> {
    let mut group = bench.benchmark_group(name);
    group.throughput(Throughput::Elements(to_u64(count)));
    group
}

fn parse_headers(bench: &mut Criterion) {
    for count in COUNTS {
        let names = names(count);
        let specs = specs(&names);

        let file_of = |format| file(&layout(&specs, None, format).expect("the tensors can be laid out"));
        let safe = file_of(Format::Safetensors);
        let (_, metadata) = safetensors::SafeTensors::read_metadata(&safe).expect("upstream reads it");
        assert_eq!(our_places(&parse(&safe)), upstream_places!(metadata));
        let mut group_safe = group(bench, "parse safetensors", count);
        group_safe.bench_with_input(BenchmarkId::new("ingot", count), &safe, |bench, file| {
            bench.iter(|| parse(black_box(file)));
        });
        group_safe.bench_with_input(BenchmarkId::new("safetensors", count), &safe, |bench, file| {
            bench.iter(|| safetensors::SafeTensors::read_metadata(black_box(file)));
        });
        group_safe.finish();

        let bt = file_of(Format::Bintensors);
        let (_, metadata) = bintensors::BinTensors::read_metadata(&bt).expect("upstream reads it");
        assert_eq!(our_places(&parse(&bt)), upstream_places!(metadata));
        let mut group_bt = group(bench, "parse bintensors", count);
        group_bt.bench_with_input(BenchmarkId::new("ingot", count), &bt, |bench, file| {
            bench.iter(|| parse(black_box(file)));
        });
        group_bt.bench_with_input(BenchmarkId::new("bintensors", count), &bt, |bench, file| {
            bench.iter(|| bintensors::BinTensors::read_metadata(black_box(file)));
        });
        group_bt.finish();
    }
}

/// Upstream has no call that renders a header alone, so both sides make the whole file; each tensor has 12 bytes.
fn render_headers(bench: &mut Criterion) {
    assert_eq!(
        nbytes(Dtype::BF16, &SHAPE).ok(),
        Some(to_u64(Zeros::data().len()))
    );
    for count in COUNTS {
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

        assert!(
            ours(Format::Safetensors) == safetensors::serialize(pairs(), None).expect("upstream writes it")
        );
        let mut group_safe = group(bench, "render safetensors", count);
        group_safe.bench_function(BenchmarkId::new("ingot", count), |bench| {
            bench.iter(|| ours(Format::Safetensors));
        });
        group_safe.bench_function(BenchmarkId::new("safetensors", count), |bench| {
            bench.iter(|| safetensors::serialize(pairs(), None));
        });
        group_safe.finish();

        assert!(
            ours(Format::Bintensors) == bintensors::serialize(pairs(), &None).expect("upstream writes it")
        );
        let mut group_bt = group(bench, "render bintensors", count);
        group_bt.bench_function(BenchmarkId::new("ingot", count), |bench| {
            bench.iter(|| ours(Format::Bintensors));
        });
        group_bt.bench_function(BenchmarkId::new("bintensors", count), |bench| {
            bench.iter(|| bintensors::serialize(pairs(), &None));
        });
        group_bt.finish();
    }
}

criterion_group!(headers, parse_headers, render_headers);
criterion_main!(headers);
