//! What was issued to this process for a while.

use std::process;
use std::sync::Mutex;
use std::time::{Duration, Instant, SystemTime};

use crate::fault::{Fault, FaultKind};
use crate::http::pace::{Deadline, sleep};
use ingot_format::briefly;

/// What is good for less than this is asked for again: no request is sent with keys that are over when it arrives.
const LEAST_VALIDITY: Duration = Duration::from_secs(300);

/// How often it is looked whether another thread has been issued something.
const LOOK: Duration = Duration::from_millis(10);

/// How long a machine is taken for one without an identity that has said so.
const NOBODY_VALIDITY: Duration = Duration::from_secs(3600);

/// A source that issues identities.
pub(super) trait Issuing: Clone + PartialEq {
    /// Whether only this table still refers to it.
    fn is_unused(&self) -> bool {
        false
    }
}

/// What each of some sources has issued last. It is good for all files that this process opens.
pub(super) struct Issued<K: PartialEq, V> {
    rows: Mutex<Vec<Row<K, V>>>,
    /// The sources that are being asked, and by which process: a forked one has a copy of what its parent was about.
    asked: Mutex<Vec<(u32, K)>>,
}

/// What a source has issued, and when.
struct Row<K, V> {
    /// The process that it was issued to: a child of a fork requests its own.
    process: u32,
    source: K,
    timed: Timed<V>,
    at: Instant,
}

/// Something that is good for a while. None: the source has nothing for this caller.
#[derive(Clone, Debug)]
pub(super) struct Timed<V> {
    pub(super) value: Option<V>,
    pub(super) until: SystemTime,
}

impl<V> Timed<V> {
    /// What a machine without an identity has.
    pub(super) fn nothing() -> Timed<V> {
        Timed {
            value: None,
            until: SystemTime::now() + NOBODY_VALIDITY,
        }
    }
}

impl<K: Issuing, V: Clone> Issued<K, V> {
    pub(super) const fn new() -> Issued<K, V> {
        Issued {
            rows: Mutex::new(Vec::new()),
            asked: Mutex::new(Vec::new()),
        }
    }

    /// Return the valid identity that `source` issued before, or request a new one. Faults name the source `name`. If
    /// another thread requests it already, wait for that thread until `deadline`.
    pub(super) fn get(
        &self,
        source: &K,
        name: &str,
        deadline: Deadline<'_>,
        issue: impl FnOnce() -> Result<Timed<V>, Fault>,
    ) -> Result<Option<V>, Fault> {
        if let Some(value) = self.good(source) {
            return Ok(value);
        }
        // The threads of a load need new keys at the same moment: one asks. Where that fails, each finds out by itself.
        let turn = Turn::begin(self, source);
        let begun = Instant::now();
        while turn.is_none() && self.is_asked(source) {
            if deadline.left()?.is_zero() {
                let what = "another thread's request for credentials did not end";
                let after = begun.elapsed();
                return Err(Fault::new(FaultKind::Slow { what, after }).of_credentials(name));
            }
            sleep(LOOK, deadline.stop)?;
        }
        // Also with a turn: since the first look another one may have begun and ended.
        if let Some(value) = self.good(source) {
            return Ok(value);
        }
        let new = issue().map_err(|fault| fault.of_credentials(name))?;
        let row = Row {
            process: process::id(),
            source: source.clone(),
            timed: new.clone(),
            at: Instant::now(),
        };
        let replaced = |row: &mut Row<K, V>| row.source == *source || row.source.is_unused();
        let rows = briefly(&self.rows).map(|mut rows| {
            let old: Vec<_> = rows.extract_if(.., replaced).collect();
            rows.push(row);
            old
        });
        // Without the lock: a provider may run code when it is dropped.
        drop(rows);
        Ok(new.value)
    }

    /// Forgets what `source` had issued by the time `sent`, since a request that was sent then was refused. Returns whether
    /// another request may have another identity, which another thread may have been issued by now.
    pub(super) fn forget(&self, source: &K, sent: Instant) -> bool {
        let Some(mut rows) = briefly(&self.rows) else {
            return false;
        };
        let Some(at) = rows
            .iter()
            .position(|row| row.source == *source && row.process == process::id())
        else {
            return true;
        };
        let has_value = rows[at].timed.value.is_some();
        if has_value && rows[at].at <= sent {
            rows.swap_remove(at);
        }
        has_value
    }

    fn good(&self, source: &K) -> Option<Option<V>> {
        let rows = briefly(&self.rows)?;
        let mut rows = rows.iter();
        let row = rows.find(|row| row.source == *source && row.process == process::id())?;
        let timed = &row.timed;
        (timed.until > SystemTime::now() + LEAST_VALIDITY).then(|| timed.value.clone())
    }

    fn is_asked(&self, source: &K) -> bool {
        let asked = briefly(&self.asked);
        asked.is_some_and(|asked| asked.iter().any(|row| row.0 == process::id() && row.1 == *source))
    }
}

/// While it lives, a source is being asked.
struct Turn<'i, K: PartialEq, V> {
    issued: &'i Issued<K, V>,
    source: &'i K,
}

impl<'i, K: Clone + PartialEq, V> Turn<'i, K, V> {
    /// None: another thread asks it already.
    fn begin(issued: &'i Issued<K, V>, source: &'i K) -> Option<Turn<'i, K, V>> {
        let row = (process::id(), source.clone());
        let mut asked = briefly(&issued.asked)?;
        let is_first = !asked.contains(&row);
        is_first.then(|| {
            asked.push(row);
            Turn { issued, source }
        })
    }
}

impl<K: PartialEq, V> Drop for Turn<'_, K, V> {
    fn drop(&mut self) {
        if let Some(mut asked) = briefly(&self.issued.asked) {
            asked.retain(|row| row.0 != process::id() || row.1 != *self.source);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use ingot_format::StopFlag;

    fn later() -> Deadline<'static> {
        Deadline::within(Duration::from_secs(60), StopFlag::never())
    }

    #[test]
    fn one_thread_asks_for_all_and_each_by_itself_where_it_fails() {
        let asked = AtomicUsize::new(0);
        let run = |issued: &Issued<u8, u8>, fails: bool| {
            let one = || {
                let issue = || {
                    asked.fetch_add(1, Ordering::Relaxed);
                    std::thread::sleep(Duration::from_millis(50));
                    let until = SystemTime::now() + NOBODY_VALIDITY;
                    (!fails)
                        .then_some(Timed {
                            value: Some(7),
                            until,
                        })
                        .ok_or_else(|| Fault::option("no"))
                };
                issued.get(&1, "it", later(), issue).ok()
            };
            std::thread::scope(|scope| {
                let threads: Vec<_> = (0..8).map(|_| scope.spawn(one)).collect();
                threads
                    .into_iter()
                    .map(|thread| thread.join().unwrap())
                    .collect::<Vec<_>>()
            })
        };
        let issued = Issued::new();
        assert_eq!(run(&issued, true), [None; 8]);
        assert_eq!(asked.swap(0, Ordering::Relaxed), 8);
        assert_eq!(run(&issued, false), [Some(Some(7)); 8]);
        assert_eq!(asked.swap(0, Ordering::Relaxed), 1);
        // A process that was forked while another thread asked waits for nobody.
        issued.rows.lock().unwrap().clear();
        issued.asked.lock().unwrap().push((process::id() + 1, 1));
        assert_eq!(run(&issued, false), [Some(Some(7)); 8]);
    }

    #[test]
    fn a_refused_value_is_issued_again_unless_that_has_happened_already() {
        let issued = Issued::new();
        let next = AtomicUsize::new(0);
        let get = || {
            let until = SystemTime::now() + NOBODY_VALIDITY;
            let value = Some(next.fetch_add(1, Ordering::Relaxed));
            let issue = || Ok(Timed { value, until });
            issued.get(&1, "it", later(), issue).unwrap()
        };
        assert_eq!(get(), Some(0));
        let sent = Instant::now();
        assert!(issued.forget(&1, sent));
        let new = get();
        assert_ne!(new, Some(0));
        // Of two requests that were sent with the old value, the second finds the new one.
        assert!(issued.forget(&1, sent));
        assert_eq!(get(), new);
        assert!(issued.forget(&1, Instant::now()));
        assert_ne!(get(), new);
    }

    #[test]
    fn a_thread_that_waits_for_another_keeps_its_own_deadline() {
        let issued = Issued::<u8, u8>::new();
        issued.asked.lock().unwrap().push((process::id(), 1));
        let soon = Deadline::within(Duration::from_millis(50), StopFlag::never());
        let fault = issued
            .get(&1, "it", soon, || panic!("it is being asked"))
            .unwrap_err();
        assert_eq!(fault.code(), "no-credentials");
        assert!(fault.to_string().contains("another thread's request"), "{fault}");
    }

    impl Issuing for u8 {}
    impl Issuing for Overtaken {}

    static ISSUED: Issued<Overtaken, u8> = Issued::new();

    /// A source that another caller asks, once where it is true, between the first look of the one that has it and its turn.
    struct Overtaken(Cell<bool>);

    impl PartialEq for Overtaken {
        fn eq(&self, _: &Overtaken) -> bool {
            true
        }
    }

    impl Clone for Overtaken {
        fn clone(&self) -> Overtaken {
            if self.0.take() {
                assert_eq!(asked_as(false, 1), Some(1));
            }
            Overtaken(Cell::new(false))
        }
    }

    fn asked_as(is_overtaken: bool, issued: u8) -> Option<u8> {
        let source = Overtaken(Cell::new(is_overtaken));
        let new = Timed {
            value: Some(issued),
            until: SystemTime::now() + NOBODY_VALIDITY,
        };
        ISSUED.get(&source, "it", later(), || Ok(new)).unwrap()
    }

    #[test]
    fn what_was_issued_between_the_first_look_and_the_turn_is_taken() {
        assert_eq!(asked_as(true, 2), Some(1));
    }
}
