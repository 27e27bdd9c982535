//! The other end of uploads, for benches/python/stores.py: a store of S3's protocol that discards all bytes, and the raw
//! rate of its connections. It keeps the bytes of an object whose name ends with `kept`, for a GET.
//!
//! `sink serve` prints its port and serves until its input ends. `sink send PORT NBYTES` sends this many bytes in parts of
//! 8 MiB over 16 connections, and prints the seconds.

#![allow(
    clippy::expect_used,
    clippy::print_stdout,
    reason = "a bench may fail by panicking"
)]

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Instant;

const PART_NBYTES: usize = 8 << 20;
const CONNECTIONS: usize = 16;

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["serve"] => serve(),
        ["send", port, nbytes] => {
            let port = port.parse().expect("a port");
            send(port, nbytes.parse().expect("a number of bytes"));
        }
        _ => println!("usage: sink serve | sink send PORT NBYTES"),
    }
}

fn serve() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    println!("{}", listener.local_addr().expect("an address").port());
    thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            thread::spawn(move || answer(&stream));
        }
    });
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
}

/// The bytes of the parts that are kept, by their numbers.
static KEPT: Mutex<BTreeMap<u32, Vec<u8>>> = Mutex::new(BTreeMap::new());

/// One answer for requests that begin an upload and for requests that complete one: clients read their part of it.
const MADE: &[u8] =
    b"<CompleteMultipartUploadResult><UploadId>1</UploadId><ETag>e</ETag></CompleteMultipartUploadResult>";

#[derive(Default)]
struct Request {
    method: String,
    target: String,
    nbytes: usize,
    /// The client sends the body after an answer.
    is_expectant: bool,
}

impl Request {
    /// Return the number of a part that is kept. The only request of a small object has none, and is the first part.
    fn part(&self) -> Option<u32> {
        let (path, query) = self.target.split_once('?').unwrap_or((&self.target, ""));
        let number = query.split('&').find_map(|pair| pair.strip_prefix("partNumber="));
        let is_kept = self.method == "PUT" && path.ends_with("kept");
        is_kept.then(|| number.map_or(1, |number| number.parse().expect("the number of a part")))
    }
}

/// Answer the requests of one connection until it ends.
fn answer(stream: &TcpStream) {
    let _ = stream.set_nodelay(true);
    let mut reader = BufReader::with_capacity(256 << 10, stream);
    let mut dropped = vec![0; 256 << 10];
    while let Some(request) = head(&mut reader) {
        if request.is_expectant
            && (&mut &*stream)
                .write_all(b"HTTP/1.1 100 Continue\r\n\r\n")
                .is_err()
        {
            return;
        }
        let mut kept = request.part().map(|number| (number, Vec::new()));
        let mut left = request.nbytes;
        while left > 0 {
            let most = left.min(dropped.len());
            match reader.read(&mut dropped[..most]) {
                Ok(count) if count > 0 => {
                    left -= count;
                    if let Some((_, bytes)) = &mut kept {
                        bytes.extend_from_slice(&dropped[..count]);
                    }
                }
                _ => return,
            }
        }
        let mut parts = KEPT.lock().expect("no thread panics");
        parts.extend(kept);
        let body = match request.method.as_str() {
            "POST" => MADE.to_vec(),
            "GET" => std::mem::take(&mut *parts).into_values().flatten().collect(),
            _ => Vec::new(),
        };
        drop(parts);
        let head = format!(
            "HTTP/1.1 200 OK\r\nETag: \"e\"\r\nContent-Length: {}\r\n\r\n",
            body.len()
        );
        if (&mut &*stream)
            .write_all(&[head.as_bytes(), &body].concat())
            .is_err()
        {
            return;
        }
    }
}

fn head(reader: &mut impl BufRead) -> Option<Request> {
    let mut line = String::new();
    reader.read_line(&mut line).ok()?;
    let mut words = line
        .split(' ')
        .filter(|word| !word.is_empty())
        .map(ToOwned::to_owned);
    let mut request = Request {
        method: words.next()?,
        target: words.next()?,
        ..Request::default()
    };
    loop {
        line.clear();
        reader.read_line(&mut line).ok()?;
        let lower = line.trim_end().to_ascii_lowercase();
        if lower.is_empty() {
            return Some(request);
        }
        request.is_expectant |= lower == "expect: 100-continue";
        if let Some(length) = lower.strip_prefix("content-length:") {
            request.nbytes = length.trim().parse().ok()?;
        }
    }
}

fn send(port: u16, nbytes: u64) {
    let bytes = vec![1; PART_NBYTES];
    let part_nbytes = u64::try_from(PART_NBYTES).expect("a small number");
    let parts = nbytes.div_ceil(part_nbytes);
    let next = AtomicU64::new(0);
    let begun = Instant::now();
    thread::scope(|scope| {
        for _ in 0..CONNECTIONS {
            scope.spawn(|| {
                let mut stream = TcpStream::connect(("127.0.0.1", port)).expect("the sink");
                let mut reader = BufReader::new(stream.try_clone().expect("the same stream"));
                while next.fetch_add(1, Ordering::Relaxed) < parts {
                    let head =
                        format!("PUT /raw HTTP/1.1\r\nHost: h\r\nContent-Length: {PART_NBYTES}\r\n\r\n");
                    stream.write_all(head.as_bytes()).expect("the sink");
                    stream.write_all(&bytes).expect("the sink");
                    let mut line = String::new();
                    while line != "\r\n" {
                        line.clear();
                        reader.read_line(&mut line).expect("an answer");
                    }
                }
            });
        }
    });
    println!("{}", begun.elapsed().as_secs_f64());
}
