//! URLs of HTTP, parsed once and never normalised.

use std::borrow::Cow;
use std::fmt;
use std::net::IpAddr;

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};

use crate::fault::{Fault, Result};
use crate::network::is_public;

/// All ASCII characters except the unreserved ones of RFC 3986.
const RESERVED: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'.')
    .remove(b'_')
    .remove(b'~');
const RESERVED_IN_PATHS: &AsciiSet = &RESERVED.remove(b'/');

/// The schemes of remote files; `file` is a path.
pub(crate) const SCHEMES: &[&str] = &["http", "https", "hf", "s3", "gs", "az"];

/// Split a URL at `://` into its scheme and the rest. A single letter is a drive and not a scheme. fsspec chains schemes
/// with `::`.
pub(crate) fn split_scheme(text: &str) -> Option<(&str, &str)> {
    let (scheme, rest) = text.split_once("://")?;
    let may = |byte: u8| byte.is_ascii_alphanumeric() || b"+-.:".contains(&byte);
    let is_scheme = scheme.starts_with(|first: char| first.is_ascii_alphabetic()) && scheme.bytes().all(may);
    (is_scheme && scheme.len() > 1).then_some((scheme, rest))
}

/// Split a URL that was used as a path, which reduces `://` to `:/`.
pub(crate) fn split_collapsed(text: &str) -> Option<(&str, &str)> {
    let (scheme, rest) = text.split_once(":/")?;
    let last = scheme.rsplit("::").next().unwrap_or_default();
    let is_known = SCHEMES.iter().any(|known| known.eq_ignore_ascii_case(last));
    is_known.then_some((scheme, rest))
}

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

/// A URL of HTTP. `Display` omits the parts that may be secret: the user with the password, and the query, which may be
/// signed.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Url {
    pub(crate) scheme: Scheme,
    /// User and password, percent-encoded as given.
    pub(crate) user: Option<String>,
    /// A name in lower case, or an address; IPv6 addresses without brackets.
    pub(crate) host: String,
    pub(crate) port: u16,
    /// Begins with `/`. As given, except that bytes outside ASCII are percent-encoded.
    pub(crate) path: String,
    /// Without the `?`.
    pub(crate) query: Option<String>,
}

/// Parameters of the signed URLs of Azure and CloudFront.
const SIGNATURES: &[&str] = &[
    "expires", "policy", "sig", "se", "st", "sp", "sv", "sr", "spr", "skoid", "sktid", "skt", "ske", "sks",
    "skv",
];

/// Prefixes of the parameters of the signed URLs of CloudFront, S3 and Google.
const SIGNATURE_PREFIXES: &[&str] = &[
    "signature",
    "key-pair-id",
    "awsaccesskeyid",
    "googleaccessid",
    "x-amz-",
    "x-goog-",
];

/// Parameters that select a file or the way it is sent, and are no credentials.
const HARMLESS: &[&str] = &[
    "blockid",
    "comp",
    "download",
    "generation",
    "partnumber",
    "uploadid",
    "uploads",
    "versionid",
];

/// The place that secrets are sent to: scheme, host and port.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct SecurityOrigin {
    pub(crate) scheme: Scheme,
    pub(crate) host: String,
    pub(crate) port: u16,
}

impl Url {
    /// Parse an absolute URL. The path is kept as given: the server decides the meaning of a `..` or a `%2F` in it.
    pub(crate) fn parse(text: &str) -> Result<Url> {
        check_characters(text)?;
        let Some((scheme, rest)) = text.split_once("://") else {
            return Err(Fault::address("expected http://… or https://…"));
        };
        let scheme = match scheme.to_ascii_lowercase().as_str() {
            "http" => Scheme::Http,
            "https" => Scheme::Https,
            other => {
                let why = format!("the scheme {other}: is unknown: expected http: or https:");
                return Err(Fault::address(why));
            }
        };
        let rest = without_fragment(rest);
        let (authority, rest) = rest.split_at(rest.find(['/', '?']).unwrap_or(rest.len()));
        let (user, host_and_port) = match authority.rsplit_once('@') {
            Some((user, host)) => (Some(user.to_owned()), host),
            None => (None, authority),
        };
        let (host, port) = host_and_port_of(host_and_port, scheme.port())?;
        let (path, query) = split_query(rest);
        Ok(Url {
            scheme,
            user,
            host,
            port,
            path: encode_foreign(if path.is_empty() { "/" } else { path }),
            query: query.map(encode_foreign),
        })
    }

    /// Resolve the location of a redirect from here.
    pub(crate) fn join(&self, location: &str) -> Result<Url> {
        check_characters(location)?;
        let head = location.split(['/', '?', '#']).next().unwrap_or_default();
        // A user in the location is chosen by the server, not by the caller.
        let absolute = |text: &str| Url::parse(text).map(|url| Url { user: None, ..url });
        if head.contains(':') {
            return absolute(location);
        }
        if let Some(rest) = location.strip_prefix("//") {
            return absolute(&format!("{}://{rest}", self.scheme.name()));
        }
        let (path, query) = split_query(without_fragment(location));
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
            query: query.map(encode_foreign),
            ..self.clone()
        })
    }

    /// Return the URL of `path`, which begins with a slash, below this one.
    pub(crate) fn below(&self, path: &str) -> Url {
        Url {
            path: format!("{}{path}", self.path.trim_end_matches('/')),
            ..self.clone()
        }
    }

    /// Whether the URL is a credential: its query has more than harmless parameters, or the key of an object contains
    /// such a query.
    pub(crate) fn is_secret(&self) -> bool {
        let query = self.query.as_deref().unwrap_or_default();
        let mut names = query.split('&').map(name_of);
        names.any(|name| !name.is_empty() && !HARMLESS.contains(&&*name)) || self.keyed_query().is_some()
    }

    /// Return the position of a query that is part of the key of an object.
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

    /// Return the URL without its signature, which differs each time.
    pub(crate) fn unsigned(&self) -> String {
        let query = self.query.as_deref().unwrap_or_default();
        let is_signed = |pair: &&str| {
            let name = name_of(pair);
            SIGNATURES.contains(&&*name) || SIGNATURE_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
        };
        let pairs: Vec<&str> = query.split('&').filter(|pair| !is_signed(pair)).collect();
        let (scheme, authority) = (self.scheme.name(), self.authority());
        format!("{scheme}://{authority}{}?{}", self.path, pairs.join("&"))
    }

    /// Return host and port for a `Host` header, without the usual port.
    pub(crate) fn authority(&self) -> String {
        if self.port == self.scheme.port() {
            bracketed(&self.host).into_owned()
        } else {
            self.host_and_port()
        }
    }

    /// Return host and port.
    pub(crate) fn host_and_port(&self) -> String {
        format!("{}:{}", bracketed(&self.host), self.port)
    }

    /// Return path and query for the first line of a request.
    pub(crate) fn target(&self) -> String {
        match &self.query {
            Some(query) => format!("{}?{query}", self.path),
            None => self.path.clone(),
        }
    }

    /// Return the host if it is an address.
    pub(crate) fn address(&self) -> Option<IpAddr> {
        self.host.parse().ok()
    }

    /// Whether the host may be one of the public internet. Names are resolved later. A name whose last label begins with
    /// a digit is refused, since resolvers take it for an address.
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

fn without_fragment(text: &str) -> &str {
    text.split('#').next().unwrap_or_default()
}

fn split_query(text: &str) -> (&str, Option<&str>) {
    let split = text.split_once('?');
    split.map_or((text, None), |(path, query)| (path, Some(query)))
}

/// Return the name of a parameter, in lower case.
fn name_of(pair: &str) -> String {
    let name = pair.split('=').next().unwrap_or_default();
    name.to_ascii_lowercase()
}

/// Return a host for use before a port: IPv6 addresses in brackets.
pub(crate) fn bracketed(host: &str) -> Cow<'_, str> {
    if host.contains(':') {
        format!("[{host}]").into()
    } else {
        host.into()
    }
}

/// Percent-encode a path. The unreserved characters and `/` are kept, as S3 signs paths.
pub(crate) fn encode_path(path: &str) -> String {
    utf8_percent_encode(path, RESERVED_IN_PATHS).to_string()
}

/// Percent-encode a segment of a path, or a value of a query.
pub(crate) fn encode_segment(segment: &str) -> String {
    utf8_percent_encode(segment, RESERVED).to_string()
}

/// Percent-encode bytes outside ASCII, which requests cannot contain. Browsers show them decoded.
fn encode_foreign(text: &str) -> String {
    utf8_percent_encode(text, &AsciiSet::EMPTY).to_string()
}

/// Decode percent-encoded text. Invalid escapes are kept, and so is text that is not UTF-8 afterwards.
pub(crate) fn decode(text: &str) -> String {
    let decoded = percent_decode_str(text).decode_utf8();
    decoded.map_or_else(|_| text.to_owned(), Cow::into_owned)
}

/// Decode percent-encoded text to bytes, or return `None` if an escape is invalid.
pub(crate) fn decoded(text: &str) -> Option<Vec<u8>> {
    let is_escape = |rest: &str| {
        let digits = rest.as_bytes().get(..2);
        digits.is_some_and(|digits| digits.iter().all(u8::is_ascii_hexdigit))
    };
    let is_valid = text.split('%').skip(1).all(is_escape);
    is_valid.then(|| percent_decode_str(text).collect())
}

/// Reject characters that could end a line of a request, or that readers understand differently.
fn check_characters(text: &str) -> Result<()> {
    let is_bad = |c: &char| c.is_control() || c.is_whitespace() || *c == '\\';
    match text.chars().find(is_bad) {
        Some(bad) => Err(Fault::address(format!(
            "the URL has the character {bad:?}, which must be percent-encoded"
        ))),
        None => Ok(()),
    }
}

fn host_and_port_of(text: &str, usual: u16) -> Result<(String, u16)> {
    let refuse = |why: &str| Err(Fault::address(why));
    let (host, port) = match text.strip_prefix('[') {
        Some(rest) => match rest.split_once(']') {
            Some((host, port)) if matches!(host.parse(), Ok(IpAddr::V6(_))) => (host, port),
            _ => return refuse("the brackets of the host contain no IPv6 address"),
        },
        None => text.split_at(text.find(':').unwrap_or(text.len())),
    };
    let port = match port.strip_prefix(':') {
        None if port.is_empty() => Some(usual),
        Some("") => Some(usual),
        Some(digits) if digits.bytes().all(|byte| byte.is_ascii_digit()) => digits.parse().ok(),
        _ => None,
    };
    let Some(port) = port.filter(|&port| port > 0) else {
        return refuse("invalid port: expected a number from 1 to 65535");
    };
    if host.is_empty() {
        return refuse("the URL has no host");
    }
    if !host.is_ascii() {
        return refuse(
            "the host has characters outside ASCII: use its name in the DNS, which begins with xn--",
        );
    }
    let may = |byte: u8| byte.is_ascii_alphanumeric() || b"-._:".contains(&byte);
    if !host.bytes().all(may) {
        return refuse("the host has characters that no host name has");
    }
    Ok((host.to_ascii_lowercase(), port))
}

/// Remove the dot segments of a redirect (RFC 3986, 5.2.4).
fn without_dots(path: &str) -> String {
    let mut kept: Vec<&str> = Vec::new();
    let mut segments = path.split('/').skip(1).peekable();
    while let Some(segment) = segments.next() {
        match segment {
            ".." => drop(kept.pop()),
            "." => {}
            segment => kept.push(segment),
        }
        if segments.peek().is_none() && matches!(segment, "." | "..") {
            kept.push("");
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
    fn urls_are_parsed_without_normalising_the_path() {
        let url = parsed("HTTPS://me:pass@Example.com:8443/a/../b%2Fc//d?x=1&y=%2F#end");
        assert_eq!(url.user.as_deref(), Some("me:pass"));
        assert_eq!((url.host.as_str(), url.port), ("example.com", 8443));
        assert_eq!(url.target(), "/a/../b%2Fc//d?x=1&y=%2F");
        assert_eq!(url.authority(), "example.com:8443");
    }

    #[test]
    fn display_hides_secrets() {
        let url = parsed("https://me:hunter2@h/file?X-Amz-Signature=deadbeef");
        assert_eq!(url.to_string(), "https://h/file?…");
        assert_eq!(format!("{url:?}"), "Url(https://h/file?…)");
        assert_eq!(parsed("https://h/file%3Fsig%3Dx").to_string(), "https://h/file?…");
        assert_eq!(parsed("https://h/file%3Fx").to_string(), "https://h/file%3Fx");
    }

    #[test]
    fn authorities_have_brackets_and_unusual_ports() {
        assert_eq!(parsed("http://[::1]:81/x").authority(), "[::1]:81");
        assert_eq!(parsed("http://[::1]/x").address(), Some("::1".parse().unwrap()));
        assert_eq!(parsed("http://[::1]/x").authority(), "[::1]");
        assert_eq!(parsed("http://[::1]/x").host_and_port(), "[::1]:80");
        assert_eq!(parsed("https://h:443/x").authority(), "h");
        assert_eq!(parsed("http://h").target(), "/");
        assert_eq!(parsed("http://h?q").target(), "/?q");
    }

    #[test]
    fn disguised_addresses_are_not_public() {
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
    fn ambiguous_urls_are_rejected() {
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
        // Everything before the last @ is the user.
        assert_eq!(parsed("http://good.example@evil.example/").host, "evil.example");
    }

    #[test]
    fn queries_are_secret_unless_their_names_are_harmless() {
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
    fn redirects_are_resolved_as_in_the_rfc() {
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
    fn percent_encoding_round_trips() {
        assert_eq!(encode_path("a b/ü+?#~"), "a%20b/%C3%BC%2B%3F%23~");
        assert_eq!(encode_segment("refs/pr/1"), "refs%2Fpr%2F1");
        assert_eq!(decode("a%20b%2Fc%zz%"), "a b/c%zz%");
        assert_eq!(parsed("http://h/ü?ö").target(), "/%C3%BC?%C3%B6");
    }
}
