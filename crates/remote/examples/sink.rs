//! The other end of uploads, for benches/python/stores.py: a store of S3's protocol that discards all bytes, and the raw
//! rate of its connections.
//!
//! `sink serve` prints its port and serves until its input ends. `sink send PORT NBYTES` sends this many bytes in parts of
//! 8 MiB over 16 connections, and prints the seconds.

#![allow(
    clippy::expect_used,
    clippy::print_stdout,
    reason = "a bench may fail by panicking"
)]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
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

/// Answer the requests of one connection until it ends.
fn answer(stream: &TcpStream) {
    let _ = stream.set_nodelay(true);
    let mut reader = BufReader::with_capacity(256 << 10, stream);
    let mut dropped = vec![0; 256 << 10];
    while let Some((method, nbytes)) = head(&mut reader) {
        let mut left = nbytes;
        while left > 0 {
            let most = left.min(dropped.len());
            match reader.read(&mut dropped[..most]) {
                Ok(count) if count > 0 => left -= count,
                _ => return,
            }
        }
        // One body begins an upload and completes one.
        let body = match method.as_str() {
            "POST" => "<R><UploadId>1</UploadId></R></CompleteMultipartUploadResult>",
            _ => "",
        };
        let head = format!(
            "HTTP/1.1 200 OK\r\nETag: \"e\"\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        );
        if (&mut &*stream).write_all(head.as_bytes()).is_err() {
            return;
        }
    }
}

/// Return the method of the next request and the size of its body.
fn head(reader: &mut impl BufRead) -> Option<(String, usize)> {
    let mut line = String::new();
    reader.read_line(&mut line).ok()?;
    let method = line.split(' ').next().filter(|word| !word.is_empty())?.to_owned();
    let mut nbytes = 0;
    loop {
        line.clear();
        reader.read_line(&mut line).ok()?;
        let lower = line.trim_end().to_ascii_lowercase();
        if lower.is_empty() {
            return Some((method, nbytes));
        }
        if let Some(length) = lower.strip_prefix("content-length:") {
            nbytes = length.trim().parse().ok()?;
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
