//! Signature Version 4 of Amazon, which Google's store accepts too.

use std::collections::BTreeMap;

use jiff::Timestamp;
use ring::{digest, hmac};

use crate::credentials::Keys;
use crate::http::message::HttpRequest;

/// Sign a request of S3, whose headers and body are final, at `time`.
pub(super) fn sign(request: &mut HttpRequest<'_>, keys: &Keys, region: &str, time: Timestamp) {
    let body = if request.is_unsigned {
        "UNSIGNED-PAYLOAD".to_owned()
    } else {
        hex(digest::digest(&digest::SHA256, request.body).as_ref())
    };
    let time = time.strftime("%Y%m%dT%H%M%SZ").to_string();
    request.add("x-amz-content-sha256", body.as_str());
    request.add("x-amz-date", time.as_str());
    if let Some(session) = &keys.session {
        request.add("x-amz-security-token", session.reveal());
    }
    let mut signed = BTreeMap::from([("host".to_owned(), vec![request.url.authority()])]);
    for (name, value) in &request.headers {
        let name = name.to_ascii_lowercase();
        if matches!(name.as_str(), "range" | "if-none-match") || name.starts_with("x-amz-") {
            signed.entry(name).or_default().push(collapsed(value));
        }
    }
    let names: Vec<&str> = signed.keys().map(String::as_str).collect();
    let names = names.join(";");
    let line = |(name, values): (&String, &Vec<String>)| format!("{name}:{}\n", values.join(","));
    let lines: String = signed.iter().map(line).collect();
    let (method, path) = (request.method, &request.url.path);
    let query = canonical_query(request.url.query.as_deref().unwrap_or_default());
    let canonical = format!("{method}\n{path}\n{query}\n{lines}\n{names}\n{body}");
    let day = &time[..8];
    let scope = format!("{day}/{region}/s3/aws4_request");
    let digest = digest::digest(&digest::SHA256, canonical.as_bytes());
    let to_sign = format!("AWS4-HMAC-SHA256\n{time}\n{scope}\n{}", hex(digest.as_ref()));
    let mut key = format!("AWS4{}", keys.secret.reveal()).into_bytes();
    for step in [day, region, "s3", "aws4_request"] {
        key = keyed(&key, step.as_bytes());
    }
    let signature = hex(&keyed(&key, to_sign.as_bytes()));
    let id = keys.id.reveal();
    let value =
        format!("AWS4-HMAC-SHA256 Credential={id}/{scope}, SignedHeaders={names}, Signature={signature}");
    request.add("Authorization", value);
}

/// Return the parameters of a query in the order of their names, each with a value.
fn canonical_query(query: &str) -> String {
    let pairs = query.split('&').filter(|pair| !pair.is_empty());
    let valued = |pair: &str| format!("{pair}{}", if pair.contains('=') { "" } else { "=" });
    let mut pairs: Vec<String> = pairs.map(valued).collect();
    pairs.sort();
    pairs.join("&")
}

/// Return a header value for a signature: each run of spaces is one space.
pub(super) fn collapsed(value: &str) -> String {
    let words: Vec<&str> = value.split_ascii_whitespace().collect();
    words.join(" ")
}

fn keyed(key: &[u8], text: &[u8]) -> Vec<u8> {
    let key = hmac::Key::new(hmac::HMAC_SHA256, key);
    hmac::sign(&key, text).as_ref().to_vec()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::credentials::Secret;
    use crate::url::Url;

    /// The example of Amazon's page "Signature Calculations for the Authorization Header", GET Object.
    #[test]
    fn the_published_example_has_its_signature() {
        let url = Url::parse("https://examplebucket.s3.amazonaws.com/test.txt").unwrap();
        let mut request = HttpRequest::new("GET", &url);
        request.add("Range", "bytes=0-9");
        let keys = Keys {
            id: Secret::new("AKIAIOSFODNN7EXAMPLE"),
            secret: Secret::new("wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"),
            session: None,
        };
        let time = "2013-05-24T00:00:00Z".parse().unwrap();
        sign(&mut request, &keys, "us-east-1", time);
        let value = &request.headers.last().unwrap().1;
        assert_eq!(
            value,
            "AWS4-HMAC-SHA256 Credential=AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request, \
             SignedHeaders=host;range;x-amz-content-sha256;x-amz-date, \
             Signature=f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41"
        );
    }

    /// tests/remote compares signatures with botocore's.
    #[test]
    fn headers_are_signed_with_single_spaces() {
        assert_eq!(collapsed(" a  b\t c "), "a b c");
    }
}
