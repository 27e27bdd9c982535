//! Requests and answers of HTTP/1.1: RFC 9110 and 9112, as far as reading files takes.

use std::fmt::Write as _;
use std::time::Duration;

use ingot_format::{Escaped, to_u64, to_usize};
use jiff::Timestamp;
use jiff::civil::DateTime;
use jiff::tz::TimeZone;

use crate::credentials::is_header_value;
use crate::fault::{Fault, FaultKind};
use crate::http::connection::Connection;
use crate::http::pace::Pace;
use crate::options::is_header_name;
use crate::url::Url;

/// The longest head of an answer. Servers send a few hundred bytes, and the Hub's signed addresses take a few thousand.
const MAX_HEAD_NBYTES: usize = 64 << 10;

/// The most headers of an answer.
const MAX_HEADERS: usize = 128;

/// The longest line that says how long a chunk is, and the longest trailer.
const MAX_CHUNK_LINE_NBYTES: usize = 4 << 10;

/// What is asked of a server.
#[derive(Clone, Debug)]
pub(crate) struct HttpRequest<'r> {
    pub(crate) method: &'static str,
    pub(crate) url: &'r Url,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: &'r [u8],
}

impl HttpRequest<'_> {
    /// The request as it goes over the wire. `absolute` is for proxies, which have to be told the host.
    ///
    /// # Errors
    /// Where a part of it would begin another line.
    pub(crate) fn render(&self, absolute: bool, more: &[(String, String)]) -> Result<Vec<u8>, Fault> {
        let authority = self.url.authority();
        let target = if absolute {
            format!("http://{authority}{}", self.url.target())
        } else {
            self.url.target()
        };
        let header = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        let mut headers = vec![
            header("Host", &authority),
            header("User-Agent", concat!("ingot/", env!("CARGO_PKG_VERSION"))),
            header("Accept", "*/*"),
            header("Accept-Encoding", "identity"),
        ];
        if self.method != "GET" {
            headers.push(header("Content-Length", &self.body.len().to_string()));
        }
        let head = render_head(
            self.method,
            &target,
            headers.iter().chain(&self.headers).chain(more),
        )?;
        let mut bytes = head.into_bytes();
        bytes.extend_from_slice(self.body);
        Ok(bytes)
    }
}

/// The head of a request: the only place where anything becomes lines of one. Whatever was checked before, no part of it
/// may end its line.
pub(crate) fn render_head<'h>(
    method: &str,
    target: &str,
    headers: impl Iterator<Item = &'h (String, String)>,
) -> Result<String, Fault> {
    let refuse = |what: &str| FaultKind::Option(format!("{what} has characters that no request can hold"));
    if !target.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(refuse("the address of a request").into());
    }
    let mut text = format!("{method} {target} HTTP/1.1\r\n");
    for (name, value) in headers {
        if !is_header_name(name) || !is_header_value(value) {
            return Err(refuse(&format!("the header {}", Escaped(name))).into());
        }
        // Writing to a String does not fail.
        let _ = write!(text, "{name}: {value}\r\n");
    }
    text.push_str("\r\n");
    Ok(text)
}

/// The head of an answer.
#[derive(Debug)]
pub(crate) struct Head {
    pub(crate) status: u16,
    pub(crate) reason: String,
    /// HTTP/1.0, which has no chunks.
    is_old: bool,
    headers: Vec<(String, Vec<u8>)>,
}

impl Head {
    /// Reads the next head, and what belongs to no answer before it.
    pub(crate) fn read(connection: &mut Connection, pace: &mut Pace<'_>) -> Result<Head, Fault> {
        loop {
            match Head::parse(connection.buffered())? {
                Some((taken, head)) => {
                    connection.take(taken);
                    match head.status {
                        // Nobody has asked for another protocol, and what follows would be in it.
                        ..100 | 101 => {
                            return Err(FaultKind::Malformed("its status is none of HTTP/1.1").into());
                        }
                        // It has no body (RFC 9110, 8.6): what one reader takes for the answer is a body to another.
                        102..200 | 100 if head.tells_of_body() => {
                            return Err(FaultKind::Malformed("an answer before it tells of a body").into());
                        }
                        // The answer is still to come.
                        102..200 | 100 => {}
                        _ => return Ok(head),
                    }
                }
                None if connection.buffered().len() > MAX_HEAD_NBYTES => {
                    return Err(FaultKind::Malformed("its head is longer than 64 KiB").into());
                }
                None => connection.fill_some(pace)?,
            }
        }
    }

    fn parse(bytes: &[u8]) -> Result<Option<(usize, Head)>, Fault> {
        let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
        let mut response = httparse::Response::new(&mut headers);
        let taken = match response.parse(bytes) {
            Ok(httparse::Status::Complete(taken)) => taken,
            Ok(httparse::Status::Partial) => return Ok(None),
            Err(httparse::Error::TooManyHeaders) => {
                return Err(FaultKind::Malformed("it has more than 128 headers").into());
            }
            Err(_) => return Err(FaultKind::Malformed("its head cannot be read").into()),
        };
        let header = |header: &httparse::Header<'_>| {
            let value = header.value.trim_ascii().to_vec();
            (header.name.to_ascii_lowercase(), value)
        };
        let head = Head {
            status: response.code.unwrap_or(0),
            reason: response.reason.unwrap_or_default().to_owned(),
            is_old: response.version == Some(0),
            headers: response.headers.iter().map(header).collect(),
        };
        Ok(Some((taken, head)))
    }

    /// All values of a header. What a decision hangs on is read of all: what one reader takes for the answer, the first,
    /// is to another the last.
    fn values<'h>(&'h self, name: &'static str) -> impl Iterator<Item = &'h [u8]> {
        let named = self.headers.iter().filter(move |header| header.0 == name);
        named.map(|header| header.1.as_slice())
    }

    /// Each of them as text. Two that are none would look alike.
    fn texts<'h>(&'h self, name: &'static str) -> impl Iterator<Item = Result<&'h str, Fault>> {
        let why = "is no text";
        self.values(name)
            .map(move |value| str::from_utf8(value).map_err(|_| FaultKind::Header { name, why }.into()))
    }

    /// The value of a header that may stand there once, or several times with one value.
    pub(crate) fn single(&self, name: &'static str) -> Result<Option<&str>, Fault> {
        let mut texts = self.texts(name);
        let first = texts.next().transpose()?;
        for text in texts {
            if Some(text?) != first {
                let why = "stands there twice, with two values";
                return Err(FaultKind::Header { name, why }.into());
            }
        }
        Ok(first)
    }

    /// The elements of a header that is a list, wherever they stand.
    pub(crate) fn list(&self, name: &'static str) -> Result<Vec<&str>, Fault> {
        let mut elements = Vec::new();
        for text in self.texts(name) {
            elements.extend(
                text?
                    .split(',')
                    .map(str::trim)
                    .filter(|element| !element.is_empty()),
            );
        }
        Ok(elements)
    }

    /// The first value of a header on which nothing hangs: it is shown.
    pub(crate) fn shown(&self, name: &'static str) -> Option<String> {
        let value = self.values(name).next()?;
        Some(String::from_utf8_lossy(value).into_owned())
    }

    fn tells_of_body(&self) -> bool {
        let mut names = self.headers.iter().map(|(name, _)| name.as_str());
        names.any(|name| matches!(name, "content-length" | "transfer-encoding"))
    }

    /// How the body is delimited.
    pub(crate) fn framing(&self) -> Result<Framing, Fault> {
        let length = self.single("content-length")?;
        let is_coded = self.values("transfer-encoding").next().is_some();
        match length {
            // Two lengths: what one reader takes for the end is the next answer to another.
            Some(_) if is_coded => {
                Err(FaultKind::Malformed("it has both Transfer-Encoding and Content-Length").into())
            }
            // A proxy that knows no chunks may have passed it on, and would have ended it elsewhere.
            None if is_coded && self.is_old => {
                Err(FaultKind::Malformed("it has Transfer-Encoding in HTTP/1.0").into())
            }
            None if is_coded => match &self.list("transfer-encoding")?[..] {
                [coding] if coding.eq_ignore_ascii_case("chunked") => Ok(Framing::Chunked {
                    left: 0,
                    is_first: true,
                }),
                _ => Err(FaultKind::Malformed("its transfer encoding is unknown").into()),
            },
            _ if matches!(self.status, 204 | 304) => Ok(Framing::Length(0)),
            Some(length) => parse_length(length)
                .map(Framing::Length)
                .ok_or_else(|| FaultKind::Malformed("its Content-Length is no number").into()),
            None => Ok(Framing::Close),
        }
    }

    /// Whether the connection can be used again after this answer.
    pub(crate) fn keeps_alive(&self) -> bool {
        let words = self.list("connection");
        words.is_ok_and(|words| !words.iter().any(|word| word.eq_ignore_ascii_case("close")))
    }

    /// How long the server wants us to wait: the longest of what it says.
    pub(crate) fn retry_after(&self) -> Option<Duration> {
        let waits = self.texts("retry-after").flatten().filter_map(wait_of);
        waits.max()
    }
}

/// A wait in seconds, or until a date.
fn wait_of(text: &str) -> Option<Duration> {
    if is_digits(text) {
        // More seconds than a number holds are many.
        return Some(Duration::from_secs(text.parse().unwrap_or(u64::MAX)));
    }
    let left = date_of(text)?.duration_since(Timestamp::now());
    Some(Duration::try_from(left).unwrap_or_default())
}

/// A date as headers have it.
pub(crate) fn http_date(time: Timestamp) -> String {
    time.strftime("%a, %d %b %Y %H:%M:%S GMT").to_string()
}

/// What such a date says, in any of the three forms that RFC 9110 has recipients read.
fn date_of(text: &str) -> Option<Timestamp> {
    let forms = [
        "%a, %d %b %Y %H:%M:%S GMT",
        "%A, %d-%b-%y %H:%M:%S GMT",
        "%a %b %e %H:%M:%S %Y",
    ];
    let read = |form| DateTime::strptime(form, text).ok();
    forms
        .into_iter()
        .find_map(read)?
        .to_zoned(TimeZone::UTC)
        .ok()
        .map(|time| time.timestamp())
}

/// Digits only: `+5` and `0x5` are read by some as 5 and by others not.
pub(crate) fn parse_length(text: &str) -> Option<u64> {
    is_digits(text).then(|| text.parse().ok()).flatten()
}

fn is_digits(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// How the end of a body is found.
#[derive(Debug)]
pub(crate) enum Framing {
    /// It has so many bytes more.
    Length(u64),
    /// In chunks, the present one of which has so many bytes more.
    Chunked { left: u64, is_first: bool },
    /// It has ended, and so has all that belongs to it.
    Ended,
    /// With the connection.
    Close,
}

impl Framing {
    /// Reads bytes of the body; none means that it has ended, or that the connection has.
    pub(crate) fn read(
        &mut self,
        connection: &mut Connection,
        dest: &mut [u8],
        pace: &mut Pace<'_>,
    ) -> Result<usize, Fault> {
        if let Framing::Chunked { left: 0, is_first } = *self {
            *self = match next_chunk(connection, is_first, pace)? {
                0 => Framing::Ended,
                left => Framing::Chunked {
                    left,
                    is_first: false,
                },
            };
        }
        let left = match self {
            Framing::Ended | Framing::Length(0) => return Ok(0),
            Framing::Close => return connection.read(dest, pace),
            Framing::Length(left) | Framing::Chunked { left, .. } => left,
        };
        let most = to_usize(*left).unwrap_or(usize::MAX).min(dest.len());
        let count = connection.read(&mut dest[..most], pace)?;
        *left -= to_u64(count);
        // How long all of it is stands nowhere else: nobody after us could tell it from the end.
        if count == 0 && most > 0 && matches!(self, Framing::Chunked { .. }) {
            return Err(cut_off());
        }
        Ok(count)
    }

    /// Whether all of it was read, so that what comes next belongs to another answer.
    pub(crate) fn has_ended(&self) -> bool {
        matches!(self, Framing::Ended | Framing::Length(0))
    }
}

/// The length of the next chunk; after the last one the trailer is read too.
fn next_chunk(connection: &mut Connection, is_first: bool, pace: &mut Pace<'_>) -> Result<u64, Fault> {
    if !is_first && !line(connection, pace)?.is_empty() {
        return Err(FaultKind::Malformed("a chunk does not end where it should").into());
    }
    let mut text = line(connection, pace)?;
    text.extend_from_slice(b"\r\n");
    // httparse reads no digits as 0, which is the end.
    if !text[0].is_ascii_hexdigit() {
        return Err(FaultKind::Malformed("a chunk has no length").into());
    }
    let nbytes = match httparse::parse_chunk_size(&text) {
        Ok(httparse::Status::Complete((_, nbytes))) => nbytes,
        _ => return Err(FaultKind::Malformed("a chunk has no length").into()),
    };
    if nbytes == 0 {
        let mut trailer = 0;
        loop {
            let text = line(connection, pace)?;
            trailer += text.len();
            if text.is_empty() {
                break;
            }
            if !is_header_line(text) {
                return Err(FaultKind::Malformed("its trailer cannot be read").into());
            }
            if trailer > MAX_CHUNK_LINE_NBYTES {
                return Err(FaultKind::Malformed("its trailer is too long").into());
            }
        }
    }
    Ok(nbytes)
}

/// Whether it is one header, as in a head.
fn is_header_line(mut line: Vec<u8>) -> bool {
    line.extend_from_slice(b"\r\n\r\n");
    let mut header = [httparse::EMPTY_HEADER];
    matches!(
        httparse::parse_headers(&line, &mut header),
        Ok(httparse::Status::Complete((_, [_])))
    )
}

fn cut_off() -> Fault {
    FaultKind::Broken(std::io::ErrorKind::UnexpectedEof.into()).into()
}

/// The next line, without its end.
fn line(connection: &mut Connection, pace: &mut Pace<'_>) -> Result<Vec<u8>, Fault> {
    loop {
        let bytes = connection.buffered();
        if let Some(end) = bytes.windows(2).position(|pair| pair == b"\r\n") {
            let line = bytes[..end].to_vec();
            connection.take(end + 2);
            // Other readers end a line there.
            if line.iter().any(|byte| b"\r\n\0".contains(byte)) {
                return Err(FaultKind::Malformed("a line between chunks has an end inside").into());
            }
            return Ok(line);
        }
        if bytes.len() > MAX_CHUNK_LINE_NBYTES {
            return Err(FaultKind::Malformed("a line between chunks does not end").into());
        }
        if connection.fill(pace)? == 0 {
            return Err(cut_off());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(text: &str) -> Result<Head, Fault> {
        Ok(Head::parse(text.replace('\n', "\r\n").as_bytes())?.unwrap().1)
    }

    #[test]
    fn a_body_with_two_ends_is_refused() {
        for headers in [
            "Content-Length: 5\nTransfer-Encoding: chunked",
            "Content-Length: 5\nContent-Length: 6",
            "Content-Length: +5",
            "Content-Length: 5,5",
            "Content-Length: 99999999999999999999",
            "Transfer-Encoding: gzip, chunked",
            "Transfer-Encoding: chunked\nTransfer-Encoding: identity",
            "Transfer-Encoding: chunked\nTransfer-Encoding: chunked",
            "Transfer-Encoding:",
        ] {
            let head = head(&format!("HTTP/1.1 206 x\n{headers}\n\n")).unwrap();
            assert_eq!(
                head.framing().unwrap_err().code(),
                "malformed-response",
                "{headers}"
            );
        }
    }

    #[test]
    fn waits_are_read_in_both_forms() {
        let waits = |value: &str| {
            head(&format!("HTTP/1.1 503 x\nRetry-After: {value}\n\n"))
                .unwrap()
                .retry_after()
        };
        assert_eq!(waits("7"), Some(Duration::from_secs(7)));
        assert_eq!(
            waits("99999999999999999999999"),
            Some(Duration::from_secs(u64::MAX))
        );
        assert_eq!(waits("Fri, 31 Dec 1999 23:59:59 GMT"), Some(Duration::ZERO));
        assert!(waits("Fri, 31 Dec 2100 23:59:59 GMT").unwrap() > Duration::from_secs(1 << 30));
        for none in [
            "Fri, 31 Dec 2100",
            "Fri, 32 Dec 2100 23:59:59 GMT",
            "soon",
            "",
            " ",
            "-1",
            "+1",
            "7.5",
        ] {
            assert_eq!(waits(none), None, "{none:?}");
        }
        assert_eq!(
            waits("\nRetry-After: 7\nRetry-After: 3"),
            Some(Duration::from_secs(7))
        );
    }

    #[test]
    fn every_occurrence_of_a_header_counts() {
        let head = head("HTTP/1.1 206 x\nA: 1\nB: 1\na: 1\nb: 2\nC: x, y,\nC:\nc: z\n\n").unwrap();
        assert_eq!(head.single("a").unwrap(), Some("1"));
        assert_eq!(head.single("none").unwrap(), None);
        let fault = head.single("b").unwrap_err();
        assert_eq!(fault.code(), "malformed-response");
        assert!(fault.to_string().contains("its b stands there twice"), "{fault}");
        assert_eq!(head.list("c").unwrap(), ["x", "y", "z"]);
    }

    #[test]
    fn two_values_that_are_no_text_are_not_taken_for_one() {
        let text = b"HTTP/1.1 206 x\r\nETag: \"\xFE\"\r\n\r\n";
        let (_, head) = Head::parse(text).unwrap().unwrap();
        assert_eq!(head.single("etag").unwrap_err().code(), "malformed-response");
        assert_eq!(head.shown("etag").unwrap(), "\"\u{FFFD}\"");
    }

    #[test]
    fn nothing_of_a_request_ends_its_line() {
        let url = Url::parse("http://h/x").unwrap();
        let rendered = |name: &str, value: &str| {
            let request = HttpRequest {
                method: "GET",
                url: &url,
                headers: vec![(name.to_owned(), value.to_owned())],
                body: &[],
            };
            request.render(false, &[])
        };
        assert!(rendered("X", "a\tb ü").is_ok());
        for (name, value) in [
            ("X", "a\r\nHost: b"),
            ("X", "a\n"),
            ("X", "\0"),
            ("X\r\nY", "a"),
            ("X:", "a"),
            ("", "a"),
        ] {
            let fault = rendered(name, value).unwrap_err();
            assert_eq!(fault.code(), "storage-option", "{name:?} {value:?}");
            assert!(!fault.to_string().contains(['\r', '\n', '\0']), "{fault}");
        }
        for target in ["/a b", "/a\r\nX: y", "/ü"] {
            assert!(render_head("GET", target, [].iter()).is_err(), "{target:?}");
        }
    }

    /// The example of RFC 9110, section 5.6.7.
    #[test]
    fn dates_are_read_in_each_form_and_written_in_the_first() {
        let time = Timestamp::from_second(784_111_777).unwrap();
        for text in [
            "Sun, 06 Nov 1994 08:49:37 GMT",
            "Sunday, 06-Nov-94 08:49:37 GMT",
            "Sun Nov  6 08:49:37 1994",
        ] {
            assert_eq!(date_of(text), Some(time), "{text}");
        }
        assert_eq!(http_date(time), "Sun, 06 Nov 1994 08:49:37 GMT");
    }
}
