//! The objects of a store whose keys have a prefix.
//!
//! S3's `ListObjectsV2` and Azure's `List Blobs` answer with up to 1,000 objects, and a token for the next request. Both
//! stores list an object as soon as the request that makes it has succeeded, and no longer after one that removes it.

use std::sync::Arc;
use std::time::Duration;

use ingot_format::{StopFlag, to_u64};
use jiff::Timestamp;

use crate::fault::{Fault, FaultKind, Result};
use crate::fetch::Resource;
use crate::http::client::Client;
use crate::http::message::{HttpRequest, date_of, parse_length};
use crate::http::pace::Deadline;
use crate::http::retry::Tries;
use crate::place::Remote;
use crate::store::credentials::element;
use crate::upload::{Protocol, unescaped, with_query};
use crate::url::{Url, encode_path, encode_segment};

/// Most bytes of one answer. An object takes some hundred bytes, and up to 8 KiB if its key is long and is escaped.
const PAGE_NBYTES: usize = 16 << 20;

/// An object in a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// The key after the last slash of the prefix.
    pub name: String,
    /// The size in bytes.
    pub nbytes: u64,
    /// The `ETag`, which another version of the object does not have.
    pub tag: String,
    /// The time since the object was written, by the clock of the store.
    pub age: Duration,
}

/// Return the objects whose keys begin with the key of `prefix`, in the order of the store.
///
/// # Errors
/// [`Fault`], if the store has another protocol than S3's and Azure's, refuses the request, or does not answer.
pub fn list(client: &Arc<Client>, prefix: &Remote, stop: StopFlag<'_>) -> Result<Vec<Listed>> {
    let protocol = Protocol::of(prefix)?;
    let key = prefix.key.as_deref().unwrap_or_default();
    let bucket = Resource::at(
        Arc::clone(client),
        bucket_of(&prefix.home, key)?,
        Arc::clone(&prefix.access),
        false,
    );
    let folder = &key[..key.rfind('/').map_or(0, |end| end + 1)];
    let (mut found, mut token) = (Vec::new(), None);
    loop {
        let url = with_query(bucket.home(), query(protocol, key, token.as_deref()));
        let ask = |deadline: Deadline<'_>| {
            let (head, body) =
                bucket.exchange_up_to(PAGE_NBYTES, &HttpRequest::new("GET", &url), deadline)?;
            let date = head.single("date")?.and_then(date_of);
            let now = date.ok_or_else(|| Fault::malformed("it has no Date"))?;
            page(protocol, &body, folder, now)
        };
        let (objects, next) = Tries::new(&client.options, stop).run(ask)?;
        found.extend(objects);
        if next.is_none() {
            return Ok(found);
        }
        if next == token {
            return Err(Fault::malformed("its token is the token of the request"));
        }
        token = next;
    }
}

/// Return the URL of the bucket of an object.
fn bucket_of(object: &Url, key: &str) -> Result<Url> {
    let path = object.path.strip_suffix(&encode_path(key));
    let path = path.ok_or_else(|| Fault::address("expected the name of a bucket and a key"))?;
    let path = path.strip_suffix('/').unwrap_or(path);
    let mut bucket = object.clone();
    bucket.path = if path.is_empty() { "/" } else { path }.to_owned();
    Ok(bucket)
}

fn query(protocol: Protocol, prefix: &str, token: Option<&str>) -> String {
    let prefix = encode_segment(prefix);
    let (mut query, next) = match protocol {
        Protocol::S3 => (format!("list-type=2&prefix={prefix}"), "continuation-token"),
        Protocol::Azure => (
            format!("restype=container&comp=list&maxresults=1000&prefix={prefix}"),
            "marker",
        ),
    };
    if let Some(token) = token {
        query = format!("{query}&{next}={}", encode_segment(token));
    }
    query
}

/// Return the objects of an answer, and the token for the next request if there are more.
fn page(
    protocol: Protocol,
    body: &str,
    folder: &str,
    now: Timestamp,
) -> Result<(Vec<Listed>, Option<String>)> {
    let (end, object, token) = match protocol {
        Protocol::S3 => ("</ListBucketResult>", "Contents", "NextContinuationToken"),
        Protocol::Azure => ("</EnumerationResults>", "Blob", "NextMarker"),
    };
    if !body.contains(end) {
        return Err(FaultKind::Short(to_u64(body.len()) + 1, to_u64(body.len())).into());
    }
    let mut found = Vec::new();
    for one in body.split(&format!("<{object}>")).skip(1) {
        found.extend(listed(protocol, one, folder, now)?);
    }
    let token = element(body, token)
        .map(unescaped)
        .filter(|token| !token.is_empty());
    Ok((found, token))
}

/// Return the object that the text after the start of its element describes. `None` if XML cannot contain its name.
fn listed(protocol: Protocol, text: &str, folder: &str, now: Timestamp) -> Result<Option<Listed>> {
    let [key, nbytes, tag, time] = match protocol {
        Protocol::S3 => ["Key", "Size", "ETag", "LastModified"],
        Protocol::Azure => ["Name", "Content-Length", "Etag", "Last-Modified"],
    };
    let Some(key) = element(text, key).map(unescaped) else {
        return Ok(None);
    };
    let name = key.strip_prefix(folder);
    let name = name.ok_or_else(|| Fault::malformed("it lists an object without the prefix"))?;
    let time = element(text, time).and_then(|time| time.parse().ok().or_else(|| date_of(time)));
    let (Some(nbytes), Some(tag), Some(time)) = (
        element(text, nbytes).and_then(parse_length),
        element(text, tag).map(unescaped),
        time,
    ) else {
        return Err(Fault::malformed(
            "an object in its list has no size, ETag or time",
        ));
    };
    Ok(Some(Listed {
        name: name.to_owned(),
        nbytes,
        tag,
        // The clocks of a store's machines may differ.
        age: Duration::try_from(now.duration_since(time)).unwrap_or_default(),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    const S3: &str = "<?xml version=\"1.0\"?><ListBucketResult><Name>b</Name><Prefix>run/</Prefix>\
        <IsTruncated>true</IsTruncated><NextContinuationToken>a+b/&lt;=</NextContinuationToken>\
        <Contents><Key>run/a &amp; b/x</Key><LastModified>2026-11-29T17:00:30.000Z</LastModified>\
        <ETag>&quot;1-2&quot;</ETag><Size>12</Size></Contents>\
        <Contents><Key>run/y</Key><LastModified>2026-11-29T17:01:31.000Z</LastModified>\
        <ETag>&quot;3&quot;</ETag><Size>0</Size></Contents></ListBucketResult>";

    const AZURE: &str = "<?xml version=\"1.0\"?><EnumerationResults><Prefix>run/</Prefix><Blobs>\
        <Blob><Name>run/a &amp; b/x</Name><Properties><Last-Modified>Sun, 29 Nov 2026 17:00:30 GMT</Last-Modified>\
        <Etag>0x8D</Etag><Content-Length>12</Content-Length></Properties></Blob>\
        <Blob><Name Encoded=\"true\">run%2F%01</Name><Properties></Properties></Blob>\
        </Blobs><NextMarker /></EnumerationResults>";

    fn now() -> Timestamp {
        "2026-11-29T17:01:30Z".parse().unwrap()
    }

    #[test]
    fn a_list_of_s3_has_names_below_the_folder_and_a_token() {
        let (found, token) = page(Protocol::S3, S3, "run/", now()).unwrap();
        assert_eq!(token.as_deref(), Some("a+b/<="));
        let [first, second] = &found[..] else {
            panic!("{found:?}")
        };
        assert_eq!(
            (first.name.as_str(), first.nbytes, first.tag.as_str()),
            ("a & b/x", 12, "\"1-2\"")
        );
        assert_eq!((first.age, second.age), (Duration::from_secs(60), Duration::ZERO));
    }

    #[test]
    fn a_list_of_azure_leaves_out_names_that_xml_cannot_contain() {
        let (found, token) = page(Protocol::Azure, AZURE, "run/", now()).unwrap();
        assert_eq!(token, None);
        let [only] = &found[..] else { panic!("{found:?}") };
        assert_eq!(
            (only.name.as_str(), only.nbytes, only.tag.as_str()),
            ("a & b/x", 12, "0x8D")
        );
        assert_eq!(only.age, Duration::from_secs(60));
    }

    #[test]
    fn a_truncated_list_is_requested_again() {
        for end in [0, 40, S3.len() - 1] {
            let fault = page(Protocol::S3, &S3[..end], "run/", now()).unwrap_err();
            assert!(fault.is_transient(), "{fault}");
        }
        let damaged = S3.replace("<Size>12</Size>", "");
        assert_eq!(
            page(Protocol::S3, &damaged, "run/", now()).unwrap_err().code(),
            "malformed-response"
        );
    }

    #[test]
    fn a_bucket_is_in_the_path_or_in_the_host() {
        for (url, expected) in [
            ("http://h/base/bucket/a%20b/", "http://h/base/bucket"),
            ("http://bucket.h/a%20b/", "http://bucket.h/"),
        ] {
            let bucket = bucket_of(&Url::parse(url).unwrap(), "a b/").unwrap();
            assert_eq!(bucket.to_string(), expected);
        }
        assert_eq!(
            query(Protocol::S3, "a b/", Some("x+/=")),
            "list-type=2&prefix=a%20b%2F&continuation-token=x%2B%2F%3D"
        );
    }
}
