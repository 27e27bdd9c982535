//! Identities that were issued to this process.

use std::process;
use std::sync::Mutex;
use std::time::{Duration, Instant, SystemTime};

use ingot_format::briefly;

use super::issuer::Issuer;
use crate::credentials::Identity;
use crate::fault::{Fault, FaultKind, Result};
use crate::http::pace::{Deadline, sleep};

/// Identities that expire sooner are requested again, so that none expires on its way to a store.
const LEAST_VALIDITY: Duration = Duration::from_secs(300);

/// The interval at which a thread checks whether another thread received the identity.
const LOOK: Duration = Duration::from_millis(10);

/// The validity of an identity without expiry, and of the answer of a machine that it has no identity.
const USUAL_VALIDITY: Duration = Duration::from_secs(3600);

/// The last identity of each issuer, for all files that this process opens.
pub(super) struct Identities {
    rows: Mutex<Vec<Row>>,
    /// The requests in progress, by process: a child of a fork has a copy of the requests of its parent.
    requests: Mutex<Vec<(u32, Issuer)>>,
}

struct Row {
    /// The process that requested the identity: a child of a fork requests its own.
    process: u32,
    issuer: Issuer,
    /// `None` if the issuer has none for this process.
    identity: Option<Identity>,
    until: SystemTime,
    at: Instant,
}

impl Row {
    fn is_of(&self, issuer: &Issuer) -> bool {
        self.issuer == *issuer && self.process == process::id()
    }
}

impl Identities {
    pub(super) const fn new() -> Identities {
        Identities {
            rows: Mutex::new(Vec::new()),
            requests: Mutex::new(Vec::new()),
        }
    }

    /// Return the valid identity that `issuer` issued before, or request a new one. If another thread requests it
    /// already, wait for that thread until `deadline`.
    pub(super) fn get(
        &self,
        issuer: &Issuer,
        deadline: Deadline<'_>,
        issue: impl FnOnce() -> Result<Option<Identity>>,
    ) -> Result<Option<Identity>> {
        if let Some(identity) = self.valid(issuer) {
            return Ok(identity);
        }
        // The threads of a load need a new identity at the same time, and one requests it. If it fails, each of the
        // others makes its own request.
        let request = Request::begin(self, issuer);
        let begun = Instant::now();
        while request.is_none() && self.is_requested(issuer) {
            if deadline.left()?.is_zero() {
                let what = "another thread's request for credentials did not end";
                let fault = FaultKind::Slow(what, begun.elapsed());
                return Err(Fault::new(fault).of_credentials(&issuer.name));
            }
            sleep(LOOK, deadline.stop)?;
        }
        // Also with a request: another one may have ended between the first check and its start.
        if let Some(identity) = self.valid(issuer) {
            return Ok(identity);
        }
        let identity = issue().map_err(|fault| fault.of_credentials(&issuer.name))?;
        let expiry = identity.as_ref().and_then(|identity| identity.expiry);
        self.keep(Row {
            process: process::id(),
            issuer: issuer.clone(),
            identity: identity.clone(),
            until: expiry.unwrap_or_else(|| SystemTime::now() + USUAL_VALIDITY),
            at: Instant::now(),
        });
        Ok(identity)
    }

    fn keep(&self, row: Row) {
        let replaced = briefly(&self.rows).map(|mut rows| {
            let is_replaced = |old: &mut Row| old.issuer == row.issuer || old.issuer.is_unused();
            let replaced: Vec<Row> = rows.extract_if(.., is_replaced).collect();
            rows.push(row);
            replaced
        });
        // Without the lock: a provider may run code when it is dropped.
        drop(replaced);
    }

    /// Forget the identity that `issuer` had issued by the time `sent`, because a store refused a request of that time.
    /// Returns whether another request may have another identity, which another thread may have received by now.
    pub(super) fn forget(&self, issuer: &Issuer, sent: Instant) -> bool {
        let Some(mut rows) = briefly(&self.rows) else {
            return false;
        };
        let Some(at) = rows.iter().position(|row| row.is_of(issuer)) else {
            return true;
        };
        let has_identity = rows[at].identity.is_some();
        if has_identity && rows[at].at <= sent {
            rows.swap_remove(at);
        }
        has_identity
    }

    fn valid(&self, issuer: &Issuer) -> Option<Option<Identity>> {
        let rows = briefly(&self.rows)?;
        let row = rows.iter().find(|row| row.is_of(issuer))?;
        (row.until > SystemTime::now() + LEAST_VALIDITY).then(|| row.identity.clone())
    }

    fn is_requested(&self, issuer: &Issuer) -> bool {
        let requests = briefly(&self.requests);
        let is_it = |request: &(u32, Issuer)| request.0 == process::id() && request.1 == *issuer;
        requests.is_some_and(|requests| requests.iter().any(is_it))
    }
}

/// A request in progress, until it is dropped.
struct Request<'i> {
    identities: &'i Identities,
    issuer: &'i Issuer,
}

impl<'i> Request<'i> {
    /// Start a request; `None` if another thread makes it already.
    fn begin(identities: &'i Identities, issuer: &'i Issuer) -> Option<Request<'i>> {
        let row = (process::id(), issuer.clone());
        let mut requests = briefly(&identities.requests)?;
        let is_first = !requests.contains(&row);
        is_first.then(|| {
            requests.push(row);
            Request { identities, issuer }
        })
    }
}

impl Drop for Request<'_> {
    fn drop(&mut self) {
        if let Some(mut requests) = briefly(&self.identities.requests) {
            requests.retain(|request| request.0 != process::id() || request.1 != *self.issuer);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread;

    use ingot_format::StopFlag;

    use super::*;
    use crate::credentials::{Credential, Secret};
    use crate::store::credentials::issuer::Way;
    use crate::url::Url;

    fn later() -> Deadline<'static> {
        Deadline::within(Duration::from_secs(60), StopFlag::never())
    }

    fn issuer() -> Issuer {
        Issuer {
            name: "it".to_owned(),
            way: Way::Instance(Url::parse("http://h").unwrap()),
        }
    }

    fn token(text: impl ToString) -> Option<Identity> {
        Some(Identity::new(Credential::Token(Secret::new(text.to_string()))))
    }

    #[test]
    fn one_thread_requests_for_all_and_each_for_itself_after_a_failure() {
        let requests = AtomicUsize::new(0);
        let run = |identities: &Identities, fails: bool| {
            let one = || {
                let issue = || {
                    requests.fetch_add(1, Ordering::Relaxed);
                    thread::sleep(Duration::from_millis(50));
                    if fails {
                        Err(Fault::option("no"))
                    } else {
                        Ok(token(7))
                    }
                };
                identities.get(&issuer(), later(), issue).ok()
            };
            thread::scope(|scope| {
                let threads: Vec<_> = (0..8).map(|_| scope.spawn(one)).collect();
                let results = threads.into_iter().map(|thread| thread.join().unwrap());
                results.collect::<Vec<_>>()
            })
        };
        let identities = Identities::new();
        assert_eq!(run(&identities, true), vec![None; 8]);
        assert_eq!(requests.swap(0, Ordering::Relaxed), 8);
        assert_eq!(run(&identities, false), vec![Some(token(7)); 8]);
        assert_eq!(requests.swap(0, Ordering::Relaxed), 1);
        // A child of a fork does not wait for a request of its parent.
        identities.rows.lock().unwrap().clear();
        identities
            .requests
            .lock()
            .unwrap()
            .push((process::id() + 1, issuer()));
        assert_eq!(run(&identities, false), vec![Some(token(7)); 8]);
    }

    #[test]
    fn a_refused_identity_is_replaced_once() {
        let identities = Identities::new();
        let next = AtomicUsize::new(0);
        let get = || {
            let issue = || Ok(token(next.fetch_add(1, Ordering::Relaxed)));
            identities.get(&issuer(), later(), issue).unwrap()
        };
        assert_eq!(get(), token(0));
        let sent = Instant::now();
        assert!(identities.forget(&issuer(), sent));
        assert_eq!(get(), token(1));
        // Of two requests with the old identity, the second finds the new one.
        assert!(identities.forget(&issuer(), sent));
        assert_eq!(get(), token(1));
        assert!(identities.forget(&issuer(), Instant::now()));
        assert_eq!(get(), token(2));
    }

    #[test]
    fn a_waiting_thread_keeps_its_own_deadline() {
        let identities = Identities::new();
        identities
            .requests
            .lock()
            .unwrap()
            .push((process::id(), issuer()));
        let soon = Deadline::within(Duration::from_millis(50), StopFlag::never());
        let issue = || panic!("another thread requests it");
        let fault = identities.get(&issuer(), soon, issue).unwrap_err();
        assert_eq!(fault.code(), "no-credentials");
        assert!(fault.to_string().contains("another thread's request"), "{fault}");
    }
}
