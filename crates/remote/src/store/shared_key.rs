//! Signatures with the key of an account of Azure.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use jiff::Timestamp;
use ring::hmac;

use super::sigv4::collapsed;
use crate::http::message::{HttpRequest, http_date};
use crate::url::decode;

/// The headers without a prefix that are signed, in the order of the service.
const SIGNED: &[&str] = &[
    "Content-Encoding",
    "Content-Language",
    "Content-Length",
    "Content-MD5",
    "Content-Type",
    "Date",
    "If-Modified-Since",
    "If-Match",
    "If-None-Match",
    "If-Unmodified-Since",
    "Range",
];

/// Sign a request whose headers are final.
pub(super) fn sign(request: &mut HttpRequest<'_>, account: &str, key: &hmac::Key) {
    request.add("x-ms-date", http_date(Timestamp::now()));
    let signature = hmac::sign(key, canonical(request, account).as_bytes());
    let value = format!("SharedKey {account}:{}", STANDARD.encode(signature));
    request.add("Authorization", value);
}

/// Return the signed text: the method, the headers and the path.
fn canonical(request: &HttpRequest<'_>, account: &str) -> String {
    let headers = &request.headers;
    // It is added when the request is sent.
    let nbytes = request.body.len().to_string();
    let value = |name: &&str| {
        if *name == "Content-Length" && !request.body.is_empty() {
            return nbytes.as_str();
        }
        let found = headers.iter().find(|header| header.0.eq_ignore_ascii_case(name));
        found.map_or("", |header| header.1.as_str())
    };
    let named: Vec<&str> = SIGNED.iter().map(value).collect();
    let line =
        |(name, value): &(String, String)| format!("{}:{}\n", name.to_ascii_lowercase(), collapsed(value));
    let lines = headers.iter().map(line);
    let mut own: Vec<String> = lines.filter(|line| line.starts_with("x-ms-")).collect();
    own.sort();
    let (method, path) = (request.method, &request.url.path);
    let query = request.url.query.as_deref().unwrap_or_default();
    let parameter = |pair: &str| {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        format!("\n{}:{}", decode(name).to_lowercase(), decode(value))
    };
    let pairs = query.split('&').filter(|pair| !pair.is_empty());
    let mut parameters: Vec<String> = pairs.map(parameter).collect();
    parameters.sort();
    let parameters = parameters.concat();
    format!(
        "{method}\n{}\n{}/{account}{path}{parameters}",
        named.join("\n"),
        own.concat()
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::url::Url;

    #[test]
    fn the_signed_text_has_the_headers_of_the_service() {
        let url = Url::parse("https://me.blob.core.windows.net/models/a%20b").unwrap();
        let mut request = HttpRequest::new("GET", &url);
        for (name, value) in [
            ("Range", "bytes=0-9"),
            ("If-Match", "\"x\""),
            ("x-ms-version", "2021-12-02"),
            ("x-ms-date", "D"),
        ] {
            request.add(name, value);
        }
        let text =
            "GET\n\n\n\n\n\n\n\n\"x\"\n\n\nbytes=0-9\nx-ms-date:D\nx-ms-version:2021-12-02\n/me/models/a%20b";
        assert_eq!(canonical(&request, "me"), text);
    }

    /// tests/remote compares signatures with the signatures of Azure's SDK.
    #[test]
    fn the_signed_text_of_a_request_that_writes_has_the_length_and_the_query() {
        let url = Url::parse("https://h/models/a?comp=block&blockid=YQ%3D%3D").unwrap();
        let mut request = HttpRequest {
            body: b"12345",
            ..HttpRequest::new("PUT", &url)
        };
        request.add("x-ms-date", "D");
        let text = "PUT\n\n\n5\n\n\n\n\n\n\n\n\nx-ms-date:D\n/me/models/a\nblockid:YQ==\ncomp:block";
        assert_eq!(canonical(&request, "me"), text);
    }
}
