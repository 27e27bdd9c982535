//! Requests and responses of HTTP/1.1 (RFC 9110 and RFC 9112), as far as reading files needs them.

use std::fmt::Write as _;
use std::io;
use std::time::Duration;

use ingot_format::{Escaped, to_u64, to_usize};
use jiff::Timestamp;
use jiff::civil::DateTime;
use jiff::tz::TimeZone;

use crate::credentials::is_header_value;
use crate::fault::{Fault, FaultKind, Refusal, Result};
use crate::http::connection::Connection;
use crate::http::pace::Pace;
use crate::options::is_header_name;
use crate::url::Url;

/// Largest head of a response. Servers send a few hundred bytes, and the signed URLs of the Hub take a few thousand.
const MAX_HEAD_NBYTES: usize = 64 << 10;

/// Most headers of a response.
const MAX_HEADERS: usize = 128;

/// Longest line with the size of a chunk, and largest trailer.
const MAX_CHUNK_LINE_NBYTES: usize = 4 << 10;

/// An HTTP request.
#[derive(Clone, Debug)]
pub(crate) struct HttpRequest<'r> {
    pub(crate) method: &'static str,
    pub(crate) url: &'r Url,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: &'r [u8],
    /// Whether a signature leaves out the body, because the connection protects it.
    pub(crate) is_unsigned: bool,
    /// Whether the server may work for minutes before it answers.
    pub(crate) is_slow: bool,
}

impl<'r> HttpRequest<'r> {
    /// Return a request without headers and body.
    pub(crate) fn new(method: &'static str, url: &'r Url) -> HttpRequest<'r> {
        HttpRequest {
            method,
            url,
            headers: Vec::new(),
            body: &[],
            is_unsigned: false,
            is_slow: false,
        }
    }

    pub(crate) fn add(&mut self, name: &str, value: impl Into<String>) {
        self.headers.push((name.to_owned(), value.into()));
    }

    /// Return the head of the request. `absolute` is for proxies, which need the host in the first line.
    ///
    /// # Errors
    /// If a part of it would end its line.
    pub(crate) fn render(&self, absolute: bool, more: &[(String, String)]) -> Result<String> {
        let authority = self.url.authority();
        let target = if absolute {
            format!("http://{authority}{}", self.url.target())
        } else {
            self.url.target()
        };
        let mut request = HttpRequest::new(self.method, self.url);
        request.add("Host", authority);
        request.add("User-Agent", concat!("ingot/", env!("CARGO_PKG_VERSION")));
        request.add("Accept", "*/*");
        request.add("Accept-Encoding", "identity");
        if !matches!(self.method, "GET" | "HEAD") {
            request.add("Content-Length", self.body.len().to_string());
        }
        let headers = request.headers.iter().chain(&self.headers).chain(more);
        render_head(self.method, &target, headers)
    }
}

/// Return the head of a request. All heads are rendered here, so that no part of any request can end its line.
pub(crate) fn render_head<'h>(
    method: &str,
    target: &str,
    headers: impl Iterator<Item = &'h (String, String)>,
) -> Result<String> {
    let refuse = |what: &str| Fault::option(format!("{what} has characters that no request can contain"));
    if !target.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(refuse("the URL of a request"));
    }
    let mut text = format!("{method} {target} HTTP/1.1\r\n");
    for (name, value) in headers {
        if !is_header_name(name) || !is_header_value(value) {
            return Err(refuse(&format!("the header {}", Escaped(name))));
        }
        // Writing to a String does not fail.
        let _ = write!(text, "{name}: {value}\r\n");
    }
    text.push_str("\r\n");
    Ok(text)
}

/// The head of a response.
#[derive(Debug)]
pub(crate) struct Head {
    pub(crate) status: u16,
    reason: String,
    /// HTTP/1.0, which has no chunks.
    is_old: bool,
    headers: Vec<(String, Vec<u8>)>,
}

impl Head {
    /// Read the next head, after any informational responses.
    pub(crate) fn read(connection: &mut Connection, pace: &mut Pace<'_>) -> Result<Head> {
        loop {
            let Some((nbytes, head)) = Head::parse(connection.buffered())? else {
                if connection.buffered().len() > MAX_HEAD_NBYTES {
                    return Err(Fault::malformed("its head is longer than 64 KiB"));
                }
                connection.fill_some(pace)?;
                continue;
            };
            connection.take(nbytes);
            match head.status {
                // After a status of 101 the bytes belong to another protocol, which no request asks for.
                ..100 | 101 => return Err(Fault::malformed("its status is not one of HTTP/1.1")),
                // Such a response has no body (RFC 9110, 8.6). Another reader would take the next one for its body.
                100..200 if head.announces_body() => {
                    return Err(Fault::malformed("an informational response announces a body"));
                }
                100..200 => {}
                _ => return Ok(head),
            }
        }
    }

    fn parse(bytes: &[u8]) -> Result<Option<(usize, Head)>> {
        let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
        let mut response = httparse::Response::new(&mut headers);
        let nbytes = match response.parse(bytes) {
            Ok(httparse::Status::Complete(nbytes)) => nbytes,
            Ok(httparse::Status::Partial) => return Ok(None),
            Err(httparse::Error::TooManyHeaders) => {
                return Err(Fault::malformed("it has more than 128 headers"));
            }
            Err(_) => return Err(Fault::malformed("its head cannot be parsed")),
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
        Ok(Some((nbytes, head)))
    }

    /// Return all values of a header. Decisions consider all of them, since some readers use the first value and others
    /// the last.
    fn values<'h>(&'h self, name: &'static str) -> impl Iterator<Item = &'h [u8]> {
        let named = self.headers.iter().filter(move |header| header.0 == name);
        named.map(|header| header.1.as_slice())
    }

    /// Return all values as text. Lossy text would make two different values equal.
    fn texts<'h>(&'h self, name: &'static str) -> impl Iterator<Item = Result<&'h str>> {
        let refuse = move |_| Fault::malformed(format!("its {name} is not UTF-8"));
        self.values(name)
            .map(move |value| str::from_utf8(value).map_err(refuse))
    }

    /// Return the value of a header that may occur once, or several times with one value.
    pub(crate) fn single(&self, name: &'static str) -> Result<Option<&str>> {
        let mut texts = self.texts(name);
        let first = texts.next().transpose()?;
        for text in texts {
            if Some(text?) != first {
                return Err(Fault::malformed(format!(
                    "its {name} occurs twice, with two values"
                )));
            }
        }
        Ok(first)
    }

    /// Return the elements of a list in all occurrences of a header.
    pub(crate) fn list(&self, name: &'static str) -> Result<Vec<&str>> {
        let texts: Vec<&str> = self.texts(name).collect::<Result<_>>()?;
        let elements = texts.into_iter().flat_map(|text| text.split(','));
        Ok(elements
            .map(str::trim)
            .filter(|element| !element.is_empty())
            .collect())
    }

    /// Return the first value of a header for a message. No decision may depend on it.
    pub(crate) fn shown(&self, name: &'static str) -> Option<String> {
        let value = self.values(name).next()?;
        Some(String::from_utf8_lossy(value).into_owned())
    }

    fn announces_body(&self) -> bool {
        let mut names = self.headers.iter().map(|(name, _)| name.as_str());
        names.any(|name| matches!(name, "content-length" | "transfer-encoding"))
    }

    /// Return how the end of the body is found.
    pub(crate) fn framing(&self) -> Result<Framing> {
        let length = self.single("content-length")?;
        let is_coded = self.values("transfer-encoding").next().is_some();
        match length {
            // Another reader would use the other length, and take the rest for the next response.
            Some(_) if is_coded => Err(Fault::malformed(
                "it has both Transfer-Encoding and Content-Length",
            )),
            // A proxy of HTTP/1.0 does not know this header, and may have found another end of the body.
            None if is_coded && self.is_old => Err(Fault::malformed("it has Transfer-Encoding in HTTP/1.0")),
            None if is_coded => match &self.list("transfer-encoding")?[..] {
                [coding] if coding.eq_ignore_ascii_case("chunked") => Ok(Framing::Chunked(0, true)),
                _ => Err(Fault::malformed("its transfer encoding is unknown")),
            },
            _ if matches!(self.status, 204 | 304) => Ok(Framing::Length(0)),
            Some(length) => match parse_length(length) {
                Some(length) => Ok(Framing::Length(length)),
                None => Err(Fault::malformed("its Content-Length is not a number")),
            },
            None => Ok(Framing::Close),
        }
    }

    /// Whether the connection can be used again after this response.
    pub(crate) fn keeps_alive(&self) -> bool {
        let words = self.list("connection");
        words.is_ok_and(|words| !words.iter().any(|word| word.eq_ignore_ascii_case("close")))
    }

    /// Return the longest wait that the server asks for.
    fn retry_after(&self) -> Option<Duration> {
        let waits = self.texts("retry-after").flatten().filter_map(wait_of);
        waits.max()
    }

    /// Return the fault of a server that refuses a request, with its explanation.
    pub(crate) fn refusal(&self, said: Option<&str>) -> Fault {
        // Two different regions count as none.
        let region = self.single("x-amz-bucket-region").ok().flatten();
        FaultKind::Status(Refusal {
            status: self.status,
            reason: Escaped(&self.reason).to_string(),
            said: said.map(|said| Escaped(said.trim()).to_string()),
            wait: self.retry_after(),
            region: region.map(ToOwned::to_owned),
        })
        .into()
    }
}

/// Parse a wait in seconds, or until a date.
fn wait_of(text: &str) -> Option<Duration> {
    if is_digits(text) {
        return Some(Duration::from_secs(text.parse().unwrap_or(u64::MAX)));
    }
    let left = date_of(text)?.duration_since(Timestamp::now());
    Some(Duration::try_from(left).unwrap_or_default())
}

/// Return a date in the form of headers.
pub(crate) fn http_date(time: Timestamp) -> String {
    time.strftime("%a, %d %b %Y %H:%M:%S GMT").to_string()
}

/// Parse a date in any of the three forms of RFC 9110.
pub(crate) fn date_of(text: &str) -> Option<Timestamp> {
    let forms = [
        "%a, %d %b %Y %H:%M:%S GMT",
        "%A, %d-%b-%y %H:%M:%S GMT",
        "%a %b %e %H:%M:%S %Y",
    ];
    let parse = |form| DateTime::strptime(form, text).ok();
    let date = forms.into_iter().find_map(parse)?;
    Some(date.to_zoned(TimeZone::UTC).ok()?.timestamp())
}

/// Parse a length. Only digits are accepted: some readers take `+5` and `0x5` for 5.
pub(crate) fn parse_length(text: &str) -> Option<u64> {
    is_digits(text).then(|| text.parse().ok()).flatten()
}

fn is_digits(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// How the end of a body is found.
#[derive(Debug)]
pub(crate) enum Framing {
    /// After this many more bytes.
    Length(u64),
    /// After the last chunk. The current chunk has this many more bytes, and may be the first.
    Chunked(u64, bool),
    /// The body, with its trailer, has ended.
    Ended,
    /// At the end of the connection.
    Close,
}

impl Framing {
    /// Read bytes of the body. Zero means that the body or the connection has ended.
    pub(crate) fn read(
        &mut self,
        connection: &mut Connection,
        dest: &mut [u8],
        pace: &mut Pace<'_>,
    ) -> Result<usize> {
        if let Framing::Chunked(0, is_first) = *self {
            *self = match next_chunk(connection, is_first, pace)? {
                0 => Framing::Ended,
                left => Framing::Chunked(left, false),
            };
        }
        let left = match self {
            Framing::Ended | Framing::Length(0) => return Ok(0),
            Framing::Close => return connection.read(dest, pace),
            Framing::Length(left) | Framing::Chunked(left, _) => left,
        };
        let most = to_usize(*left).unwrap_or(usize::MAX).min(dest.len());
        let count = connection.read(&mut dest[..most], pace)?;
        *left -= to_u64(count);
        // The total length is unknown, so callers could not distinguish this from the end.
        if count == 0 && most > 0 && matches!(self, Framing::Chunked(..)) {
            return Err(cut_off());
        }
        Ok(count)
    }

    /// Whether the body was read to its end, so that the next bytes belong to another response.
    pub(crate) fn has_ended(&self) -> bool {
        matches!(self, Framing::Ended | Framing::Length(0))
    }
}

/// Read the size of the next chunk, and the trailer after the last chunk.
fn next_chunk(connection: &mut Connection, is_first: bool, pace: &mut Pace<'_>) -> Result<u64> {
    if !is_first && !line(connection, pace)?.is_empty() {
        return Err(Fault::malformed("a chunk does not end where it should"));
    }
    let mut text = line(connection, pace)?;
    text.extend_from_slice(b"\r\n");
    let nbytes = match httparse::parse_chunk_size(&text) {
        // httparse takes no digits for 0, which is the last chunk.
        Ok(httparse::Status::Complete((_, nbytes))) if text[0].is_ascii_hexdigit() => nbytes,
        _ => return Err(Fault::malformed("a chunk has no size")),
    };
    if nbytes == 0 {
        read_trailer(connection, pace)?;
    }
    Ok(nbytes)
}

/// Read the headers after the last chunk.
fn read_trailer(connection: &mut Connection, pace: &mut Pace<'_>) -> Result<()> {
    let mut nbytes = 0;
    loop {
        let text = line(connection, pace)?;
        nbytes += text.len();
        if text.is_empty() {
            return Ok(());
        }
        if !is_header_line(text) {
            return Err(Fault::malformed("its trailer cannot be parsed"));
        }
        if nbytes > MAX_CHUNK_LINE_NBYTES {
            return Err(Fault::malformed("its trailer is too long"));
        }
    }
}

/// Whether a line is one header.
fn is_header_line(mut line: Vec<u8>) -> bool {
    line.extend_from_slice(b"\r\n\r\n");
    let mut header = [httparse::EMPTY_HEADER];
    let parsed = httparse::parse_headers(&line, &mut header);
    matches!(parsed, Ok(httparse::Status::Complete((_, [_]))))
}

fn cut_off() -> Fault {
    FaultKind::Broken(io::ErrorKind::UnexpectedEof.into()).into()
}

/// Read the next line, without its end.
fn line(connection: &mut Connection, pace: &mut Pace<'_>) -> Result<Vec<u8>> {
    loop {
        let bytes = connection.buffered();
        if let Some(end) = bytes.windows(2).position(|pair| pair == b"\r\n") {
            let line = bytes[..end].to_vec();
            connection.take(end + 2);
            // Other readers end the line there.
            if line.iter().any(|byte| b"\r\n\0".contains(byte)) {
                return Err(Fault::malformed("a line between chunks contains a line end"));
            }
            return Ok(line);
        }
        if bytes.len() > MAX_CHUNK_LINE_NBYTES {
            return Err(Fault::malformed("a line between chunks is too long"));
        }
        connection.fill_some(pace)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(text: &str) -> Result<Head, Fault> {
        Ok(Head::parse(text.replace('\n', "\r\n").as_bytes())?.unwrap().1)
    }

    #[test]
    fn ambiguous_body_lengths_are_rejected() {
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
    fn retry_after_accepts_seconds_and_dates() {
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
    fn all_occurrences_of_a_header_are_considered() {
        let head = head("HTTP/1.1 206 x\nA: 1\nB: 1\na: 1\nb: 2\nC: x, y,\nC:\nc: z\n\n").unwrap();
        assert_eq!(head.single("a").unwrap(), Some("1"));
        assert_eq!(head.single("none").unwrap(), None);
        let fault = head.single("b").unwrap_err();
        assert_eq!(fault.code(), "malformed-response");
        assert!(fault.to_string().contains("its b occurs twice"), "{fault}");
        assert_eq!(head.list("c").unwrap(), ["x", "y", "z"]);
    }

    #[test]
    fn values_that_are_not_utf8_are_rejected() {
        let text = b"HTTP/1.1 206 x\r\nETag: \"\xFE\"\r\n\r\n";
        let (_, head) = Head::parse(text).unwrap().unwrap();
        assert_eq!(head.single("etag").unwrap_err().code(), "malformed-response");
        assert_eq!(head.shown("etag").unwrap(), "\"\u{FFFD}\"");
    }

    #[test]
    fn no_part_of_a_request_ends_its_line() {
        let url = Url::parse("http://h/x").unwrap();
        let rendered = |name: &str, value: &str| {
            let request = HttpRequest {
                headers: vec![(name.to_owned(), value.to_owned())],
                ..HttpRequest::new("GET", &url)
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
    fn dates_are_parsed_in_three_forms_and_written_in_the_first() {
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
