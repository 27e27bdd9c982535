//! A small HTTP/1.1 server on this machine, whose responses the test chooses.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::thread;

/// A request of a client.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) path: String,
    pub(crate) headers: Vec<(String, String)>,
}

impl Request {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let found = self.headers.iter().find(|header| header.0 == name);
        found.map(|header| header.1.as_str())
    }

    /// Return the range in `Range`.
    pub(crate) fn range(&self) -> Option<Range<usize>> {
        let (first, last) = self.header("range")?.strip_prefix("bytes=")?.split_once('-')?;
        Some(first.parse().ok()?..last.parse::<usize>().ok()? + 1)
    }
}

/// A response.
pub(crate) struct Answer {
    status: u16,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
}

impl Answer {
    pub(crate) fn new(status: u16, body: &[u8]) -> Answer {
        Answer {
            status,
            headers: Vec::new(),
            body: body.to_vec(),
        }
    }

    /// Return the requested range of `data`.
    pub(crate) fn part(data: &[u8], request: &Request) -> Answer {
        let Some(asked) = request.range() else {
            return Answer::new(200, data);
        };
        if asked.start >= data.len() {
            let none = format!("bytes */{}", data.len());
            return Answer::new(416, b"").with("Content-Range", &none);
        }
        let (begin, end) = (asked.start, asked.end.min(data.len()));
        let range = format!("bytes {begin}-{}/{}", end - 1, data.len());
        Answer::new(206, &data[begin..end]).with("Content-Range", &range)
    }

    pub(crate) fn with(mut self, name: &str, value: &str) -> Answer {
        self.headers.push((name.to_owned(), value.to_owned()));
        self
    }
}

/// A server that runs until the test process ends. Its threads own nothing but a socket.
pub(crate) struct Server {
    pub(crate) url: String,
    asked: Arc<Mutex<Vec<Request>>>,
    connections: Arc<Mutex<usize>>,
}

impl Server {
    pub(crate) fn new(answer: impl Fn(&Request) -> Answer + Send + Sync + 'static) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let (asked, connections) = (Arc::default(), Arc::default());
        let server = Server {
            url,
            asked: Arc::clone(&asked),
            connections: Arc::clone(&connections),
        };
        let answer = Arc::new(answer);
        thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                *connections.lock().unwrap() += 1;
                let (answer, asked) = (Arc::clone(&answer), Arc::clone(&asked));
                thread::spawn(move || serve(&stream, &*answer, &asked));
            }
        });
        server
    }

    /// Return a server with ranges of `data`, of one version.
    pub(crate) fn of(data: Vec<u8>) -> Server {
        Server::new(move |request| Answer::part(&data, request).with("ETag", "\"v1\""))
    }

    pub(crate) fn at(&self, path: &str) -> String {
        format!("{}{path}", self.url)
    }

    pub(crate) fn asked(&self) -> Vec<Request> {
        self.asked.lock().unwrap().clone()
    }

    pub(crate) fn connections(&self) -> usize {
        *self.connections.lock().unwrap()
    }
}

fn serve(stream: &TcpStream, answer: &dyn Fn(&Request) -> Answer, asked: &Mutex<Vec<Request>>) {
    let mut reader = BufReader::new(stream);
    while let Some(request) = read(&mut reader) {
        asked.lock().unwrap().push(request.clone());
        let Answer {
            status,
            headers,
            body,
        } = answer(&request);
        let mut head = format!("HTTP/1.1 {status} Said\r\nContent-Length: {}\r\n", body.len());
        for (name, value) in headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        head.push_str("\r\n");
        let sent = (&mut &*stream).write_all(&[head.as_bytes(), &body].concat());
        if sent.is_err() {
            return;
        }
    }
}

fn read(reader: &mut impl BufRead) -> Option<Request> {
    let mut lines = Vec::new();
    loop {
        let mut line = String::new();
        match reader.read_line(&mut line) {
            Ok(count) if count > 0 => {}
            _ => return None,
        }
        match line.trim_end() {
            "" => break,
            line => lines.push(line.to_owned()),
        }
    }
    let path = lines.first()?.split(' ').nth(1)?.to_owned();
    let header = |line: &String| {
        let (name, value) = line.split_once(": ")?;
        Some((name.to_ascii_lowercase(), value.to_owned()))
    };
    let headers = lines.iter().skip(1).filter_map(header).collect();
    Some(Request { path, headers })
}
