//! Requests for a range of one file: redirects, credentials, and the check of the answer.

use std::ops::{ControlFlow, Range};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use ingot_format::{Escaped, locked, to_u64, to_usize};

use crate::fault::{Fault, FaultKind, Result};
use crate::http::client::{Client, Response};
use crate::http::message::{Framing, Head, HttpRequest, parse_length};
use crate::http::pace::{Deadline, Pace};
use crate::pin::Pin;
use crate::place::Remote;
use crate::secrets::Secrets;
use crate::store::Access;
use crate::store::credentials::element;
use crate::url::{SCHEMES, Scheme, Url};

/// Most redirects of one request.
const MAX_HOPS: usize = 5;

/// The schemes that the message about a refused redirect names, besides [`SCHEMES`].
const OTHER_SCHEMES: &[&str] = &["file", "ftp", "data", "gopher", "javascript"];

/// Most bytes that are read from the body of a refusal or a redirect.
const REFUSAL_NBYTES: usize = 4 << 10;

/// Most bytes that are read from the body of an answer to a request that writes.
const ANSWER_NBYTES: usize = 64 << 10;

/// A file behind a URL, with the client and the credentials of its requests.
#[derive(Debug)]
pub struct Resource {
    client: Arc<Client>,
    /// The URL that the caller named.
    home: Url,
    access: Arc<Access>,
    /// Whether the caller knows the file by that URL.
    is_shown: bool,
    /// The target of the last redirect. It is used until it is refused, as signed URLs are after their expiry.
    found: Mutex<Option<Hop>>,
    linked: Mutex<Linked>,
}

/// Headers of the Hub about a file that another host serves.
#[derive(Clone, Debug, Default)]
pub(crate) struct Linked {
    pub(crate) commit: Option<String>,
    /// The SHA-256 of a file that is stored outside Git, as weights are.
    pub(crate) etag: Option<String>,
}

/// One URL of a chain of redirects.
#[derive(Clone, Debug)]
struct Hop {
    url: Url,
    is_trusted: bool,
}

/// A request for a range, of the version `pin` if there is one.
#[derive(Clone, Copy, Debug)]
struct Question<'q> {
    range: &'q Range<u64>,
    pin: Option<&'q Pin>,
    deadline: Deadline<'q>,
}

/// The answer of a server: a range of the file, or all of it.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) response: Response,
    pub(crate) pin: Pin,
    /// The range: the requested one, shortened to the end of the file. `None` for the whole file.
    pub(crate) part: Option<Range<u64>>,
    /// The size of the body, if it is known.
    pub(crate) nbytes: Option<u64>,
}

impl Resource {
    /// Return the file `remote`, requested by `client`.
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
            found: Mutex::default(),
            linked: Mutex::default(),
        }
    }

    /// Return the file at another path of the same server, with the same credentials.
    pub(crate) fn at_path(&self, path: String) -> Resource {
        let home = Url {
            path,
            ..self.home.clone()
        };
        Resource::at(
            Arc::clone(&self.client),
            home,
            Arc::clone(&self.access),
            self.is_shown,
        )
    }

    /// Set the commit that another process received from the Hub.
    pub(crate) fn of_commit(self, commit: Option<String>) -> Resource {
        locked(&self.linked).commit = commit;
        self
    }

    /// Return the headers that the Hub has sent about the file.
    pub(crate) fn linked(&self) -> Linked {
        locked(&self.linked).clone()
    }

    /// Return the URL that the caller named.
    pub(crate) fn home(&self) -> &Url {
        &self.home
    }

    pub(crate) fn client(&self) -> &Client {
        &self.client
    }

    /// Request the bytes of `range` once, of the version `pin`.
    pub(crate) fn ask(
        &self,
        range: &Range<u64>,
        pin: Option<&Pin>,
        deadline: Deadline<'_>,
    ) -> Result<Answer> {
        self.check_online()?;
        let question = Question { range, pin, deadline };
        let before = locked(&self.found).clone();
        if let Some(found) = before {
            match self.walk(found, question) {
                // Stores answer 400 if the keys that signed a URL have expired.
                Err(fault) if matches!(fault.status(), Some(400 | 401 | 403 | 404 | 410)) => {
                    locked(&self.found).take();
                }
                answer => return answer,
            }
        }
        let sent = Instant::now();
        let home = Hop {
            url: self.home.clone(),
            is_trusted: true,
        };
        match self.walk(home.clone(), question) {
            Err(fault) if fault.refuses_identity() && self.access.forget(sent) => self.walk(home, question),
            answer => answer,
        }
    }

    /// Return the body of an answer, or `None` if it has more than `most` bytes.
    ///
    /// # Errors
    /// If the body ends too early. A body of unknown size may be truncated, which its content must show.
    pub(crate) fn body(&self, answer: Answer, most: u64, deadline: Deadline<'_>) -> Result<Option<Vec<u8>>> {
        let (mut response, expected) = (answer.response, answer.nbytes);
        if expected.is_some_and(|nbytes| nbytes > most) {
            return Ok(None);
        }
        let wanted = to_usize(expected.unwrap_or(most + 1)).unwrap_or(usize::MAX);
        let bytes = response.read_some(wanted, &mut self.pace(deadline))?;
        let found = to_u64(bytes.len());
        match expected {
            Some(expected) if found < expected => Err(FaultKind::Short(expected, found).into()),
            None if found > most => Ok(None),
            _ => {
                self.client.give_back(response);
                Ok(Some(bytes))
            }
        }
    }

    /// Send a request to the server of the file, and return the answer with the first bytes of its body. A redirect is
    /// an error, and so is every answer that refuses the request.
    pub(crate) fn exchange(&self, draft: &HttpRequest<'_>, deadline: Deadline<'_>) -> Result<(Head, String)> {
        self.exchange_up_to(ANSWER_NBYTES, draft, deadline)
    }

    /// Send a request as [`Resource::exchange`] does, and return at most `most` bytes of the body.
    pub(crate) fn exchange_up_to(
        &self,
        most: usize,
        draft: &HttpRequest<'_>,
        deadline: Deadline<'_>,
    ) -> Result<(Head, String)> {
        self.check_online()?;
        let sent = Instant::now();
        match self.exchange_once(most, draft.clone(), deadline) {
            Err(fault) if fault.refuses_identity() && self.access.forget(sent) => {
                self.exchange_once(most, draft.clone(), deadline)
            }
            answer => answer,
        }
    }

    fn exchange_once(
        &self,
        most: usize,
        mut request: HttpRequest<'_>,
        deadline: Deadline<'_>,
    ) -> Result<(Head, String)> {
        let mut exchange = || {
            let applied = self.access.apply(&mut request, &self.client.options, deadline)?;
            if applied || self.home.is_secret() {
                self.check_private(&self.home)?;
            }
            let mut response = self.client.send(&request, false, deadline)?;
            if !(200..300).contains(&response.head.status) {
                return Err(self.refusal(&mut response, deadline));
            }
            let mut pace = if request.is_slow {
                Pace::patient(deadline)
            } else {
                self.pace(deadline)
            };
            let body = response.read_some(most, &mut pace)?;
            let body = String::from_utf8_lossy(&body).into_owned();
            Ok((self.client.finish(response), body))
        };
        let outcome = exchange();
        outcome.map_err(|fault| self.about(&self.home, fault, &request.headers))
    }

    fn check_online(&self) -> Result<()> {
        if self.client.options.is_offline() {
            return Err(Fault::offline());
        }
        Ok(())
    }

    /// Check that no proxy can read the credentials of a request for `url`.
    fn check_private(&self, url: &Url) -> Result<()> {
        if self.client.is_overheard(url)? {
            return Err(Fault::option(
                "a proxy would read the credentials of a request over http://, which a query may be too: use a URL of \
                 https://, or no credentials",
            ));
        }
        Ok(())
    }

    /// Request from `start`, and follow redirects.
    fn walk(&self, start: Hop, question: Question<'_>) -> Result<Answer> {
        let mut at = start;
        let mut sent = Vec::new();
        for _ in 0..=MAX_HOPS {
            let step = self.step(&at, question, &mut sent);
            match step.map_err(|fault| self.about(&at.url, fault, &sent))? {
                ControlFlow::Continue(next) => at = next,
                ControlFlow::Break(answer) => {
                    *locked(&self.found) = (at.url != self.home).then_some(at);
                    return Ok(answer);
                }
            }
        }
        Err(FaultKind::Loop(MAX_HOPS).into())
    }

    /// Make one request, and add its headers to `sent`.
    fn step(
        &self,
        at: &Hop,
        question: Question<'_>,
        sent: &mut Vec<(String, String)>,
    ) -> Result<ControlFlow<Answer, Hop>> {
        let response = self.send(at, question, sent)?;
        let head = &response.head;
        if at.is_trusted {
            let (commit, etag) = (head.single("x-repo-commit")?, head.single("x-linked-etag")?);
            let mut linked = locked(&self.linked);
            linked.commit = commit.map(ToOwned::to_owned).or(linked.commit.take());
            linked.etag = etag.map(ToOwned::to_owned).or(linked.etag.take());
        }
        let location = match head.status {
            301 | 302 | 303 | 307 | 308 => head.single("location")?,
            _ => None,
        };
        let Some(location) = location else {
            return self
                .understand(response, &at.url, question)
                .map(ControlFlow::Break);
        };
        let next = self.next(at, location)?;
        self.drain(response, question.deadline);
        Ok(ControlFlow::Continue(next))
    }

    fn send(&self, at: &Hop, question: Question<'_>, sent: &mut Vec<(String, String)>) -> Result<Response> {
        let Question { range, pin, deadline } = question;
        let mut request = HttpRequest::new("GET", &at.url);
        request.add("Range", format!("bytes={}-{}", range.start, range.end - 1));
        // Only the server that named the version knows it.
        let pin = pin.filter(|pin| pin.is_from(&at.url));
        request.headers.extend(pin.and_then(Pin::condition));
        let mut carries_secrets = at.url.is_secret();
        if at.is_trusted {
            carries_secrets |= self.access.apply(&mut request, &self.client.options, deadline)?;
        }
        if carries_secrets {
            self.check_private(&at.url)?;
        }
        // Hosts that a server names must have public addresses.
        let is_named = at.url.origin() == self.home.origin();
        let is_public = !is_named && !self.client.options.allow_private_redirects;
        let response = self.client.send(&request, is_public, deadline);
        sent.append(&mut request.headers);
        response
    }

    /// Return the target of a redirect, if it may be followed.
    fn next(&self, at: &Hop, location: &str) -> Result<Hop> {
        let url = at.url.join(location).map_err(|_| {
            // Other locations may be anything, a part of a secret included.
            let scheme = location.split(':').next().unwrap_or_default();
            let mut known = SCHEMES.iter().chain(OTHER_SCHEMES);
            let known = known.find(|known| known.eq_ignore_ascii_case(scheme));
            let to = known.map_or("…".to_owned(), |known| format!("{known}:…"));
            FaultKind::Redirect(to, "it is not a URL of http: or https:")
        })?;
        if at.url.scheme == Scheme::Https && url.scheme == Scheme::Http {
            return Err(FaultKind::Redirect(url.to_string(), "it leads from https: to http:").into());
        }
        let is_trusted = at.is_trusted && url.origin() == self.home.origin();
        Ok(Hop { url, is_trusted })
    }

    fn understand(&self, mut response: Response, url: &Url, question: Question<'_>) -> Result<Answer> {
        let head = &response.head;
        let pin = question.pin;
        let (here, part, nbytes) = match head.status {
            206 => {
                check_encoding(head)?;
                let (range, total) = part_of(head, question.range)?;
                let here = Pin::new(head, total, url)?;
                pin.map_or(Ok(()), |pin| pin.check(&here))?;
                let nbytes = range.end - range.start;
                (here, Some(range), Some(nbytes))
            }
            200 => {
                check_encoding(head)?;
                let nbytes = head.single("content-length")?.and_then(parse_length);
                (Pin::new(head, nbytes.unwrap_or(0), url)?, None, nbytes)
            }
            412 if pin.is_some() => return Err(FaultKind::Changed(None).into()),
            416 if pin.is_some() => return Err(FaultKind::Changed(total_of(head)?).into()),
            416 if total_of(head)? == Some(0) => {
                // The file is empty. The body explains that, and is not read.
                response.framing = Framing::Close;
                (Pin::default(), None, Some(0))
            }
            _ => return Err(self.refusal(&mut response, question.deadline)),
        };
        Ok(Answer {
            response,
            pin: here,
            part,
            nbytes,
        })
    }

    /// Return the fault of a server that refuses, with the explanation in its headers or its body.
    fn refusal(&self, response: &mut Response, deadline: Deadline<'_>) -> Fault {
        let body = response.read_some(REFUSAL_NBYTES, &mut self.pace(deadline));
        let body = String::from_utf8_lossy(&body.unwrap_or_default()).into_owned();
        let headers = ["x-error-message", "x-error-code", "x-ms-error-code"];
        let said = headers.iter().find_map(|name| response.head.shown(name));
        response
            .head
            .refusal(said.as_deref().or_else(|| element(&body, "Code")))
    }

    /// Read the short body of a redirect, so that its connection can be used again.
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

    /// Add the URL to a fault unless it is the file's, and remove the secrets of the URLs and of the `sent` headers.
    fn about(&self, url: &Url, fault: Fault, sent: &[(String, String)]) -> Fault {
        let mut secrets = Secrets::default();
        self.client.add_secrets(&mut secrets, url);
        secrets.add_url(&self.home);
        secrets.add_url(url);
        secrets.add_headers(sent);
        let fault = if *url == self.home && self.is_shown {
            fault
        } else {
            fault.at(url.to_string())
        };
        fault.without(&secrets)
    }
}

/// Return the size of a file that lacks the requested range.
fn total_of(head: &Head) -> Result<Option<u64>> {
    let total = head.single("content-range")?;
    let total = total.and_then(|text| text.strip_prefix("bytes */"));
    Ok(total.and_then(parse_length))
}

/// Check that the body is not compressed: ranges of compressed bytes are not ranges of the file.
fn check_encoding(head: &Head) -> Result<()> {
    let encodings = head.list("content-encoding")?;
    let is_plain = |encoding: &&str| encoding.eq_ignore_ascii_case("identity");
    if encodings.iter().all(is_plain) {
        return Ok(());
    }
    Err(FaultKind::Encoded(Escaped(&encodings.join(", ")).to_string()).into())
}

/// Return the range of an answer, and the size of the whole file.
fn part_of(head: &Head, asked: &Range<u64>) -> Result<(Range<u64>, u64)> {
    let other = |got: &str| FaultKind::OtherRange(asked.clone(), Escaped(got).to_string());
    let is_multipart = |kind: &&str| kind.to_ascii_lowercase().starts_with("multipart/");
    if head.list("content-type")?.iter().any(is_multipart) {
        return Err(other("several parts").into());
    }
    let text = head
        .single("content-range")?
        .ok_or_else(|| other("no Content-Range"))?;
    let parse = || {
        let (unit, rest) = text.split_once(' ')?;
        let (range, total) = rest.split_once('/')?;
        let (first, last) = range.split_once('-')?;
        let (first, last, total) = (parse_length(first)?, parse_length(last)?, parse_length(total)?);
        let fits = unit.eq_ignore_ascii_case("bytes") && first <= last && last < total;
        fits.then_some((first..last + 1, total))
    };
    let is_wanted = |(range, total): &(Range<u64>, u64)| *range == (asked.start..asked.end.min(*total));
    let quoted = format!("Content-Range: {text}");
    let (range, total) = parse().filter(is_wanted).ok_or_else(|| other(&quoted))?;
    let nbytes = head.single("content-length")?.and_then(parse_length);
    match nbytes {
        Some(nbytes) if nbytes != range.end - range.start => {
            Err(other(&format!("{quoted} with {nbytes} bytes")).into())
        }
        _ => Ok((range, total)),
    }
}
