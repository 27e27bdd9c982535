//! Signatures with the key of an account of Azure.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use jiff::Timestamp;
use ring::hmac;

use super::sigv4::collapsed;
use crate::http::message::{HttpRequest, http_date};

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
    let value = |name: &&str| {
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
    format!("{method}\n{}\n{}/{account}{path}", named.join("\n"), own.concat())
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
}
