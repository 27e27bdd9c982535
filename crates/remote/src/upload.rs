//! Writing an object of a store: in one request, or in parts that become an object together.
//!
//! An object appears when it is complete, or not at all. Each attempt to write has an id, which the object carries as
//! metadata (`ingot-save-id`). An answer may be lost, and a second request then fails because of the first: after each
//! failure that leaves the outcome open, the object is read back and its id decides. A conflict with another writer, who
//! may yet fail, is such a failure: the request is made again.
//!
//! | store | one request | parts | an object that must not exist |
//! |---|---|---|---|
//! | S3, R2 | `PutObject` | `CreateMultipartUpload`, `UploadPart`, `CompleteMultipartUpload` | `If-None-Match: *` |
//! | other endpoints of S3's protocol | the same | the same | the same, after two requests have shown that the store obeys it |
//! | Azure | `Put Blob` | `Put Block`, `Put Block List` | `If-None-Match: *` |

use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use ingot_format::{StopFlag, to_u64};
use ring::rand::{SecureRandom as _, SystemRandom};

use crate::fault::{CONFLICT, Fault, FaultKind, NO_PARTS, Result};
use crate::fetch::Resource;
use crate::http::client::Client;
use crate::http::message::{Head, HttpRequest, parse_length};
use crate::http::pace::Deadline;
use crate::http::retry::Tries;
use crate::place::Remote;
use crate::store::credentials::element;
use crate::url::{Scheme, Url, encode_segment};

/// The condition that no object of this name exists.
const IS_NEW: (&str, &str) = ("If-None-Match", "*");

/// Time limit for the request that removes the parts of a failed upload, which may follow an interrupt.
const ABORT_TIMEOUT: Duration = Duration::from_secs(5);

/// Hosts of stores that are known to obey the condition for every request that makes an object.
const OBEDIENT: &[&str] = &[".amazonaws.com", ".amazonaws.com.cn", ".r2.cloudflarestorage.com"];

/// The requests of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Protocol {
    S3,
    Azure,
}

impl Protocol {
    /// Return the requests of the store of an object.
    ///
    /// # Errors
    /// [`Fault`], if files of this kind are only read.
    pub(crate) fn of(remote: &Remote) -> Result<Protocol> {
        match remote.backend {
            "s3" => Ok(Protocol::S3),
            "az" => Ok(Protocol::Azure),
            _ => {
                let why = "it cannot be written to: expected a URL of s3:// or az://, or a path";
                Err(Fault::address(why))
            }
        }
    }

    /// Return the header with the id of the save that made an object. Names of metadata in Azure have no hyphens.
    fn save_id(self) -> &'static str {
        match self {
            Protocol::S3 => "x-amz-meta-ingot-save-id",
            Protocol::Azure => "x-ms-meta-ingot_save_id",
        }
    }
}

/// An object that is written.
#[derive(Debug)]
pub struct Upload {
    resource: Resource,
    protocol: Protocol,
    /// Random, so that no other save has it.
    save_id: String,
    overwrite: bool,
    /// Whether the store lacks checksums beside signatures. The signatures then cover the bodies.
    lacks_checksums: AtomicBool,
}

/// The parts of an object, which become the object together.
#[derive(Debug)]
pub struct Parts<'u> {
    upload: &'u Upload,
    /// The store's name for them. Azure has none, since parts belong to the name of the object.
    id: String,
}

/// A part that the store has.
#[derive(Clone, Debug)]
pub struct Part {
    number: u32,
    /// The store's name for it.
    tag: String,
    checksum: Option<String>,
}

impl Upload {
    /// Return the upload of an object. Without `overwrite`, an object that exists stays, also if it appears meanwhile.
    ///
    /// # Errors
    /// [`Fault`], if files of this kind are only read, or the URL names a folder or a version.
    pub fn new(client: &Arc<Client>, remote: &Remote, overwrite: bool) -> Result<Upload> {
        let protocol = Protocol::of(remote)?;
        if protocol == Protocol::S3 && remote.home.query.is_some() {
            return Err(Fault::address(
                "expected the name of an object to write, found a version of one",
            ));
        }
        if remote.home.path.ends_with('/') {
            return Err(Fault::address(
                "expected the name of an object to write, found a folder: add a file name after the last /",
            ));
        }
        let mut id = [0; 16];
        let random = SystemRandom::new().fill(&mut id);
        random.map_err(|_| Fault::option("the system has no random numbers"))?;
        Ok(Upload {
            resource: Resource::new(client, remote),
            protocol,
            save_id: id.iter().map(|byte| format!("{byte:02x}")).collect(),
            overwrite,
            lacks_checksums: AtomicBool::new(protocol == Protocol::Azure),
        })
    }

    /// Check that the store obeys the condition of an upload without `overwrite`, in one request or in parts. A store that
    /// is not known is asked to replace an empty object beside this one, which is removed afterwards.
    ///
    /// # Errors
    /// [`Fault`], if the store would replace an object, or does not answer.
    pub fn check_condition(&self, in_parts: bool, stop: StopFlag<'_>) -> Result<()> {
        if self.overwrite || self.protocol == Protocol::Azure || is_obedient(&self.url().host) {
            return Ok(());
        }
        let path = format!("{}.ingot-probe-{}", self.url().path, self.save_id);
        let probe = self.beside(path);
        let obeys = probe.is_refused_twice(in_parts, stop);
        // It may be forbidden to remove objects.
        let _ = probe.remove(stop);
        if obeys? {
            Ok(())
        } else {
            Err(FaultKind::Unconditional.into())
        }
    }

    /// Return the upload of an empty object at another path.
    fn beside(&self, path: String) -> Upload {
        Upload {
            resource: self.resource.at_path(path),
            protocol: self.protocol,
            save_id: self.save_id.clone(),
            overwrite: false,
            lacks_checksums: AtomicBool::new(self.lacks_checksums.load(Ordering::Relaxed)),
        }
    }

    /// Make the object, and return whether the store refuses to make it once more.
    fn is_refused_twice(&self, in_parts: bool, stop: StopFlag<'_>) -> Result<bool> {
        self.put(b"", stop)?;
        let again = if in_parts {
            let parts = self.parts(stop)?;
            let made = parts.send(1, b"", stop).and_then(|part| {
                let all = [part];
                self.tries(stop)
                    .run(|deadline| parts.complete_once(&all, deadline))
            });
            if made.is_err() {
                parts.abort();
            }
            made
        } else {
            self.tries(stop).run(|deadline| self.put_once(b"", deadline))
        };
        match again {
            Ok(()) => Ok(false),
            Err(fault) if is_condition(&fault) => Ok(true),
            // A store that does not know the header.
            Err(fault) if matches!(fault.status(), Some(400 | 501)) => Ok(false),
            Err(fault) => Err(fault),
        }
    }

    /// Fail if the object exists, before bytes are sent for it. The condition of the request that makes the object decides,
    /// so that a store may refuse to answer this one.
    ///
    /// # Errors
    /// [`Fault`], if the object exists, or the store does not answer or has its bucket in another region.
    pub fn check_absent(&self, stop: StopFlag<'_>) -> Result<()> {
        let request = HttpRequest::new("HEAD", self.url());
        match self
            .tries(stop)
            .run(|deadline| self.resource.exchange(&request, deadline))
        {
            Ok(_) => Err(FaultKind::Exists.into()),
            Err(fault) if fault.status().is_some() && fault.region().is_none() => Ok(()),
            Err(fault) => Err(fault),
        }
    }

    /// Remove the object, if it exists.
    ///
    /// # Errors
    /// [`Fault`], if the store refuses that or does not answer. The object may then exist.
    pub fn remove(&self, stop: StopFlag<'_>) -> Result<()> {
        let request = HttpRequest::new("DELETE", self.url());
        let remove = |deadline: Deadline<'_>| match self.resource.exchange(&request, deadline) {
            Err(fault) if !fault.is_missing() => Err(fault),
            _ => Ok(()),
        };
        self.tries(stop).run(remove)
    }

    fn url(&self) -> &Url {
        self.resource.home()
    }

    fn tries<'f>(&self, stop: StopFlag<'f>) -> Tries<'f> {
        Tries::new(&self.resource.client().options, stop)
    }

    /// Write the whole object in one request.
    ///
    /// # Errors
    /// [`Fault`]. The object is then as it was, unless answers were lost: then the store may still make it.
    pub fn put(&self, bytes: &[u8], stop: StopFlag<'_>) -> Result<()> {
        let put = |deadline: Deadline<'_>| {
            let put = self.put_once(bytes, deadline);
            put.or_else(|fault| self.unless_made(fault, to_u64(bytes.len()), deadline))
        };
        self.tries(stop).run(put)
    }

    fn put_once(&self, bytes: &[u8], deadline: Deadline<'_>) -> Result<()> {
        self.with_checksums(|| {
            let mut request = self.request("PUT", self.url(), bytes);
            if self.protocol == Protocol::Azure {
                request.add("x-ms-blob-type", "BlockBlob");
            }
            request.add(self.protocol.save_id(), self.save_id.as_str());
            self.add_condition(&mut request);
            self.add_checksum(&mut request);
            self.resource.exchange(&request, deadline).map(drop)
        })
    }

    /// Begin an object of parts, which have numbers from 1 to 10,000 and at least 5 MiB each, except the last. Stores may
    /// require parts of one size.
    ///
    /// # Errors
    /// [`Fault`].
    pub fn parts(&self, stop: StopFlag<'_>) -> Result<Parts<'_>> {
        let id = match self.protocol {
            Protocol::S3 => self.begin(stop)?,
            Protocol::Azure => String::new(),
        };
        Ok(Parts { upload: self, id })
    }

    /// Return the name of new parts in S3.
    fn begin(&self, stop: StopFlag<'_>) -> Result<String> {
        let url = with_query(self.url(), "uploads=".to_owned());
        let begin = |deadline: Deadline<'_>| {
            self.with_checksums(|| {
                let mut request = self.request("POST", &url, b"");
                request.add(self.protocol.save_id(), self.save_id.as_str());
                if !self.lacks_checksums.load(Ordering::Relaxed) {
                    request.add("x-amz-checksum-algorithm", "CRC32");
                }
                let (_, body) = self.resource.exchange(&request, deadline)?;
                let id = element(&body, "UploadId").map(unescaped);
                id.filter(|id| !id.is_empty())
                    .ok_or_else(|| Fault::malformed("it has no UploadId"))
            })
        };
        self.tries(stop).run(begin)
    }

    /// Whether the object may still be made from new parts, after completing others failed: S3 requires them after a
    /// conflict with another writer. With `overwrite` they could replace a newer object.
    #[must_use]
    pub fn needs_new_parts(&self, fault: &Fault) -> bool {
        !self.overwrite && [CONFLICT, NO_PARTS].contains(&fault.said_code())
    }

    /// Return a request whose signature covers the body, unless the connection protects it.
    fn request<'r>(&self, method: &'static str, url: &'r Url, body: &'r [u8]) -> HttpRequest<'r> {
        HttpRequest {
            body,
            is_unsigned: !self.lacks_checksums.load(Ordering::Relaxed)
                && !body.is_empty()
                && is_protected(url),
            ..HttpRequest::new(method, url)
        }
    }

    fn add_condition(&self, request: &mut HttpRequest<'_>) {
        if !self.overwrite {
            request.add(IS_NEW.0, IS_NEW.1);
        }
    }

    /// Add the checksum of the body, which the store compares, and return it.
    fn add_checksum(&self, request: &mut HttpRequest<'_>) -> Option<String> {
        if self.lacks_checksums.load(Ordering::Relaxed) {
            return None;
        }
        let checksum = STANDARD.encode(crc32fast::hash(request.body).to_be_bytes());
        request.add("x-amz-checksum-crc32", checksum.as_str());
        Some(checksum)
    }

    /// Make a request, and once more without checksums if the store does not implement them.
    fn with_checksums<T>(&self, request: impl Fn() -> Result<T>) -> Result<T> {
        match request() {
            Err(fault)
                if fault.status() == Some(501) && !self.lacks_checksums.swap(true, Ordering::Relaxed) =>
            {
                request()
            }
            outcome => outcome,
        }
    }

    /// Return `Ok` if the object was made although the request failed: it has the id of this save and `nbytes` bytes.
    /// Otherwise return the request's `fault`.
    fn unless_made(&self, fault: Fault, nbytes: u64, deadline: Deadline<'_>) -> Result<()> {
        if matches!(fault.kind(), FaultKind::Stopped) || fault.is_misuse() {
            return Err(fault);
        }
        let request = HttpRequest::new("HEAD", self.url());
        // The deadline of the request whose answer was lost has passed.
        let deadline = Deadline::within(self.resource.client().options.stall_timeout, deadline.stop);
        match self.resource.exchange(&request, deadline) {
            Ok((head, _)) if self.is_made(&head, nbytes) => Ok(()),
            // Another writer had made an object before.
            _ if !self.overwrite && is_condition(&fault) => Err(FaultKind::Exists.into()),
            _ => Err(fault),
        }
    }

    fn is_made(&self, head: &Head, nbytes: u64) -> bool {
        let single = |name| head.single(name).ok().flatten();
        single(self.protocol.save_id()) == Some(&self.save_id)
            && single("content-length").and_then(parse_length) == Some(nbytes)
    }
}

impl Parts<'_> {
    /// Send one part. It may be sent again, by any thread.
    ///
    /// # Errors
    /// [`Fault`].
    pub fn send(&self, number: u32, bytes: &[u8], stop: StopFlag<'_>) -> Result<Part> {
        let upload = self.upload;
        let block = self.block(number);
        let query = match upload.protocol {
            Protocol::S3 => format!("partNumber={number}&uploadId={}", encode_segment(&self.id)),
            Protocol::Azure => format!("comp=block&blockid={}", encode_segment(&block)),
        };
        let url = with_query(upload.url(), query);
        let send = |deadline: Deadline<'_>| {
            let mut request = upload.request("PUT", &url, bytes);
            let checksum = upload.add_checksum(&mut request);
            let (head, _) = upload.resource.exchange(&request, deadline)?;
            let tag = match upload.protocol {
                Protocol::S3 => head.single("etag")?,
                Protocol::Azure => Some(block.as_str()),
            };
            let tag = tag.ok_or_else(|| Fault::malformed("it has no ETag"))?.to_owned();
            Ok(Part {
                number,
                tag,
                checksum,
            })
        };
        upload.tries(stop).run(send)
    }

    /// Return the name of a part in Azure. All names of an object have one length. The id of the save keeps the parts of
    /// two writers apart.
    fn block(&self, number: u32) -> String {
        STANDARD.encode(format!("{}-{number:05}", self.upload.save_id))
    }

    /// Make the object of `nbytes` bytes from all its parts, in order.
    ///
    /// # Errors
    /// [`Fault`]. The object is then as it was, unless answers were lost: then the store may still make it.
    pub fn complete(&self, parts: &[Part], nbytes: u64, stop: StopFlag<'_>) -> Result<()> {
        let complete = |deadline: Deadline<'_>| {
            let complete = self.complete_once(parts, deadline);
            complete.or_else(|fault| self.upload.unless_made(fault, nbytes, deadline))
        };
        self.upload.tries(stop).run(complete)
    }

    fn complete_once(&self, parts: &[Part], deadline: Deadline<'_>) -> Result<()> {
        let (url, upload) = (self.url(), self.upload);
        let (method, list) = match upload.protocol {
            Protocol::S3 => ("POST", list_of(parts)),
            Protocol::Azure => ("PUT", blocks_of(parts)),
        };
        let mut request = HttpRequest {
            is_slow: true,
            ..upload.request(method, &url, list.as_bytes())
        };
        upload.add_condition(&mut request);
        if upload.protocol == Protocol::Azure {
            request.add(upload.protocol.save_id(), upload.save_id.as_str());
            return upload.resource.exchange(&request, deadline).map(drop);
        }
        let (head, body) = upload.resource.exchange(&request, deadline)?;
        // The status is sent before the work is done, and a failure is in the body.
        if let Some(code) = element(&body, "Code") {
            return Err(head.refusal(Some(code)));
        }
        if body.contains("</CompleteMultipartUploadResult>") {
            Ok(())
        } else {
            Err(FaultKind::Short(to_u64(body.len()) + 1, to_u64(body.len())).into())
        }
    }

    /// Let the store remove the parts. Errors are ignored: the parts are invisible, and a lifecycle rule of the bucket
    /// removes them. Azure removes them after a week.
    pub fn abort(&self) {
        if self.upload.protocol == Protocol::Azure {
            return;
        }
        let url = self.url();
        let request = HttpRequest::new("DELETE", &url);
        let deadline = Deadline::within(ABORT_TIMEOUT, StopFlag::never());
        let abort = |deadline: Deadline<'_>| self.upload.resource.exchange(&request, deadline).map(drop);
        let _ = Tries::until(deadline, &self.upload.resource.client().options).run(abort);
    }

    fn url(&self) -> Url {
        let query = match self.upload.protocol {
            Protocol::S3 => format!("uploadId={}", encode_segment(&self.id)),
            Protocol::Azure => "comp=blocklist".to_owned(),
        };
        with_query(self.upload.url(), query)
    }
}

/// Return the list of parts in the request of Azure that makes the object. Parts that became the object by a request whose
/// answer was lost are found too.
fn blocks_of(parts: &[Part]) -> String {
    let block = |part: &Part| format!("<Latest>{}</Latest>", part.tag);
    let blocks: String = parts.iter().map(block).collect();
    format!("<?xml version=\"1.0\" encoding=\"utf-8\"?><BlockList>{blocks}</BlockList>")
}

/// Return the list of parts in the request of S3 that completes an upload.
fn list_of(parts: &[Part]) -> String {
    let mut list = "<CompleteMultipartUpload xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\">".to_owned();
    for Part {
        number,
        tag,
        checksum,
    } in parts
    {
        let tag = escaped(tag);
        // Writing to a String does not fail.
        let _ = write!(list, "<Part><PartNumber>{number}</PartNumber><ETag>{tag}</ETag>");
        if let Some(checksum) = checksum {
            let _ = write!(list, "<ChecksumCRC32>{checksum}</ChecksumCRC32>");
        }
        list.push_str("</Part>");
    }
    list.push_str("</CompleteMultipartUpload>");
    list
}

/// Whether a store refused to make an object because one exists.
fn is_condition(fault: &Fault) -> bool {
    fault.status() == Some(412) || matches!(fault.said_code(), "BlobAlreadyExists" | "PreconditionFailed")
}

fn is_obedient(host: &str) -> bool {
    OBEDIENT.iter().any(|end| host.ends_with(end))
}

/// Whether no one between this process and the server can change a body.
fn is_protected(url: &Url) -> bool {
    let is_here = url.address().is_some_and(|address| address.is_loopback()) || url.host == "localhost";
    url.scheme == Scheme::Https || is_here
}

/// Return a URL with more parameters in its query.
pub(crate) fn with_query(url: &Url, query: String) -> Url {
    let query = match &url.query {
        Some(signed) => format!("{signed}&{query}"),
        None => query,
    };
    Url {
        query: Some(query),
        ..url.clone()
    }
}

const ENTITIES: &[(&str, &str)] = &[
    ("&lt;", "<"),
    ("&gt;", ">"),
    ("&quot;", "\""),
    ("&#34;", "\""),
    ("&apos;", "'"),
    ("&#39;", "'"),
    ("&amp;", "&"),
];

/// Return the text of an XML element without the entities of XML.
pub(crate) fn unescaped(text: &str) -> String {
    let replace = |text: String, (entity, character): &(&str, &str)| text.replace(entity, character);
    ENTITIES.iter().fold(text.to_owned(), replace)
}

/// Return a text for an XML element.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_stores_survive_xml() {
        for text in ["\"a&b<c>d'\"", "&amp;", "a+b/c="] {
            assert_eq!(unescaped(&escaped(text)), text);
        }
        assert_eq!(unescaped("&quot;a&#39;&apos;&quot;"), "\"a''\"");
        let part = Part {
            number: 7,
            tag: "\"<&>\"".to_owned(),
            checksum: Some("AAAAAA==".to_owned()),
        };
        assert!(list_of(&[part]).contains(
            "<Part><PartNumber>7</PartNumber><ETag>\"&lt;&amp;&gt;\"</ETag><ChecksumCRC32>AAAAAA==</ChecksumCRC32></Part>"
        ));
    }

    #[test]
    fn only_bodies_that_others_cannot_change_are_unsigned() {
        let is_protected = |text: &str| is_protected(&Url::parse(text).unwrap());
        assert!(is_protected("https://h/k"));
        assert!(is_protected("http://127.0.0.1:9000/b/k") && is_protected("http://[::1]/b/k"));
        assert!(is_protected("http://localhost/b/k") && !is_protected("http://minio:9000/b/k"));
    }

    #[test]
    fn known_stores_obey_conditions() {
        for (host, obeys) in [
            ("bucket.s3.eu-west-1.amazonaws.com", true),
            ("account.r2.cloudflarestorage.com", true),
            ("minio.local", false),
            ("amazonaws.com.evil.example", false),
        ] {
            assert_eq!(is_obedient(host), obeys, "{host}");
        }
    }
}
