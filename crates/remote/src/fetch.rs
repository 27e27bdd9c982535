//! Asking for a part of one file: redirects, credentials, and that the answer is what was asked for.

use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use ingot_format::{Escaped, to_u64, to_usize};

use crate::access::Access;
use crate::fault::{Fault, FaultKind};
use crate::http::client::{Client, Response};
use crate::http::dial::AddressScope;
use crate::http::message::{Framing, Head, HttpRequest, parse_length};
use crate::http::pace::{Deadline, Pace};
use crate::pin::Pin;
use crate::place::Remote;
use crate::secrets::Secrets;
use crate::store::credentials::element;
use crate::url::{Scheme, Url};
use ingot_format::locked;

/// Redirects that are followed for one request.
const MAX_HOPS: usize = 5;

/// Those of redirects that are refused and named.
const OTHER_SCHEMES: &[&str] = &[
    "http",
    "https",
    "file",
    "ftp",
    "data",
    "gopher",
    "javascript",
    "s3",
    "gs",
];

/// Bytes of the body of a refusal that are looked at.
const REFUSAL_NBYTES: usize = 4 << 10;

/// A file behind a URL, and the way to it.
#[derive(Debug)]
pub struct Resource {
    client: Arc<Client>,
    /// As the caller has named it.
    home: Url,
    access: Arc<Access>,
    /// Whether the caller knows the file by that URL.
    is_shown: bool,
    /// Where the last redirect led to. It is asked there until it is refused, as signed addresses are when their time
    /// is over.
    found: Mutex<Option<Hop>>,
    /// What a server of the Hub says of the file.
    linked: Mutex<Linked>,
}

/// What a server of the Hub says of a file that another host gives.
#[derive(Clone, Debug, Default)]
pub(crate) struct Linked {
    pub(crate) commit: Option<String>,
    /// The SHA-256 of files that are kept outside of Git, as those with weights are.
    pub(crate) etag: Option<String>,
}

/// One URL of a chain of redirects.
#[derive(Clone, Debug)]
struct Hop {
    url: Url,
    is_trusted: bool,
}

/// What is asked of a file.
#[derive(Clone, Copy, Debug)]
struct Question<'q> {
    range: &'q Range<u64>,
    /// The version that the bytes have to be of.
    pin: Option<&'q Pin>,
    deadline: Deadline<'q>,
}

/// Where one request leads.
enum Step {
    Answered(Answer),
    Redirected(Hop),
}

/// What a server answers with.
#[derive(Debug)]
pub(crate) enum Answer {
    /// The part that was asked for, or as much of it as the file has.
    Part {
        response: Response,
        range: Range<u64>,
        pin: Pin,
    },
    /// All of the file, of so many bytes.
    Whole {
        response: Response,
        nbytes: Option<u64>,
        pin: Pin,
    },
    /// The file is empty.
    Nothing,
}

impl Resource {
    /// The file that `remote` says, asked for by `client`.
    #[must_use]
    pub fn new(client: &Arc<Client>, remote: &Remote) -> Resource {
        let (home, access) = (remote.home.clone(), Arc::clone(&remote.access));
        Resource::at(Arc::clone(client), home, access, remote.is_shown())
    }

    pub(crate) fn at(client: Arc<Client>, home: Url, access: Arc<Access>, is_shown: bool) -> Resource {
        Resource {
            client,
            home,
            access,
            is_shown,
            found: Mutex::new(None),
            linked: Mutex::default(),
        }
    }

    /// The same, of which a server of the Hub has said the commit.
    pub(crate) fn of_commit(self, commit: Option<String>) -> Resource {
        locked(&self.linked).commit = commit;
        self
    }

    /// What a server of the Hub has said of the file.
    pub(crate) fn linked(&self) -> Linked {
        locked(&self.linked).clone()
    }

    /// The address that the caller has named.
    pub(crate) fn home(&self) -> &Url {
        &self.home
    }

    pub(crate) fn client(&self) -> &Client {
        &self.client
    }

    /// Asks once for the bytes of `range`, of the version that `pin` names.
    pub(crate) fn ask(
        &self,
        range: &Range<u64>,
        pin: Option<&Pin>,
        deadline: Deadline<'_>,
    ) -> Result<Answer, Fault> {
        let question = Question { range, pin, deadline };
        let before = locked(&self.found).clone();
        if let Some(found) = before {
            match self.walk(found, question) {
                // A store says 400 of an address that was signed with keys that are over.
                Err(fault) if matches!(fault.status(), Some(400 | 401 | 403 | 404 | 410)) => {
                    locked(&self.found).take();
                }
                answer => return answer,
            }
        }
        let sent = Instant::now();
        match self.walk(self.at_home(), question) {
            Err(fault) if fault.refuses_identity() && self.access.forget(sent) => {
                self.walk(self.at_home(), question)
            }
            answer => answer,
        }
    }

    /// The body of an answer, which has `expected` bytes where it says so. `None` where they are more than `most`.
    ///
    /// # Errors
    /// Where it ends too early. One that ends with its connection may have been cut off: what is in it will tell.
    pub(crate) fn body(
        &self,
        mut response: Response,
        expected: Option<u64>,
        most: u64,
        deadline: Deadline<'_>,
    ) -> Result<Option<Vec<u8>>, Fault> {
        if expected.is_some_and(|nbytes| nbytes > most) {
            return Ok(None);
        }
        let wanted = to_usize(expected.unwrap_or(most + 1)).unwrap_or(usize::MAX);
        let bytes = response.read_some(wanted, &mut self.pace(deadline))?;
        let found = to_u64(bytes.len());
        match expected {
            Some(expected) if found < expected => Err(FaultKind::Short { expected, found }.into()),
            None if found > most => Ok(None),
            _ => {
                self.client.give_back(response);
                Ok(Some(bytes))
            }
        }
    }

    fn at_home(&self) -> Hop {
        Hop {
            url: self.home.clone(),
            is_trusted: true,
        }
    }

    /// Asks at `start`, and wherever that sends us.
    fn walk(&self, start: Hop, question: Question<'_>) -> Result<Answer, Fault> {
        let mut at = start;
        let mut sent = Vec::new();
        for _ in 0..=MAX_HOPS {
            let step = self.step(&at, question, &mut sent);
            match step.map_err(|fault| self.about(&at.url, fault, &sent))? {
                Step::Redirected(next) => at = next,
                Step::Answered(answer) => {
                    *locked(&self.found) = (at.url != self.home).then_some(at);
                    return Ok(answer);
                }
            }
        }
        Err(FaultKind::Loop { hops: MAX_HOPS }.into())
    }

    fn step(
        &self,
        at: &Hop,
        question: Question<'_>,
        sent: &mut Vec<(String, String)>,
    ) -> Result<Step, Fault> {
        let response = self.send(at, question, sent)?;
        if at.is_trusted {
            self.note(&response.head)?;
        }
        let Some(location) = redirect(&response.head)? else {
            return self.understand(response, &at.url, question).map(Step::Answered);
        };
        let next = self.next(at, location)?;
        self.drain(response, question.deadline);
        Ok(Step::Redirected(next))
    }

    fn note(&self, head: &Head) -> Result<(), Fault> {
        let (commit, etag) = (head.single("x-repo-commit")?, head.single("x-linked-etag")?);
        let mut linked = locked(&self.linked);
        if let Some(commit) = commit {
            linked.commit = Some(commit.to_owned());
        }
        if let Some(etag) = etag {
            linked.etag = Some(etag.to_owned());
        }
        Ok(())
    }

    fn send(
        &self,
        at: &Hop,
        question: Question<'_>,
        sent: &mut Vec<(String, String)>,
    ) -> Result<Response, Fault> {
        let Question { range, pin, deadline } = question;
        let range = format!("bytes={}-{}", range.start, range.end - 1);
        let mut headers = vec![("Range".to_owned(), range)];
        // A server that only redirects knows nothing of the version that another has named.
        if let Some(pin) = pin
            && pin.is_from(&at.url)
        {
            headers.extend(pin.condition());
        }
        let mut request = HttpRequest {
            method: "GET",
            url: &at.url,
            headers,
            body: &[],
        };
        let mut carries_secrets = at.url.is_secret();
        if at.is_trusted {
            carries_secrets |= self.access.apply(&mut request, &self.client.options, deadline)?;
        }
        if carries_secrets && self.client.is_overheard(&at.url)? {
            return Err(Fault::option(
                "a proxy would read the credentials of a request over http://, which a query may be too: give a URL of \
                 https://, or none",
            ));
        }
        let is_named = at.url.origin() == self.home.origin();
        let scope = if is_named || self.client.options.allow_private_redirects {
            AddressScope::Anywhere
        } else {
            AddressScope::Public
        };
        let response = self.client.send(&request, scope, deadline);
        sent.append(&mut request.headers);
        response
    }

    /// Where a redirect leads, if we go there.
    fn next(&self, at: &Hop, location: &str) -> Result<Hop, Fault> {
        let refuse = |to: String, why| Fault::new(FaultKind::Redirect { to, why });
        let url = at.url.join(location).map_err(|_| {
            // What is no URL of HTTP may be anything, a part of a secret among it.
            let scheme = location.split(':').next().unwrap_or_default();
            let known = OTHER_SCHEMES
                .iter()
                .find(|known| known.eq_ignore_ascii_case(scheme));
            let to = known.map_or("…".to_owned(), |known| format!("{known}:…"));
            refuse(to, "it is no URL of http: or https:")
        })?;
        if at.url.scheme == Scheme::Https && url.scheme == Scheme::Http {
            return Err(refuse(url.to_string(), "it leads from https: to http:"));
        }
        let is_trusted = at.is_trusted && url.origin() == self.home.origin();
        Ok(Hop { url, is_trusted })
    }

    fn understand(&self, mut response: Response, url: &Url, question: Question<'_>) -> Result<Answer, Fault> {
        let head = &response.head;
        let pin = question.pin;
        match head.status {
            206 => {
                check_encoding(head)?;
                let (range, total) = part_of(head, question.range)?;
                let here = Pin::new(head, total, url)?;
                if let Some(pin) = pin {
                    pin.check(&here)?;
                }
                Ok(Answer::Part {
                    response,
                    range,
                    pin: here,
                })
            }
            200 => {
                check_encoding(head)?;
                let nbytes = head.single("content-length")?.and_then(parse_length);
                let pin = Pin::new(head, nbytes.unwrap_or(0), url)?;
                Ok(Answer::Whole {
                    response,
                    nbytes,
                    pin,
                })
            }
            412 if pin.is_some() => Err(FaultKind::Changed { nbytes_now: None }.into()),
            416 if pin.is_some() => Err(FaultKind::Changed {
                nbytes_now: total_of_none(head)?,
            }
            .into()),
            416 if total_of_none(head)? == Some(0) => Ok(Answer::Nothing),
            _ => Err(self.refusal(&mut response, question.deadline)),
        }
    }

    /// What a server says that gives no bytes.
    fn refusal(&self, response: &mut Response, deadline: Deadline<'_>) -> Fault {
        let body = response.read_some(REFUSAL_NBYTES, &mut self.pace(deadline));
        let body = body.unwrap_or_default();
        let head = &response.head;
        let said = ["x-error-message", "x-error-code", "x-ms-error-code"]
            .iter()
            .find_map(|name| head.shown(name))
            .or_else(|| element(&String::from_utf8_lossy(&body), "Code").map(ToOwned::to_owned))
            .map(|said| Escaped(&said).to_string());
        FaultKind::Status {
            status: head.status,
            reason: Escaped(&head.reason).to_string(),
            said,
            wait: head.retry_after(),
            // A server that names two regions has named none.
            region: head
                .single("x-amz-bucket-region")
                .ok()
                .flatten()
                .map(ToOwned::to_owned),
        }
        .into()
    }

    /// Reads the short body of a redirect, so that its connection can be used again.
    fn drain(&self, mut response: Response, deadline: Deadline<'_>) {
        let is_short =
            matches!(response.framing, Framing::Length(nbytes) if nbytes <= to_u64(REFUSAL_NBYTES));
        if is_short
            && response
                .read_some(REFUSAL_NBYTES, &mut self.pace(deadline))
                .is_ok()
        {
            self.client.give_back(response);
        }
    }

    pub(crate) fn pace<'f>(&self, deadline: Deadline<'f>) -> Pace<'f> {
        Pace::new(&self.client.options, deadline)
    }

    /// Names the URL that a fault comes from, where it is not that of the file, and takes out of it what the headers
    /// that were `sent` and the URLs hold of secrets.
    fn about(&self, url: &Url, fault: Fault, sent: &[(String, String)]) -> Fault {
        let mut secrets = Secrets::default();
        self.client.add_secrets(&mut secrets, url);
        secrets.add_url(&self.home);
        secrets.add_url(url);
        secrets.add_headers(sent);
        let fault = if *url == self.home && self.is_shown {
            fault
        } else {
            fault.from(url.to_string())
        };
        fault.without(&secrets)
    }
}

/// Where an answer sends us.
fn redirect(head: &Head) -> Result<Option<&str>, Fault> {
    match head.status {
        301 | 302 | 303 | 307 | 308 => head.single("location"),
        _ => Ok(None),
    }
}

/// The bytes of a file of which a part was asked for that it does not have.
fn total_of_none(head: &Head) -> Result<Option<u64>, Fault> {
    let total = head.single("content-range")?;
    Ok(total
        .and_then(|text| text.strip_prefix("bytes */"))
        .and_then(parse_length))
}

/// Bytes that are compressed are not those of the file, and parts of them are parts of nothing.
fn check_encoding(head: &Head) -> Result<(), Fault> {
    let encodings = head.list("content-encoding")?;
    if encodings
        .iter()
        .all(|encoding| encoding.eq_ignore_ascii_case("identity"))
    {
        Ok(())
    } else {
        Err(FaultKind::Encoded(Escaped(&encodings.join(", ")).to_string()).into())
    }
}

/// The part that an answer holds, and the bytes of the whole file.
fn part_of(head: &Head, asked: &Range<u64>) -> Result<(Range<u64>, u64), Fault> {
    let other = |got: &str| FaultKind::OtherRange {
        asked: asked.clone(),
        got: Escaped(got).to_string(),
    };
    let kinds = head.list("content-type")?;
    if kinds
        .iter()
        .any(|kind| kind.to_ascii_lowercase().starts_with("multipart/"))
    {
        return Err(other("several parts").into());
    }
    let Some(text) = head.single("content-range")? else {
        return Err(other("no Content-Range").into());
    };
    let read = || {
        let (unit, rest) = text.split_once(' ')?;
        let (range, total) = rest.split_once('/')?;
        let (first, last) = range.split_once('-')?;
        let (first, last, total) = (parse_length(first)?, parse_length(last)?, parse_length(total)?);
        let fits = unit.eq_ignore_ascii_case("bytes") && first <= last && last < total;
        fits.then_some((first..last + 1, total))
    };
    let quoted = format!("Content-Range: {text}");
    let (range, total) = read().ok_or_else(|| other(&quoted))?;
    if range.start != asked.start || range.end != asked.end.min(total) {
        return Err(other(&quoted).into());
    }
    let nbytes = head.single("content-length")?.and_then(parse_length);
    match nbytes {
        Some(nbytes) if nbytes != range.end - range.start => {
            Err(other(&format!("{quoted} with {nbytes} bytes")).into())
        }
        _ => Ok((range, total)),
    }
}
