//! Requests and answers of HTTP/1.1: RFC 9110 and 9112, as far as reading files takes.

use std::fmt::Write as _;
use std::time::Duration;

use ingot_format::{to_u64, to_usize};

use super::connection::Connection;
use super::fault::{Fault, FaultKind};
use super::pace::Pace;
use super::url::Url;

/// The longest head of an answer. Servers send a few hundred bytes, and the Hub's signed addresses take a few thousand.
const MAX_HEAD_NBYTES: usize = 64 << 10;

/// The most headers of an answer.
const MAX_HEADERS: usize = 128;

/// The longest line that says how long a chunk is, and the longest trailer.
const MAX_CHUNK_LINE_NBYTES: usize = 4 << 10;

/// What is asked of a server.
#[derive(Clone, Debug)]
pub(crate) struct Request<'r> {
    pub(crate) method: &'static str,
    pub(crate) url: &'r Url,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: &'r [u8],
}

impl Request<'_> {
    /// The request as it goes over the wire. `absolute` is for proxies, which have to be told the host.
    pub(crate) fn render(&self, absolute: bool, more: &[(String, String)]) -> Vec<u8> {
        let (url, mut text) = (self.url, String::new());
        let prefix = match absolute {
            true => format!("http://{}", url.authority()),
            false => String::new(),
        };
        // Writing to a String does not fail.
        let _ = write!(
            text,
            "{} {prefix}{} HTTP/1.1\r\nHost: {}\r\nUser-Agent: ingot/{}\r\nAccept: */*\r\nAccept-Encoding: identity\r\n",
            self.method,
            url.target(),
            url.authority(),
            env!("CARGO_PKG_VERSION"),
        );
        if self.method != "GET" {
            let _ = write!(text, "Content-Length: {}\r\n", self.body.len());
        }
        for (name, value) in self.headers.iter().chain(more) {
            let _ = write!(text, "{name}: {value}\r\n");
        }
        text.push_str("\r\n");
        let mut bytes = text.into_bytes();
        bytes.extend_from_slice(self.body);
        bytes
    }
}

/// The head of an answer.
#[derive(Debug)]
pub(crate) struct Head {
    pub(crate) status: u16,
    pub(crate) reason: String,
    headers: Vec<(String, String)>,
}

impl Head {
    /// Reads the next head, and what belongs to no answer before it.
    pub(crate) fn read(connection: &mut Connection, pace: &mut Pace) -> Result<Head, Fault> {
        loop {
            match Head::parse(connection.buffered())? {
                Some((taken, head)) => {
                    connection.take(taken);
                    // 1xx: the answer is still to come. Nobody has asked for another protocol.
                    if head.status >= 200 {
                        return Ok(head);
                    }
                }
                None if connection.buffered().len() > MAX_HEAD_NBYTES => {
                    return Err(FaultKind::Malformed("its head is longer than 64 KiB").into());
                }
                None => {
                    if connection.fill(pace)? == 0 {
                        let fault = std::io::ErrorKind::UnexpectedEof;
                        return Err(FaultKind::Broken(fault.into()).into());
                    }
                }
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
            let value = String::from_utf8_lossy(header.value).trim().to_owned();
            (header.name.to_ascii_lowercase(), value)
        };
        let head = Head {
            status: response.code.unwrap_or(0),
            reason: response.reason.unwrap_or_default().to_owned(),
            headers: response.headers.iter().map(header).collect(),
        };
        Ok(Some((taken, head)))
    }

    /// The value of a header, the first where there are several.
    pub(crate) fn get(&self, name: &str) -> Option<&str> {
        let header = self.headers.iter().find(|header| header.0 == name)?;
        Some(&header.1)
    }

    fn all<'h>(&'h self, name: &'static str) -> impl Iterator<Item = &'h str> {
        let named = move |header: &&(String, String)| header.0 == name;
        self.headers.iter().filter(named).map(|header| header.1.as_str())
    }

    /// The value of a header that may stand there once, or several times with one value.
    pub(crate) fn single(&self, name: &'static str) -> Result<Option<&str>, Fault> {
        let mut values = self.all(name);
        let first = values.next();
        match values.all(|value| Some(value) == first) {
            true => Ok(first),
            false => Err(FaultKind::Malformed("a header stands there twice, with two values").into()),
        }
    }

    /// How the body is delimited.
    pub(crate) fn framing(&self) -> Result<Framing, Fault> {
        let length = self.single("content-length")?;
        match (self.single("transfer-encoding")?, length) {
            // Two lengths: what one reader takes for the end is the next answer to another.
            (Some(_), Some(_)) => {
                Err(FaultKind::Malformed("it has both Transfer-Encoding and Content-Length").into())
            }
            (Some(coding), None) if coding.eq_ignore_ascii_case("chunked") => Ok(Framing::Chunked {
                left: 0,
                is_first: true,
            }),
            (Some(_), None) => Err(FaultKind::Malformed("its transfer encoding is unknown").into()),
            (None, _) if matches!(self.status, 204 | 304) => Ok(Framing::Length(0)),
            (None, Some(length)) => parse_length(length)
                .map(Framing::Length)
                .ok_or_else(|| FaultKind::Malformed("its Content-Length is no number").into()),
            (None, None) => Ok(Framing::Close),
        }
    }

    /// Whether the connection can be used again after this answer.
    pub(crate) fn keeps_alive(&self) -> bool {
        let says = |word: &str| {
            self.all("connection")
                .flat_map(|value| value.split(','))
                .any(|value| value.trim().eq_ignore_ascii_case(word))
        };
        !says("close")
    }

    /// How long the server wants us to wait.
    pub(crate) fn retry_after(&self) -> Option<Duration> {
        let value = self.get("retry-after")?;
        if value.bytes().all(|byte| byte.is_ascii_digit()) {
            // More seconds than a number holds are many.
            return Some(Duration::from_secs(value.parse().unwrap_or(u64::MAX)));
        }
        let then = httpdate::parse_http_date(value).ok()?;
        Some(
            then.duration_since(std::time::SystemTime::now())
                .unwrap_or_default(),
        )
    }
}

/// Digits only: `+5` and `0x5` are read by some as 5 and by others not.
pub(crate) fn parse_length(text: &str) -> Option<u64> {
    let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then(|| text.parse().ok()).flatten()
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
        pace: &mut Pace,
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
        Ok(count)
    }

    /// Whether all of it was read, so that what comes next belongs to another answer.
    pub(crate) fn has_ended(&self) -> bool {
        matches!(self, Framing::Ended | Framing::Length(0))
    }
}

/// The length of the next chunk; after the last one the trailer is read too.
fn next_chunk(connection: &mut Connection, is_first: bool, pace: &mut Pace) -> Result<u64, Fault> {
    if !is_first && !line(connection, pace)?.is_empty() {
        return Err(FaultKind::Malformed("a chunk does not end where it should").into());
    }
    let mut text = line(connection, pace)?;
    text.extend_from_slice(b"\r\n");
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
            if trailer > MAX_CHUNK_LINE_NBYTES {
                return Err(FaultKind::Malformed("its trailer is too long").into());
            }
        }
    }
    Ok(nbytes)
}

/// The next line, without its end.
fn line(connection: &mut Connection, pace: &mut Pace) -> Result<Vec<u8>, Fault> {
    loop {
        let bytes = connection.buffered();
        if let Some(end) = bytes.windows(2).position(|pair| pair == b"\r\n") {
            let line = bytes[..end].to_vec();
            connection.take(end + 2);
            return Ok(line);
        }
        if bytes.len() > MAX_CHUNK_LINE_NBYTES {
            return Err(FaultKind::Malformed("a line between chunks does not end").into());
        }
        if connection.fill(pace)? == 0 {
            return Err(FaultKind::Broken(std::io::ErrorKind::UnexpectedEof.into()).into());
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
        assert_eq!(waits("soon"), None);
    }
}
