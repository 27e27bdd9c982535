//! Small ranges over HTTP, as for slices of tensors: 128 KiB each, on 16 threads, compared with ureq.
//!
//! One server on this machine answers both from memory. They alternate, one round each, and swap their order after every
//! round. Every range is compared with the bytes of the file. The first round, which connects, is not counted. The output
//! is the median of requests per second, and the ratio: above 1, ingot is faster.
//!
//! `cargo bench -p ingot-remote --bench ranges`, or `-- 200` for fewer requests in a round.

#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a bench may fail by panicking"
)]

use std::io::{BufRead, BufReader, IoSlice, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Instant;

use ingot_remote::{Client, Location, RemoteFile, RemoteOptions, Resource, StopFlag};

const NBYTES: usize = 64 << 20;
const RANGE_NBYTES: usize = 128 << 10;
const THREADS: usize = 16;
const ROUNDS: usize = 9;
/// Requests of a round, which take about a second.
const REQUESTS: usize = 20_000;

/// Reads a range into memory of the same length.
type Reader<'a> = dyn Fn(Range<usize>, &mut [u8]) + Sync + 'a;

fn main() {
    let requests = std::env::args()
        .skip(1)
        .find_map(|argument| argument.parse().ok());
    let requests = requests.unwrap_or(REQUESTS);
    let data: Arc<Vec<u8>> = Arc::new((0..NBYTES / 8).flat_map(mixed).collect());
    let url = serve(Arc::clone(&data));

    let file = open(&url);
    let ours = |range: Range<usize>, dest: &mut [u8]| {
        let range = number(range.start)..number(range.end);
        fill(&mut file.reader(range, StopFlag::never()), dest);
    };
    // By default it keeps three connections to a host. Here it keeps one for each thread.
    let agent: ureq::Agent = ureq::Agent::config_builder()
        .max_idle_connections(THREADS)
        .max_idle_connections_per_host(THREADS)
        .build()
        .into();
    let theirs = |range: Range<usize>, dest: &mut [u8]| {
        let asked = format!("bytes={}-{}", range.start, range.end - 1);
        let answer = agent.get(&url).header("Range", asked).call().expect("a part");
        assert_eq!(answer.status(), 206);
        fill(&mut answer.into_body().into_reader(), dest);
    };

    let sides: [&Reader<'_>; 2] = [&ours, &theirs];
    let mut rates = [Vec::new(), Vec::new()];
    for round in 0..=ROUNDS {
        for side in [round % 2, 1 - round % 2] {
            let rate = rate(sides[side], &data, requests);
            if round > 0 {
                rates[side].push(rate);
            }
        }
    }
    report(&rates, requests);
}

/// Return eight bytes that occur at no other place.
fn mixed(place: usize) -> [u8; 8] {
    number(place).wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes()
}

fn number(value: usize) -> u64 {
    u64::try_from(value).expect("64 bits hold a size")
}

fn open(url: &str) -> RemoteFile {
    let (options, stop) = (RemoteOptions::default(), StopFlag::never());
    let Location::Remote(remote) = Location::find(url, &options, stop).expect("a URL") else {
        panic!("{url} is on this machine");
    };
    let resource = Resource::new(&Arc::new(Client::new(options)), &remote);
    RemoteFile::begin(resource, 64, stop).expect("the file is there")
}

/// Read a body of the size of `dest` to its end, after which its connection can be used again.
fn fill(body: &mut dyn Read, dest: &mut [u8]) {
    body.read_exact(dest).expect("all bytes");
    assert_eq!(body.read(&mut [0]).expect("the end"), 0);
}

/// Return the requests per second.
fn rate(read: &Reader<'_>, data: &[u8], requests: usize) -> f64 {
    let next = AtomicUsize::new(0);
    let began = Instant::now();
    thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                let mut dest = vec![0; RANGE_NBYTES];
                loop {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    if at >= requests {
                        break;
                    }
                    // Not aligned to pages, and not adjacent.
                    let begin = at.wrapping_mul(7_919 * 4_099) % (NBYTES - RANGE_NBYTES);
                    read(begin..begin + RANGE_NBYTES, &mut dest);
                    assert!(dest == data[begin..begin + RANGE_NBYTES], "bytes at {begin}");
                }
            });
        }
    });
    let count = u32::try_from(requests).expect("a number of requests");
    f64::from(count) / began.elapsed().as_secs_f64()
}

fn report(rates: &[Vec<f64>; 2], requests: usize) {
    let ratios = rates[0].iter().zip(&rates[1]).map(|(ours, theirs)| ours / theirs);
    let ratios = sorted(ratios.collect());
    let [ours, theirs] = rates.clone().map(|rates| sorted(rates)[ROUNDS / 2]);
    let cores = thread::available_parallelism().map_or(0, |cores| cores.get());
    println!(
        "ranges of 128 KiB, {THREADS} threads, {requests} requests a round, {ROUNDS} rounds, {cores} cores"
    );
    println!("| ingot/s | ureq/s | ratio | lowest | highest |");
    println!("|---|---|---|---|---|");
    println!(
        "| {ours:.0} | {theirs:.0} | {:.2} | {:.2} | {:.2} |",
        ours / theirs,
        ratios[0],
        ratios[ROUNDS - 1]
    );
}

fn sorted(mut rates: Vec<f64>) -> Vec<f64> {
    rates.sort_by(f64::total_cmp);
    rates
}

/// Serve ranges of `data` until the bench ends.
fn serve(data: Arc<Vec<u8>>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("http://{}/file", listener.local_addr().expect("its number"));
    thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            let data = Arc::clone(&data);
            thread::spawn(move || while answer(&stream, &data).is_some() {});
        }
    });
    url
}

/// Answer one request, which has no body. Clients send the next request after the response.
fn answer(stream: &TcpStream, data: &[u8]) -> Option<()> {
    stream.set_nodelay(true).ok()?;
    let mut range = None;
    for line in BufReader::with_capacity(1024, stream).lines() {
        let line = line.ok()?.to_ascii_lowercase();
        match line.strip_prefix("range: bytes=") {
            Some(text) => {
                range = text
                    .split_once('-')
                    .map(|(a, b)| (a.parse::<usize>(), b.parse::<usize>()))
            }
            None if line.is_empty() => break,
            None => {}
        }
    }
    let (Ok(begin), Ok(last)) = range? else {
        return None;
    };
    let part = &data[begin..=last];
    let head = format!(
        "HTTP/1.1 206 Partial Content\r\nETag: \"v1\"\r\nContent-Length: {}\r\nContent-Range: bytes {begin}-{last}/{}\r\n\r\n",
        part.len(),
        data.len()
    );
    // One system call, so that the server takes as little of the measured time as possible.
    let mut stream = stream;
    let both = [IoSlice::new(head.as_bytes()), IoSlice::new(part)];
    let sent = stream.write_vectored(&both).ok()?;
    let rest = sent.checked_sub(head.len())?;
    stream.write_all(&part[rest..]).ok()
}
