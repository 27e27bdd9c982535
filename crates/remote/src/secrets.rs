//! The one place where secrets are removed from URLs and from the words of servers.

use crate::fault::Fault;
use crate::http::message::HttpRequest;
use crate::http::proxy::basic;
use crate::options::RemoteOptions;
use crate::url::{Url, decode, split_collapsed, split_scheme};

/// The replacement for a secret.
const REMOVED: &str = "…";

/// Shorter values are words such as `2` or `yes`, which occur in every message.
const LEAST_NBYTES: usize = 4;

/// Characters with a name in HTML and XML.
const ENTITIES: &[(char, &str)] = &[
    ('&', "amp"),
    ('<', "lt"),
    ('>', "gt"),
    ('"', "quot"),
    ('\'', "apos"),
    ('+', "plus"),
    ('/', "sol"),
    ('=', "equals"),
];

/// The query of `s3://` that selects a version and is no credential.
const VERSION: &str = "?versionId=";

/// Return `text` without the parts that may be secret, whether it is a valid URL or not: users with their passwords, and
/// queries.
///
/// ```
/// use ingot_remote::redacted;
///
/// assert_eq!(redacted("https://me:secret@host/model?X-Amz-Signature=9f"), "https://host/model?…");
/// assert_eq!(redacted("hf://owner/repo@main/model"), "hf://owner/repo@main/model");
/// ```
#[must_use]
pub fn redacted(text: &str) -> String {
    let Some((scheme, rest)) = split_scheme(text).or_else(|| split_collapsed(text)) else {
        return text.to_owned();
    };
    let head = &text[..text.len() - rest.len()];
    let rest = &rest[user_nbytes(scheme, rest)..];
    match path_nbytes(scheme, rest) {
        end if end == rest.len() || names_version(scheme, &rest[end..]) => format!("{head}{rest}"),
        end => format!("{head}{}?{REMOVED}", &rest[..end]),
    }
}

/// Return the length of `rest` before a query or a fragment. In the keys of stores `#` and `?` are ordinary characters,
/// unless `name=value` follows, as in signed URLs.
pub(crate) fn path_nbytes(scheme: &str, rest: &str) -> usize {
    let is_store = ["s3", "gs", "az"]
        .iter()
        .any(|store| scheme.eq_ignore_ascii_case(store));
    let end = if is_store {
        rest.find('?').filter(|&end| rest[end..].contains('='))
    } else {
        rest.find(['?', '#'])
    };
    end.unwrap_or(rest.len())
}

/// Return the length of the user at the start of `rest`, with its `@`.
fn user_nbytes(scheme: &str, rest: &str) -> usize {
    let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
    let is_hub = scheme.eq_ignore_ascii_case("hf");
    let after = |text: &str| text.rfind('@').map_or(0, |at| at + 1);
    if authority.contains('@') {
        // `hf://gpt2@main` names a revision.
        let is_revision = is_hub && !authority.contains(':') && !authority.starts_with("hf_");
        return if is_revision { 0 } else { after(authority) };
    }
    // The secret keys of Amazon contain slashes. In a password they end the authority early, so that a colon is not
    // followed by a port.
    let port = authority.rsplit_once(']').map_or(authority, |(_, port)| port);
    let is_cut = port
        .split_once(':')
        .is_some_and(|(_, port)| !port.bytes().all(|byte| byte.is_ascii_digit()));
    if is_cut { after(rest) } else { 0 }
}

fn names_version(scheme: &str, query: &str) -> bool {
    let may = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
    let version = query.strip_prefix(VERSION);
    scheme.eq_ignore_ascii_case("s3") && version.is_some_and(|version| version.bytes().all(may))
}

/// The secrets that were sent to a server, which may repeat them in a reason, a header or a body.
#[derive(Debug, Default)]
pub(crate) struct Secrets(Vec<String>);

impl Secrets {
    /// Return the secrets in all parts of a request.
    pub(crate) fn of_request(request: &HttpRequest<'_>) -> Secrets {
        let mut secrets = Secrets::default();
        secrets.add_url(request.url);
        secrets.add_headers(&request.headers);
        secrets.add_pairs(&String::from_utf8_lossy(request.body));
        let body: serde_json::Value = serde_json::from_slice(request.body).unwrap_or_default();
        let values = body.as_object().into_iter().flatten();
        for text in values.filter_map(|(_, value)| value.as_str()) {
            secrets.add(text);
        }
        secrets
    }

    pub(crate) fn add_options(&mut self, options: &RemoteOptions) {
        if let Some(token) = options.given_token() {
            self.add(token.reveal());
        }
        for (_, value) in &options.headers {
            self.add_header(value.reveal());
        }
    }

    pub(crate) fn add_url(&mut self, url: &Url) {
        if let Some(user) = &url.user {
            self.add_header(&basic(user));
            self.add(user);
            // A name without a password may be a token. Beside a password it may be any word.
            let (name, password) = user.split_once(':').unwrap_or((user, ""));
            self.add(if password.is_empty() { name } else { password });
        }
        if let Some(query) = &url.query {
            self.add(query);
            self.add_pairs(query);
        }
        // A query in the key of an object.
        if let Some(at) = url.path.find("%3F") {
            self.add(&url.path[at..]);
            self.add_pairs(&decode(&url.path[at..]));
        }
    }

    pub(crate) fn add_headers(&mut self, headers: &[(String, String)]) {
        for (name, value) in headers {
            // These select the bytes and the version.
            let lower = name.to_ascii_lowercase();
            if lower != "range" && !lower.starts_with("if-") {
                self.add_header(value);
            }
        }
    }

    /// Add `Bearer …`, `Basic …`, `AWS4-HMAC-SHA256 Credential=…/…, Signature=…`, or any other value.
    fn add_header(&mut self, value: &str) {
        self.add(value);
        let Some((_, rest)) = value.split_once(' ') else {
            return;
        };
        self.add(rest);
        for part in rest.split([',', ' ']).filter_map(|part| part.split_once('=')) {
            self.add(part.1);
            self.add(part.1.split('/').next().unwrap_or_default());
        }
    }

    /// Add the values of a query or a form.
    fn add_pairs(&mut self, text: &str) {
        for (_, value) in text.split('&').filter_map(|pair| pair.split_once('=')) {
            self.add(value);
        }
    }

    /// Add a secret as given and decoded. [`after_char`] finds both in any encoding.
    fn add(&mut self, secret: &str) {
        for text in [secret.to_owned(), decode(secret)] {
            if text.len() >= LEAST_NBYTES && !self.0.contains(&text) {
                self.0.push(text);
            }
        }
    }

    /// Remove all secrets from `text`, in any case. The longest is removed first, since it may contain others.
    pub(crate) fn removed(&self, text: &str) -> String {
        let mut secrets: Vec<&str> = self.0.iter().map(String::as_str).collect();
        secrets.sort_by_key(|secret| std::cmp::Reverse(secret.len()));
        let remove = |text: String, secret: &&str| without(&text, secret);
        secrets.iter().fold(text.to_owned(), remove)
    }
}

impl Fault {
    /// Remove `secrets` from the words of a server. Every fault of a server passes through here.
    pub(crate) fn without(mut self, secrets: &Secrets) -> Fault {
        for text in self.said() {
            *text = secrets.removed(text);
        }
        self
    }
}

/// Remove `secret` from `text`, in any ASCII case and with any of its characters escaped.
fn without(text: &str, secret: &str) -> String {
    let (mut kept, mut rest) = (String::new(), text);
    while let Some(first) = rest.chars().next() {
        if let Some(after) = secret.chars().try_fold(rest, after_char) {
            kept.push_str(REMOVED);
            rest = after;
        } else {
            kept.push(first);
            rest = &rest[first.len_utf8()..];
        }
    }
    kept
}

/// Return the rest of `text` after `c` if `text` begins with `c`, plain or escaped: percent-encoded once or several times,
/// a space as `+` and `+` as a space, after a backslash, or as an HTML entity.
fn after_char(text: &str, c: char) -> Option<&str> {
    let first = text.chars().next()?;
    let is_space = |c: char| c == ' ' || c == '+';
    let code = u32::from(c);
    let escaped = match first {
        '%' => {
            let mut encoded = [0; 4];
            let mut bytes = c.encode_utf8(&mut encoded).bytes();
            bytes.try_fold(text, |text, byte| after_percent(text.strip_prefix('%')?, byte))
        }
        '\\' => {
            let forms = [c.to_string(), format!("u{code:04x}"), format!("x{code:02x}")];
            after_any(text.trim_start_matches('\\'), &forms)
        }
        '&' => {
            let named = ENTITIES.iter().find(|entity| entity.0 == c);
            let named = named.map_or("", |entity| entity.1);
            after_any(
                text,
                &[
                    format!("&#{code};"),
                    format!("&#x{code:x};"),
                    format!("&{named};"),
                ],
            )
        }
        _ => None,
    };
    let is_plain = first.eq_ignore_ascii_case(&c) || is_space(first) && is_space(c);
    escaped.or_else(|| is_plain.then(|| &text[first.len_utf8()..]))
}

/// Return the rest of `text` after the digits of `byte`. The percent sign before them may be encoded itself.
fn after_percent(text: &str, byte: u8) -> Option<&str> {
    let deeper = text.strip_prefix("25").and_then(|text| after_percent(text, byte));
    deeper.or_else(|| after_text(text, &format!("{byte:02x}")))
}

fn after_any<'t>(text: &'t str, forms: &[String]) -> Option<&'t str> {
    forms.iter().find_map(|form| after_text(text, form))
}

fn after_text<'t>(text: &'t str, form: &str) -> Option<&'t str> {
    let start = text.get(..form.len())?;
    start.eq_ignore_ascii_case(form).then(|| &text[form.len()..])
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn redacted_urls_contain_no_secret() {
        for (text, shown) in [
            ("https://u:p@h/x?sig=1#y", "https://h/x?…"),
            ("https://u:p@h", "https://h"),
            ("https://h:1/a@b", "https://h:1/a@b"),
            ("http://[::1]:81/a@b", "http://[::1]:81/a@b"),
            ("http://u:p@ss@h/x", "http://h/x"),
            ("http://u:p/w?d@h/x", "http://h/x"),
            ("http:/u:p@h/x?y", "http:/h/x?…"),
            ("ftp://u:p@h/x?y", "ftp://h/x?…"),
            ("simplecache::s3://k:s@b/k", "simplecache::s3://b/k"),
            ("simplecache::s3:/k:s@b/k", "simplecache::s3:/b/k"),
            ("s3://b/k?x", "s3://b/k?x"),
            ("s3://b/k?x=y", "s3://b/k?…"),
            ("s3://b/k#x", "s3://b/k#x"),
            ("s3://b/k?versionId=1.a", "s3://b/k?versionId=1.a"),
            ("s3://b/k?versionId=1&sig=x", "s3://b/k?…"),
            ("s3://KEY:SEC/RET+@b/k", "s3://b/k"),
            ("s3://KEY@b/k@2", "s3://b/k@2"),
            ("az://c/b?sv=1&sig=x", "az://c/b?…"),
            ("hf://a/b@rev/x", "hf://a/b@rev/x"),
            ("hf://gpt2@main/x", "hf://gpt2@main/x"),
            ("hf://hf_x@gpt2/x?y", "hf://gpt2/x?…"),
            ("hf://me:hf_x@a/b", "hf://a/b"),
            ("model@1?.safetensors", "model@1?.safetensors"),
        ] {
            assert_eq!(redacted(text), shown);
        }
    }

    proptest! {
        /// Each character in any encoding that servers use.
        #[test]
        fn secrets_are_removed_in_any_encoding(
            written in prop::collection::vec((prop::sample::select("aZ9+/= &%~-_.:@ü".chars().collect::<Vec<_>>()), 0..9_usize), 4..30),
        ) {
            let secret: String = written.iter().map(|(c, _)| *c).collect();
            let echo: String = written.iter().map(|&(c, way)| write_as(c, way)).collect();
            let mut secrets = Secrets::default();
            secrets.add(&secret);
            prop_assert_eq!(secrets.removed(&format!("<{echo}>")), "<…>");
        }
    }

    fn write_as(c: char, way: usize) -> String {
        let percent = |c: char| {
            c.encode_utf8(&mut [0; 4])
                .bytes()
                .map(|byte| format!("%{byte:02X}"))
                .collect()
        };
        let code = u32::from(c);
        match way {
            0 if c == ' ' => "+".to_owned(),
            1 if c == '+' => " ".to_owned(),
            2 => percent(c),
            3 => percent(c).replace('%', "%25"),
            4 => percent(c).to_ascii_lowercase(),
            5 => format!("\\u{code:04x}"),
            6 => format!("&#{code};"),
            7 => format!("&#x{code:X};"),
            8 if c == '&' => "&amp;".to_owned(),
            8 if c == '/' => "\\/".to_owned(),
            _ => c.to_string(),
        }
    }

    #[test]
    fn the_secrets_of_a_request_are_removed() {
        let url = Url::parse("https://me:p%40ssword@h/x?sig=abc%2Bdef&se=2030").unwrap();
        let headers = [
            ("Range", "bytes=0-131071"),
            (
                "Authorization",
                "AWS4-HMAC-SHA256 Credential=AKIAX/20/s3, SignedHeaders=host;range, Signature=0123abcd",
            ),
            ("X-Key", "hunter2\u{ad}"),
        ];
        let request = HttpRequest {
            headers: headers
                .map(|(name, value)| (name.to_owned(), value.to_owned()))
                .into(),
            body: b"grant=x&token=deadbeef",
            ..HttpRequest::new("POST", &url)
        };
        let secrets = Secrets::of_request(&request);
        for (said, left) in [
            ("no bytes=0-131071 for sig=ABC+DEF", "no bytes=0-131071 for sig=…"),
            ("abc%2Bdef, deadbeef", "…, …"),
            ("p@ssword p%40ssword", "… …"),
            ("bWU6cEBzc3dvcmQ=", "…"),
            ("AKIAX 0123ABCD", "… …"),
            ("hunter2\u{ad}", "…"),
            (r"hunter2\u00ad", "…"),
            ("abc def, abc%252Bdef, abc%2bdef, abc&#43;def", "…, …, …, …"),
            (r"p\u0040ssword p&#x40;ssword p%2540ssword", "… … …"),
            ("SignatureDoesNotMatch", "SignatureDoesNotMatch"),
            ("me", "me"),
        ] {
            assert_eq!(secrets.removed(said), left);
        }
    }
}
