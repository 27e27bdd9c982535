//! Responses of HTTP/1.1 and URLs, compared with `hyper`, `httparse`, `ureq` and `http`. Everything that one of them
//! rejects is rejected here, with listed exceptions, and accepted responses have the same bytes.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use ingot_remote::{Client, Fault, Location, RemoteFile, RemoteOptions, Resource, StopFlag};

use crate::of_hyper::of_hyper;
use crate::server::{Answer, Server};

/// Characters that `http` rejects in a path and ingot accepts. Paths are sent unchanged. Keys of stores contain these
/// characters, and curl sends them.
const TAKEN: &[char] = &['<', '>', '`', '"'];

/// First lines. The first row is valid, as in each of these tables.
const FIRST: &[&str] = &[
    "HTTP/1.1 200 OK",
    "HTTP/1.1 200",
    "HTTP/1.1 200 ",
    "HTTP/1.0 200 OK",
    "HTTP/1.2 200 OK",
    "HTTP/2.0 200 OK",
    "http/1.1 200 OK",
    "ICY 200 OK",
    "HTTP/1.1  200 OK",
    "HTTP/1.1\t200 OK",
    "HTTP/1.1 20 OK",
    "HTTP/1.1 2000 OK",
    "HTTP/1.1 +20 OK",
    "HTTP/1.1 200 O\0K",
    "HTTP/1.1 200 O\x7fK",
    "HTTP/1.1 200 Für",
    " HTTP/1.1 200 OK",
    "\r\nHTTP/1.1 200 OK",
    "\nHTTP/1.1 200 OK",
    "HTTP/1.1 100 Go on\r\n\r\nHTTP/1.1 200 OK",
    "HTTP/1.1 103 Hints\r\nLink: <x>\r\n\r\nHTTP/1.1 100 Go on\r\n\r\nHTTP/1.1 200 OK",
    "HTTP/1.1 100 Go on\r\nContent-Length: 3\r\n\r\nHTTP/1.1 200 OK",
    "HTTP/1.1 101 Switching\r\n\r\nHTTP/1.1 200 OK",
    "HTTP/1.1 099 Early\r\n\r\nHTTP/1.1 200 OK",
    "HTTP/1.1 204 None",
    "HTTP/1.1 304 Same",
];

/// Lines between the headers.
const MORE: &[&str] = &[
    "X: y",
    "X:y",
    "X:",
    "X: y ",
    "X: a\r\n b",
    "X: a\r\n\tb",
    " X: y",
    "\tX: y",
    "X : y",
    "X\t: y",
    ": y",
    "X",
    "X y: z",
    "X: a\0b",
    "X: a\x01b",
    "X: a\x7fb",
    "X: a\rb",
    "X\0: y",
    "Ü: y",
    "X: ü",
    "X(: y",
    "X: y\r",
];

/// Headers with the length of a body of five bytes.
const LENGTHS: &[&str] = &[
    "Content-Length: 5",
    "Content-Length:5",
    "Content-Length: 5 ",
    "Content-Length: 005",
    "Content-Length: 5\r\nContent-Length: 5",
    "Content-Length: 5\r\ncontent-length: 6",
    "Content-Length: 6\r\nContent-Length: 5",
    "Content-Length: 5, 5",
    "Content-Length: 5,6",
    "Content-Length: +5",
    "Content-Length: -5",
    "Content-Length: 0x5",
    "Content-Length: 5 5",
    "Content-Length: 5.0",
    "Content-Length:",
    "Content-Length: x",
    "Content-Length: 99999999999999999999",
    "Content-Length: 18446744073709551615",
    "Content-Length: 6",
    "Content-Length : 5",
    "Content-Length: 5\r\n ",
    "Content-Length: 5\0",
    "Connection: close",
];

/// Headers of a chunked body.
const CODINGS: &[&str] = &[
    "Transfer-Encoding: chunked",
    "transfer-encoding: Chunked",
    "Transfer-Encoding: chunked ",
    "Transfer-Encoding: gzip, chunked",
    "Transfer-Encoding: chunked, gzip",
    "Transfer-Encoding: chunked, chunked",
    "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
    "Transfer-Encoding: identity",
    "Transfer-Encoding: xchunked",
    "Transfer-Encoding: chunked;q=1",
    "Transfer-Encoding: ,chunked",
    "Transfer-Encoding: \x0bchunked",
    "Transfer-Encoding : chunked",
    "Transfer-Encoding:",
    "Transfer-Encoding: chunked\r\nContent-Length: 5",
    "Content-Length: 5\r\nTransfer-Encoding: chunked",
    "Content-Length: 15\r\nTransfer-Encoding: identity",
];

/// Lines before a chunk of five bytes.
const SIZES: &[&str] = &[
    "5",
    "05",
    "0000000000000005",
    "00000000000000005",
    "5 ",
    "5\t",
    "5;a=b",
    "5 ;a",
    "5;a=\"b\"",
    "5;",
    " 5",
    "5 5",
    "+5",
    "-5",
    "0x5",
    "5x",
    "G",
    "",
    ";a",
    "5;a\0",
    "5;a\x01",
    "5;a\rb",
    "5\r",
    "5;a\nb",
    "FFFFFFFFFFFFFFFF",
    "10000000000000005",
    "6",
    "4",
];

/// Bytes after the chunk, up to the end.
const ENDS: &[&str] = &[
    "\r\n0\r\n\r\n",
    "\r\n000\r\n\r\n",
    "\r\n0;a=b\r\n\r\n",
    "\r\n0\r\nX: y\r\n\r\n",
    "\r\n0\r\nContent-Length: 9\r\n\r\n",
    "\r\n0\r\nX y\r\n\r\n",
    "\r\n0\r\nX: a\0b\r\n\r\n",
    "\r\n0\r\n: y\r\n\r\n",
    "\r\n0\r\n X: y\r\n\r\n",
    "\r\n0\r\nX : y\r\n\r\n",
    "\r\n0\r\nX: a\rb\r\n\r\n",
    "\r\n0\n\n",
    "\n0\r\n\r\n",
    "0\r\n\r\n",
    "xx0\r\n\r\n",
    "\r\n0\r\n",
    "\r\n0",
    "\r\n",
    "",
    "\r\n0\r\n\n",
    "\r\n0\r\nX: y\n\r\n",
    "\r\n3\r\nabc\r\n0\r\n\r\n",
    "\r\n-0\r\n\r\n",
    "\r\n\r\n",
];

const LINE_ENDS: &[&str] = &["\r\n", "\n", "\r", "\r\r\n", "\n\r"];

/// xorshift64: the same answers on every run.
struct Dice(u64);

impl Dice {
    /// Return the first row in most cases, so that a response has few faults.
    fn pick<'t>(&mut self, table: &[&'t str]) -> &'t str {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        let at = match self.0 % 4 {
            0 => usize::try_from((self.0 >> 8) % 1000).unwrap() % table.len(),
            _ => 0,
        };
        table[at]
    }
}

fn render(parts: [&str; 6], is_chunked: bool) -> Vec<u8> {
    let [first, more, framing, size, after, end] = parts;
    let mut text = format!("{first}{end}{more}{end}{framing}{end}{end}");
    match is_chunked {
        true => text.push_str(&format!("{size}\r\nhello{after}")),
        false => text.push_str("hello"),
    }
    text.into_bytes()
}

/// Return responses with one unusual row each, and 1,500 with several.
fn answers() -> Vec<Vec<u8>> {
    let mut answers = BTreeSet::new();
    for is_chunked in [false, true] {
        let tables = [
            FIRST,
            MORE,
            if is_chunked { CODINGS } else { LENGTHS },
            SIZES,
            ENDS,
            LINE_ENDS,
        ];
        let good = tables.map(|table| table[0]);
        for (at, table) in tables.iter().enumerate() {
            for piece in *table {
                let mut parts = good;
                parts[at] = piece;
                answers.insert(render(parts, is_chunked));
            }
        }
        let mut dice = Dice(0x5EED_0001);
        for _ in 0..750 {
            answers.insert(render(tables.map(|table| dice.pick(table)), is_chunked));
        }
        // Many headers, and long ones.
        for (count, nbytes) in [(90, 1), (200, 1), (1, 60_000), (1, 500_000)] {
            let many = vec![format!("X: {}", "y".repeat(nbytes)); count].join("\r\n");
            let mut parts = good;
            parts[1] = &many;
            answers.insert(render(parts, is_chunked));
        }
    }
    // Truncated at each byte.
    let whole = render([FIRST[0], MORE[0], LENGTHS[0], "", "", "\r\n"], false);
    answers.extend((0..whole.len()).map(|end| whole[..end].to_vec()));
    let whole = render([FIRST[0], MORE[0], CODINGS[0], SIZES[0], ENDS[3], "\r\n"], true);
    answers.extend((0..whole.len()).map(|end| whole[..end].to_vec()));
    answers.into_iter().collect()
}

/// Answer a request for `/n` with the `n`-th response, and close the connection.
fn serve(answers: Arc<Vec<Vec<u8>>>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            let answers = Arc::clone(&answers);
            thread::spawn(move || answer(&stream, &answers));
        }
    });
    url
}

fn answer(mut stream: &TcpStream, answers: &[Vec<u8>]) -> Option<()> {
    let mut lines = BufReader::new(stream).lines().map_while(Result::ok);
    let at: usize = lines.next()?.split(' ').nth(1)?.strip_prefix('/')?.parse().ok()?;
    lines.find(String::is_empty)?;
    stream.write_all(&answers[at]).ok()?;
    stream.shutdown(Shutdown::Write).ok()?;
    // Wait for the client to close: a reset would discard the response.
    io::copy(&mut stream, &mut io::sink()).ok().map(drop)
}

fn ours(url: &str) -> Result<Vec<u8>, Fault> {
    let mut options = RemoteOptions::default();
    options.retries = 0;
    options.timeout = Duration::from_secs(20);
    let Location::Remote(remote) = Location::find(url, &options, StopFlag::never())? else {
        panic!("{url} is on this machine");
    };
    let resource = Resource::new(&Arc::new(Client::new(options)), &remote);
    let file = RemoteFile::begin(resource, 64, StopFlag::never())?;
    let mut bytes = Vec::new();
    file.all(StopFlag::never()).read_to_end(&mut bytes).unwrap();
    Ok(bytes)
}

/// Parse the last head, after the informational ones, with httparse alone.
fn of_httparse(mut answer: &[u8]) -> Result<u16, String> {
    loop {
        let mut headers = [httparse::EMPTY_HEADER; 256];
        let mut response = httparse::Response::new(&mut headers);
        match response.parse(answer).map_err(|error| error.to_string())? {
            httparse::Status::Partial => return Err("partial".to_owned()),
            httparse::Status::Complete(taken) => match response.code {
                Some(100..=199) => answer = &answer[taken..],
                code => return Ok(code.unwrap()),
            },
        }
    }
}

/// Return the response as ureq reads it from the same server.
fn of_ureq(agent: &ureq::Agent, url: &str) -> Result<(u16, Vec<u8>), String> {
    let answer = agent.get(url).call().map_err(|error| error.to_string())?;
    let (status, mut bytes) = (answer.status().as_u16(), Vec::new());
    let read = answer.into_body().into_reader().read_to_end(&mut bytes);
    read.map(|_| (status, bytes)).map_err(|error| error.to_string())
}

#[test]
fn accepted_responses_are_the_same_for_hyper_httparse_and_ureq() {
    let answers = Arc::new(answers());
    let url = serve(Arc::clone(&answers));
    let agent = ureq::Agent::config_builder().timeout_global(Some(Duration::from_secs(20)));
    // Without idle connections, since the server is about to close them.
    let agent: ureq::Agent = agent.proxy(None).max_idle_connections(0).build().into();
    let (mut taken, mut wrong) = (0, String::new());
    for (at, answer) in answers.iter().enumerate() {
        let url = format!("{url}/{at}");
        let Ok(ours) = ours(&url) else {
            continue;
        };
        taken += 1;
        let of_hyper = of_httparse(answer).and_then(|_| of_hyper(answer));
        let of_ureq = of_ureq(&agent, &url);
        for (name, theirs) in [("hyper", of_hyper), ("ureq", of_ureq)] {
            if theirs.as_ref() != Ok(&(200, ours.clone())) {
                let answer = String::from_utf8_lossy(answer);
                let ours = String::from_utf8_lossy(&ours);
                writeln!(wrong, "{answer:.300?}: ours {ours:?}, {name} {theirs:?}").unwrap();
            }
        }
    }
    assert!(
        wrong.is_empty(),
        "{} of {}:\n{wrong}",
        wrong.lines().count(),
        answers.len()
    );
    // Both outcomes occur.
    let refused = answers.len() - taken;
    assert!(taken > 50 && refused > 200, "{taken} taken, {refused} refused");
}

#[test]
fn paths_are_sent_unchanged_and_rejected_if_http_rejects_them() {
    let server = Server::new(|_| Answer::new(200, b"hello"));
    let pieces = [
        "a", "b", "/", "//", ".", "..", "/./", "/../", "%2e", "%2F", "%", "%zz", "+", "~", "?", "?a=b&c",
        "#f", ":", "@", ";", ",", "=", "&", "'", "\"", "<", ">", "`", "{", "}", "|", "\\", "^", "[", "]",
        " ", "\t", "\n", "\0", "\x7f", "*", "!", "$", "(", ")",
    ];
    let mut dice = Dice(0x5EED_0002);
    let mut wrong = String::new();
    let (mut taken, mut refused) = (0, 0);
    for _ in 0..1000 {
        let mut path = String::from("/");
        for _ in 0..5 {
            path.push_str(dice.pick(&pieces));
        }
        let url = server.at(&path);
        let ours = ours(&url).ok().map(|_| server.asked().pop().unwrap().path);
        // Neither sends the fragment.
        let theirs = url.parse::<http::Uri>().ok();
        match (ours, theirs.as_ref().and_then(http::Uri::path_and_query)) {
            (None, None) => refused += 1,
            (Some(ours), Some(theirs)) if ours == theirs.as_str() => taken += 1,
            (Some(ours), None) if ours == path.split('#').next().unwrap() && path.contains(TAKEN) => {
                taken += 1
            }
            // Stricter than `http`.
            (None, Some(_)) => refused += 1,
            (ours, theirs) => writeln!(wrong, "{path:?}: ours {ours:?}, theirs {theirs:?}").unwrap(),
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
    assert!(taken > 100 && refused > 20, "{taken} taken, {refused} refused");
}

#[test]
fn authorities_that_http_rejects_are_rejected() {
    let pieces = [
        "h",
        "example.com",
        "127.0.0.1",
        "[::1]",
        "[::1",
        "::1]",
        "[",
        "]",
        ":",
        ":80",
        ":99999",
        ":-1",
        ":x",
        "@",
        "me@",
        "me:pw@",
        "a@b@",
        "%",
        "%41",
        " ",
        "\\",
        "<",
        "\"",
        "^",
        "{",
        "|",
        "`",
        "\0",
        "..",
        "-",
        "_",
        "",
    ];
    let options = RemoteOptions::default();
    let mut wrong = String::new();
    let pieces = &pieces;
    let threes = pieces.iter().flat_map(|a| {
        pieces
            .iter()
            .flat_map(move |b| pieces.iter().map(move |c| format!("{a}{b}{c}")))
    });
    for authority in threes {
        let url = format!("http://{authority}/x");
        let is_ours = Location::find(&url, &options, StopFlag::never()).is_ok();
        // The user is not part of a request. It ends at the last `@`, as for curl and browsers.
        let sent = match authority.rsplit_once('@') {
            Some((_, host)) => format!("http://me@{host}/x"),
            None => url.clone(),
        };
        if is_ours && sent.parse::<http::Uri>().is_err() {
            writeln!(wrong, "{url:?}").unwrap();
        }
    }
    assert!(
        wrong.is_empty(),
        "{} authorities:\n{wrong}",
        wrong.lines().count()
    );
}
