//! Every HTTP URL that is accepted here leads to the host and the port that browsers find in it, also after a redirect.
//! No secret appears in a text that is made from a URL or from a server's message about it.
#![no_main]

use ingot_remote::fuzzing::{Address, addresses, cleaned};
use ingot_remote::{Location, RemoteOptions, StopFlag, is_url, redacted, url_file_name, was_url};
use libfuzzer_sys::arbitrary::{Result, Unstructured};
use libfuzzer_sys::fuzz_target;
use url::{Host, Url};

fuzz_target!(|input: &[u8]| {
    // Inputs that end too early are ignored.
    let _ = check(&mut Unstructured::new(input));
});

/// The secret. It is no part of a word that may appear in a text anyway, and percent-decoding does not change it.
const SECRET: &str = "Zq7Xw9";

fn check(input: &mut Unstructured<'_>) -> Result<()> {
    match input.int_in_range(0..=3)? {
        0 => leads_where_browsers_go(&text(input)?, &text(input)?),
        1 => is_shown_without_secrets(&with_secret(input)?),
        2 => is_shown_without_secrets(&text(input)?.replacen('S', SECRET, 1)),
        _ => is_told_without_secrets(input)?,
    }
    Ok(())
}

/// Parts of URLs, separators, and letters.
fn text(input: &mut Unstructured<'_>) -> Result<String> {
    const PIECES: &[&str] = &[
        "http://",
        "https://",
        "hf://",
        "s3://",
        "gs://",
        "az://",
        "file://",
        "http:/",
        "//",
        "/",
        ":",
        "@",
        "?",
        "#",
        "&",
        "=",
        "%",
        "%2F",
        "%40",
        "%3F",
        "%3D",
        "..",
        ".",
        "[",
        "]",
        "[::1]",
        "::",
        "\\",
        " ",
        "\n",
        "h",
        "Host.example",
        "127.0.0.1",
        "0x7f.1",
        "2130706433",
        "localhost",
        "user",
        "sig=",
        "X-Amz-Signature=",
        "versionId=",
        "resolve/main/",
        "8080",
        "ü",
        "\u{ad}",
        "S",
    ];
    let mut text = String::new();
    for _ in 0..input.int_in_range(0..=12)? {
        match input.ratio(3, 4)? {
            true => text.push_str(input.choose(PIECES)?),
            false => text.push_str(input.arbitrary()?),
        }
    }
    Ok(text)
}

/// A URL with a secret in a place for secrets, surrounded by letters that do not end that place.
fn with_secret(input: &mut Unstructured<'_>) -> Result<String> {
    let scheme = *input.choose(&[
        "http",
        "https",
        "HTTPS",
        "hf",
        "s3",
        "gs",
        "az",
        "ftp",
        "simplecache::s3",
    ])?;
    let slashes = *input.choose(&["://", ":/"])?;
    let mut within = |most: usize| -> Result<String> {
        const LETTERS: &[&str] = &[
            "a", "B", "-", ".", "~", "%41", "%2F", "%40", "+", "!", "$", "(", ";", ",", "*", "9",
        ];
        let mut text = String::new();
        for _ in 0..input.int_in_range(0..=most)? {
            text.push_str(input.choose(LETTERS)?);
        }
        Ok(text)
    };
    let (before, after, path) = (within(4)?, within(4)?, within(8)?);
    let secret = format!("{before}{SECRET}{after}");
    Ok(match input.int_in_range(0..=3)? {
        0 => format!("{scheme}{slashes}user:{secret}@host/{path}"),
        1 => format!("{scheme}{slashes}user:{secret}@host:8080/{path}?a=b"),
        2 => format!("{scheme}{slashes}host/{path}?X-Amz-Signature={secret}"),
        _ => format!("{scheme}{slashes}user:pass@host/{path}/x.safetensors?a=b&sig={secret}"),
    })
}

fn leads_where_browsers_go(text: &str, location: &str) {
    let Ok((ours, there)) = addresses(text, location) else {
        return;
    };
    let base = is_where(&ours, Url::parse(text), text);
    let (Ok(there), Some(base)) = (there, base) else {
        return;
    };
    is_where(&there, base.join(location), location);
}

/// Compares an address with `text` as browsers read it, whose libraries parse hosts like the system: numbers in all
/// notations are addresses.
fn is_where(ours: &Address, theirs: std::result::Result<Url, url::ParseError>, text: &str) -> Option<Url> {
    is_one_request(&ours.head);
    // A host that browsers reject cannot be resolved by the system.
    let theirs = theirs.ok()?;
    assert_eq!(theirs.port_or_known_default(), Some(ours.port), "{text:?}");
    match theirs.host() {
        Some(Host::Domain(name)) => assert_eq!(name, ours.host, "{text:?}"),
        Some(Host::Ipv6(address)) => assert_eq!(Ok(address), ours.host.parse(), "{text:?}"),
        Some(Host::Ipv4(address)) => {
            let is_spelled_out = ours.host.parse() == Ok(address);
            assert!(is_spelled_out || !ours.may_be_public, "{text:?}");
        }
        None => panic!("{text:?} has no host to them"),
    }
    Some(theirs)
}

/// A server finds exactly one request in the bytes.
fn is_one_request(head: &[u8]) {
    let mut headers = [httparse::EMPTY_HEADER; 16];
    let mut request = httparse::Request::new(&mut headers);
    assert_eq!(request.parse(head), Ok(httparse::Status::Complete(head.len())));
    assert_eq!(
        request
            .headers
            .iter()
            .filter(|header| header.name == "Host")
            .count(),
        1
    );
}

fn is_shown_without_secrets(text: &str) {
    let _ = (is_url(text), was_url(text));
    if text.matches(SECRET).count() != 1 || !is_secret(text) {
        return;
    }
    let mut shown = vec![redacted(text), url_file_name(text)];
    match Location::find(text, &RemoteOptions::default(), StopFlag::never()) {
        Ok(Location::Remote(remote)) => shown.push(remote.shown.clone()),
        Ok(Location::Cached(..)) => {}
        Err(fault) => shown.extend([fault.to_string(), format!("{fault:?}")]),
    }
    if let Ok((address, _)) = addresses(text, "") {
        shown.extend(address.shown);
    }
    for shown in shown {
        assert!(!shown.contains(SECRET), "{text:?} is shown as {shown:?}");
    }
}

/// Returns whether the secret is in a place for secrets, as browsers split the URL. `:/` counts as `://`, since paths
/// are normalised that way.
fn is_secret(text: &str) -> bool {
    let text = text.strip_prefix("simplecache::").unwrap_or(text);
    let Some((scheme, rest)) = text.split_once(":/") else {
        return false;
    };
    let rest = match rest.strip_prefix('/') {
        Some(rest) => rest,
        // The text is a path if it has no scheme for HTTP.
        None if scheme == "ftp" => return false,
        None => rest,
    };
    let known = ["http", "https", "hf", "s3", "gs", "az", "ftp"];
    if !known.iter().any(|known| known.eq_ignore_ascii_case(scheme)) || rest.starts_with('/') {
        return false;
    }
    let Ok(url) = Url::parse(&format!("{scheme}://{rest}")) else {
        return false;
    };
    let is_there = |text: Option<&str>| text.is_some_and(|text| text.contains(SECRET));
    is_there(url.password()) || is_there(url.query()) && !names_no_secret(&url)
}

/// In the keys of stores, a question mark is a plain character unless `name=value` follows; and a version is not
/// secret.
fn names_no_secret(url: &Url) -> bool {
    let query = url.query().unwrap_or_default();
    let is_store = ["s3", "gs", "az"].contains(&url.scheme());
    is_store && (!query.contains('=') || url.scheme() == "s3" && query.starts_with("versionId="))
}

/// A server's message contains a secret as it was sent, decoded, escaped, or in another case.
fn is_told_without_secrets(input: &mut Unstructured<'_>) -> Result<()> {
    const LETTERS: &[&str] = &["a", "B", "%41", "%2B", "+", "9", "-", ".", "%C3%BC"];
    let mut secret = String::new();
    for _ in 0..input.int_in_range(4..=12)? {
        secret.push_str(input.choose(LETTERS)?);
    }
    let decoded = percent_encoding::percent_decode_str(&secret)
        .decode_utf8_lossy()
        .into_owned();
    let (mut url, mut headers, mut body) = ("http://host/x".to_owned(), Vec::new(), String::new());
    let mut header = |value: String| headers.push(("X-Key".to_owned(), value));
    match input.int_in_range(0..=5)? {
        0 => url = format!("http://user:{secret}@host/x"),
        1 => url = format!("http://host/x?a=b&sig={secret}"),
        2 => header(secret.clone()),
        3 => header(format!("Bearer {secret}")),
        4 => body = format!("grant=x&token={secret}"),
        _ => body = format!("{{\"token\":\"{secret}\"}}"),
    }
    let mut said = String::new();
    for _ in 0..input.int_in_range(1..=6)? {
        match input.int_in_range(0..=5)? {
            0 => said.push_str(&secret),
            1 => said.push_str(&decoded),
            2 => said.push_str(&secret.to_ascii_uppercase()),
            3 => said.push_str(&decoded.to_ascii_lowercase()),
            4 => said.push_str(input.choose(LETTERS)?),
            _ => said.push_str(input.arbitrary()?),
        }
    }
    let Ok(told) = cleaned(&url, headers, body.as_bytes(), &said) else {
        panic!("{url:?} is none");
    };
    let lower = told.to_ascii_lowercase();
    for text in [&secret, &decoded] {
        // Shorter texts are words.
        let is_told = text.len() >= 4 && lower.contains(&text.to_ascii_lowercase());
        assert!(!is_told, "{said:?} is told as {told:?}, with {text:?}");
    }
    Ok(())
}
