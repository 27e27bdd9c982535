//! URLs of HTTP: parsed once, and never put in another form.

use std::borrow::Cow;
use std::fmt;
use std::net::IpAddr;

use crate::fault::{Fault, FaultKind};
use crate::network::is_public;

/// The schemes that are asked for; `file` is a path.
pub(crate) const SCHEMES: &[&str] = &["http", "https", "hf", "s3", "gs", "az"];

/// What stands before `://`, if it can be a scheme, and what follows. A single letter is a drive. fsspec puts
/// several before one another, with `::` between them.
pub(crate) fn split_scheme(text: &str) -> Option<(&str, &str)> {
    let (scheme, rest) = text.split_once("://")?;
    let may = |byte: u8| byte.is_ascii_alphanumeric() || b"+-.:".contains(&byte);
    let begins = scheme
        .bytes()
        .next()
        .is_some_and(|byte| byte.is_ascii_alphabetic());
    (begins && scheme.len() > 1 && scheme.bytes().all(may)).then_some((scheme, rest))
}

/// The same of a URL that was made a path, which leaves one slash of two.
pub(crate) fn split_collapsed(text: &str) -> Option<(&str, &str)> {
    let (scheme, rest) = text.split_once(":/")?;
    let last = scheme.rsplit("::").next().unwrap_or_default();
    let is_known = SCHEMES.iter().any(|known| known.eq_ignore_ascii_case(last));
    is_known.then_some((scheme, rest))
}

/// How a URL is spoken to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Scheme {
    Http,
    Https,
}

impl Scheme {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Scheme::Http => "http",
            Scheme::Https => "https",
        }
    }

    fn port(self) -> u16 {
        match self {
            Scheme::Http => 80,
            Scheme::Https => 443,
        }
    }
}

/// A URL of HTTP. `Display` leaves out what may be secret: the user with the password, and the query, which is where
/// signatures stand.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Url {
    pub(crate) scheme: Scheme,
    /// What stands before `@`, percent-encoded as it was given.
    pub(crate) user: Option<String>,
    /// A name in small letters, or an address; one of IPv6 without its brackets.
    pub(crate) host: String,
    pub(crate) port: u16,
    /// Begins with `/`. As it was given, but for bytes outside of ASCII.
    pub(crate) path: String,
    /// Without the `?`.
    pub(crate) query: Option<String>,
}

/// What stands in the queries of signed addresses of CloudFront and Azure, and begins those of S3 and Google.
const SIGNATURES: &[&str] = &[
    "expires",
    "signature",
    "key-pair-id",
    "policy",
    "awsaccesskeyid",
    "googleaccessid",
    "sig",
    "se",
    "st",
    "sp",
    "sv",
    "sr",
    "spr",
    "skoid",
    "sktid",
    "skt",
    "ske",
    "sks",
    "skv",
];
const SIGNATURE_PREFIXES: &[&str] = &["x-amz-", "x-goog-"];

/// Names in a query that select a file or how it is sent, and are no credentials.
const HARMLESS: &[&str] = &["download", "generation", "versionid"];

/// What makes two URLs one place to send secrets to.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct SecurityOrigin {
    pub(crate) scheme: Scheme,
    pub(crate) host: String,
    pub(crate) port: u16,
}

impl Url {
    /// Reads an absolute URL. The path is kept as it stands: a `..` or a `%2F` in it is the server's to understand.
    pub(crate) fn parse(text: &str) -> Result<Url, Fault> {
        let refuse = |why: &str| Fault::new(FaultKind::Address(why.to_owned()));
        check_characters(text)?;
        let (scheme, rest) = text
            .split_once("://")
            .ok_or_else(|| refuse("expected http://… or https://…"))?;
        let scheme = match scheme.to_ascii_lowercase().as_str() {
            "http" => Scheme::Http,
            "https" => Scheme::Https,
            other => {
                return Err(refuse(&format!(
                    "the scheme {other}: is none of http: and https:"
                )));
            }
        };
        let rest = rest.split('#').next().unwrap_or_default();
        let end = rest.find(['/', '?']).unwrap_or(rest.len());
        let (authority, rest) = rest.split_at(end);
        let (user, host_and_port) = match authority.rsplit_once('@') {
            Some((user, host)) => (Some(user.to_owned()), host),
            None => (None, authority),
        };
        let (host, port) = host_and_port_of(host_and_port, scheme.port())?;
        let (path, query) = match rest.split_once('?') {
            Some((path, query)) => (path, Some(query)),
            None => (rest, None),
        };
        Ok(Url {
            scheme,
            user,
            host,
            port,
            path: if path.is_empty() {
                "/".to_owned()
            } else {
                encode_foreign(path)
            },
            query: query.map(encode_foreign),
        })
    }

    /// Where a redirect from here leads.
    pub(crate) fn join(&self, location: &str) -> Result<Url, Fault> {
        check_characters(location)?;
        let head = location.split(['/', '?', '#']).next().unwrap_or_default();
        // The user in a Location header is the server's, not the caller's.
        let absolute = |text: &str| Url::parse(text).map(|url| Url { user: None, ..url });
        if head.contains(':') {
            return absolute(location);
        }
        if let Some(rest) = location.strip_prefix("//") {
            return absolute(&format!("{}://{rest}", self.scheme.name()));
        }
        let location = location.split('#').next().unwrap_or_default();
        let (path, query) = match location.split_once('?') {
            Some((path, query)) => (path, Some(query.to_owned())),
            None => (location, None),
        };
        let path = match path {
            "" => self.path.clone(),
            path if path.starts_with('/') => without_dots(path),
            path => {
                let folder = self.path.rfind('/').map_or("/", |end| &self.path[..=end]);
                without_dots(&format!("{folder}{path}"))
            }
        };
        Ok(Url {
            user: None,
            path: encode_foreign(&path),
            query: query.as_deref().map(encode_foreign),
            ..self.clone()
        })
    }

    /// Whether the URL is a credential: its query holds more than the name of a version, or the key of a store contains
    /// such a query.
    pub(crate) fn is_secret(&self) -> bool {
        let query = self.query.as_deref().unwrap_or_default();
        let mut names = query.split('&').filter_map(|pair| pair.split('=').next());
        let is_secret =
            |name: &str| !name.is_empty() && !HARMLESS.contains(&name.to_ascii_lowercase().as_str());
        names.any(is_secret) || self.keyed_query().is_some()
    }

    /// Where in the path begins what looks like a query, which is a part of the key of a store.
    fn keyed_query(&self) -> Option<usize> {
        let at = self.path.find("%3F")?;
        self.path[at..].contains("%3D").then_some(at)
    }

    pub(crate) fn origin(&self) -> SecurityOrigin {
        SecurityOrigin {
            scheme: self.scheme,
            host: self.host.clone(),
            port: self.port,
        }
    }

    /// The whole address, but for what signs it, which is another each time.
    pub(crate) fn unsigned(&self) -> String {
        let query = self.query.as_deref().unwrap_or_default();
        let is_signed = |pair: &&str| {
            let name = pair.split('=').next().unwrap_or_default().to_ascii_lowercase();
            SIGNATURES.contains(&&*name) || SIGNATURE_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
        };
        let pairs: Vec<&str> = query.split('&').filter(|pair| !is_signed(pair)).collect();
        format!(
            "{}://{}{}?{}",
            self.scheme.name(),
            self.authority(),
            self.path,
            pairs.join("&")
        )
    }

    /// Host and port as a `Host` header has them.
    pub(crate) fn authority(&self) -> String {
        if self.port == self.scheme.port() {
            bracketed(&self.host).into_owned()
        } else {
            self.host_and_port()
        }
    }

    /// Host and port, whichever it is.
    pub(crate) fn host_and_port(&self) -> String {
        format!("{}:{}", bracketed(&self.host), self.port)
    }

    /// Path and query, as a request has them.
    pub(crate) fn target(&self) -> String {
        match &self.query {
            Some(query) => format!("{}?{query}", self.path),
            None => self.path.clone(),
        }
    }

    /// The host, where it is an address and not a name.
    pub(crate) fn address(&self) -> Option<IpAddr> {
        self.host.parse().ok()
    }

    /// Whether the host is, as far as its name says, one of the public internet. A name is resolved where it is
    /// connected to; what ends with a number is an address to those who resolve it, however it is spelled.
    pub(crate) fn may_be_public(&self) -> bool {
        let host = self.host.trim_end_matches('.');
        let last = host.rsplit('.').next().unwrap_or_default();
        match self.address() {
            Some(address) => is_public(address),
            None => last != "localhost" && !last.starts_with(|c: char| c.is_ascii_digit()),
        }
    }
}

impl fmt::Display for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let keyed = self.keyed_query();
        let path = &self.path[..keyed.unwrap_or(self.path.len())];
        let is_cut = keyed.is_some() || self.query.is_some();
        let query = if is_cut { "?…" } else { "" };
        write!(f, "{}://{}{path}{query}", self.scheme.name(), self.authority())
    }
}

impl fmt::Debug for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Url({self})")
    }
}

/// A host as it stands before a port: an address of IPv6 in brackets.
pub(crate) fn bracketed(host: &str) -> Cow<'_, str> {
    if host.contains(':') {
        format!("[{host}]").into()
    } else {
        host.into()
    }
}

/// Bytes as they may stand in a path: what RFC 3986 calls unreserved, and `/`, stay; that is also how S3 signs them.
pub(crate) fn encode_path(path: &str) -> String {
    encode(path, |byte| unreserved(byte) || byte == b'/')
}

/// Bytes as they may stand in one segment of a path, or in one value of a query.
pub(crate) fn encode_segment(segment: &str) -> String {
    encode(segment, unreserved)
}

/// What percent-encoded text stands for; text that is not properly encoded stands for itself.
pub(crate) fn decode(text: &str) -> String {
    let text_of = |bytes| String::from_utf8(bytes).ok();
    bytes_of(text, true)
        .and_then(text_of)
        .unwrap_or_else(|| text.to_owned())
}

/// The bytes that percent-encoded text stands for, or `None` where it is not properly encoded.
pub(crate) fn decoded(text: &str) -> Option<Vec<u8>> {
    bytes_of(text, false)
}

fn bytes_of(text: &str, is_lenient: bool) -> Option<Vec<u8>> {
    let bytes = text.as_bytes();
    let mut decoded = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let escape = (bytes[at] == b'%')
            .then(|| text.get(at + 1..at + 3))
            .flatten()
            .filter(|digits| digits.bytes().all(|digit| digit.is_ascii_hexdigit()))
            .and_then(|digits| u8::from_str_radix(digits, 16).ok());
        if bytes[at] == b'%' && escape.is_none() && !is_lenient {
            return None;
        }
        decoded.push(escape.unwrap_or(bytes[at]));
        at += if escape.is_some() { 3 } else { 1 };
    }
    Some(decoded)
}

fn unreserved(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"-._~".contains(&byte)
}

/// Browsers and clients write bytes outside of ASCII as they are; requests cannot hold them.
fn encode_foreign(text: &str) -> String {
    encode(text, |byte| byte.is_ascii())
}

fn encode(text: &str, stays: impl Fn(u8) -> bool) -> String {
    let mut encoded = String::with_capacity(text.len());
    for &byte in text.as_bytes() {
        if stays(byte) {
            encoded.push(char::from(byte));
        } else {
            encoded.push_str(&format!("%{byte:02X}"));
        }
    }
    encoded
}

/// Refuses what could end a line of a request, or is read in two ways.
fn check_characters(text: &str) -> Result<(), Fault> {
    let bad = text
        .chars()
        .find(|&c| c.is_control() || c.is_whitespace() || c == '\\');
    match bad {
        Some(bad) => Err(Fault::new(FaultKind::Address(format!(
            "the URL has the character {bad:?}, which has to be percent-encoded"
        )))),
        None => Ok(()),
    }
}

fn host_and_port_of(text: &str, usual: u16) -> Result<(String, u16), Fault> {
    let refuse = |why: &str| Fault::new(FaultKind::Address(why.to_owned()));
    let (host, port) = match text.strip_prefix('[') {
        Some(rest) => {
            let (host, port) = rest.split_once(']').ok_or_else(|| refuse("the host has no ]"))?;
            if !matches!(host.parse(), Ok(IpAddr::V6(_))) {
                return Err(refuse("what stands between [ and ] is no address of IPv6"));
            }
            (host, port)
        }
        None => text.split_at(text.find(':').unwrap_or(text.len())),
    };
    let port = match port.strip_prefix(':') {
        None if port.is_empty() => usual,
        Some("") => usual,
        Some(digits) if digits.bytes().all(|byte| byte.is_ascii_digit()) => {
            digits.parse().map_err(|_| refuse("the port is none"))?
        }
        _ => return Err(refuse("the port is none")),
    };
    if host.is_empty() || port == 0 {
        return Err(refuse("the URL has no host"));
    }
    if !host.is_ascii() {
        return Err(refuse(
            "the host has letters outside of ASCII: give it as its name in the DNS, which begins with xn--",
        ));
    }
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._:".contains(&byte);
    if !host.bytes().all(plain) {
        return Err(refuse("the host has characters that no host has"));
    }
    Ok((host.to_ascii_lowercase(), port))
}

/// RFC 3986 §5.2.4, which only references of redirects go through.
fn without_dots(path: &str) -> String {
    let mut kept: Vec<&str> = Vec::new();
    let mut segments = path.split('/').skip(1).peekable();
    while let Some(segment) = segments.next() {
        let is_last = segments.peek().is_none();
        match segment {
            "." | ".." => {
                if segment == ".." {
                    kept.pop();
                }
                if is_last {
                    kept.push("");
                }
            }
            segment => kept.push(segment),
        }
    }
    format!("/{}", kept.join("/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Url {
        Url::parse(text).unwrap()
    }

    #[test]
    fn a_url_is_taken_apart_and_its_path_left_as_it_is() {
        let url = parsed("HTTPS://me:pass@Example.com:8443/a/../b%2Fc//d?x=1&y=%2F#end");
        assert_eq!(url.user.as_deref(), Some("me:pass"));
        assert_eq!((url.host.as_str(), url.port), ("example.com", 8443));
        assert_eq!(url.target(), "/a/../b%2Fc//d?x=1&y=%2F");
        assert_eq!(url.authority(), "example.com:8443");
    }

    #[test]
    fn secrets_are_not_displayed() {
        let url = parsed("https://me:hunter2@h/file?X-Amz-Signature=deadbeef");
        assert_eq!(url.to_string(), "https://h/file?…");
        assert_eq!(format!("{url:?}"), "Url(https://h/file?…)");
        assert_eq!(parsed("https://h/file%3Fsig%3Dx").to_string(), "https://h/file?…");
        assert_eq!(parsed("https://h/file%3Fx").to_string(), "https://h/file%3Fx");
    }

    #[test]
    fn addresses_and_ports() {
        assert_eq!(parsed("http://[::1]:81/x").authority(), "[::1]:81");
        assert_eq!(parsed("http://[::1]/x").address(), Some("::1".parse().unwrap()));
        assert_eq!(parsed("http://[::1]/x").authority(), "[::1]");
        assert_eq!(parsed("http://[::1]/x").host_and_port(), "[::1]:80");
        assert_eq!(parsed("https://h:443/x").authority(), "h");
        assert_eq!(parsed("http://h").target(), "/");
        assert_eq!(parsed("http://h?q").target(), "/?q");
    }

    #[test]
    fn a_name_that_is_an_address_in_disguise_is_not_public() {
        for host in [
            "127.0.0.1",
            "[::1]",
            "2130706433",
            "0x7f.1",
            "127.1",
            "127.0.0.1.",
            "localhost",
            "a.LOCALHOST.",
        ] {
            assert!(!parsed(&format!("http://{host}/")).may_be_public(), "{host}");
        }
        for host in ["1.1.1.1", "[2606:4700::1111]", "h", "1.example", "cdn.example."] {
            assert!(parsed(&format!("http://{host}/")).may_be_public(), "{host}");
        }
    }

    #[test]
    fn what_could_be_read_in_two_ways_is_refused() {
        for text in [
            "http://h/a\r\nX: y",
            "http://h/a b",
            "http://h\\@evil/",
            "http://h%00/",
            "http://h:99999/",
            "http://h:-1/",
            "http://h:1:2/",
            "http://:80/",
            "http://[::1/",
            "http://[h]/",
            "http://bücher.example/",
            "file:///etc/passwd",
            "gopher://h/",
            "/no/scheme",
            "http://h/\u{85}",
        ] {
            let fault = Url::parse(text).unwrap_err();
            assert_eq!(fault.code(), "bad-url", "{text}");
        }
        // What stands before the last @ is the user, whatever it looks like.
        assert_eq!(parsed("http://good.example@evil.example/").host, "evil.example");
    }

    #[test]
    fn a_query_lets_in_unless_it_names_a_version() {
        for (text, is_secret) in [
            ("http://h/x", false),
            ("http://h/x?", false),
            ("http://h/x?download=true", false),
            ("http://h/x?versionId=1&&generation=2", false),
            ("http://h/x?sv=1&sig=s", true),
            ("http://h/x?X-Amz-Signature=s", true),
            ("http://h/x?Expires=1&Signature=s&Key-Pair-Id=k", true),
            ("http://h/x?download=true&access_token=s", true),
            ("http://h/x?s", true),
            ("http://h/c/b%3Fsv%3D1%26sig%3Ds", true),
            ("http://h/c/b%3F", false),
        ] {
            assert_eq!(parsed(text).is_secret(), is_secret, "{text}");
        }
    }

    #[test]
    fn redirects_are_resolved_as_the_rfc_says() {
        let base = parsed("https://u:p@h:8/a/b/c?q");
        for (location, expected) in [
            ("https://other/x", "https://other/x"),
            ("//other/x", "https://other/x"),
            ("https://evil:x@h:8/x", "https://h:8/x"),
            ("//evil@h:8/x", "https://h:8/x"),
            ("/x/./y/../z", "https://h:8/x/z"),
            ("d", "https://h:8/a/b/d"),
            ("../d", "https://h:8/a/d"),
            ("../../../d", "https://h:8/d"),
            ("..", "https://h:8/a/"),
            ("", "https://h:8/a/b/c"),
            ("d#f", "https://h:8/a/b/d"),
        ] {
            let url = base.join(location).unwrap();
            assert_eq!(url.to_string(), expected, "{location}");
            assert_eq!(url.user, None);
        }
        assert_eq!(base.join("?r=1").unwrap().target(), "/a/b/c?r=1");
        for location in [
            "file:///etc/passwd",
            "ftp://h/",
            "data:text/plain,x",
            "javascript:x",
        ] {
            assert!(base.join(location).is_err(), "{location}");
        }
    }

    #[test]
    fn encoding_and_decoding() {
        assert_eq!(encode_path("a b/ü+?#~"), "a%20b/%C3%BC%2B%3F%23~");
        assert_eq!(encode_segment("refs/pr/1"), "refs%2Fpr%2F1");
        assert_eq!(decode("a%20b%2Fc%zz%"), "a b/c%zz%");
        assert_eq!(parsed("http://h/ü?ö").target(), "/%C3%BC?%C3%B6");
    }
}
