//! What was issued to this process for a while, and is good for all files that it opens.

use std::sync::Mutex;
use std::time::{Duration, SystemTime};

use crate::fault::Fault;
use crate::lock::briefly;
use crate::options::Secret;

/// What is good for less than this is asked for again: no request is sent with keys that are over when it arrives.
const LEAST_VALIDITY: Duration = Duration::from_secs(300);

/// The keys of one who may read.
#[derive(Clone, Debug)]
pub(crate) struct Credentials {
    pub(crate) id: Secret,
    pub(crate) secret: Secret,
    pub(crate) session: Option<Secret>,
}

/// What each of some issuers has issued last.
pub(crate) struct Issued<K, V> {
    rows: Mutex<Rows<K, V>>,
}

type Rows<K, V> = Vec<(K, Timed<V>)>;

/// Something that is good for a while.
#[derive(Clone, Debug)]
pub(crate) struct Timed<V> {
    pub(crate) value: V,
    pub(crate) until: SystemTime,
}

impl<K: Clone + PartialEq, V: Clone> Issued<K, V> {
    pub(crate) const fn new() -> Issued<K, V> {
        Issued {
            rows: Mutex::new(Vec::new()),
        }
    }

    /// What `issuer` has issued and is still good, or what it issues now.
    pub(crate) fn get(
        &self,
        issuer: &K,
        issue: impl FnOnce() -> Result<Timed<V>, Fault>,
    ) -> Result<V, Fault> {
        let least = SystemTime::now() + LEAST_VALIDITY;
        if let Some(rows) = briefly(&self.rows)
            && let Some((_, timed)) = rows.iter().find(|row| row.0 == *issuer)
            && timed.until > least
        {
            return Ok(timed.value.clone());
        }
        let new = issue()?;
        if let Some(mut rows) = briefly(&self.rows) {
            rows.retain(|row| row.0 != *issuer);
            rows.push((issuer.clone(), new.clone()));
        }
        Ok(new.value)
    }
}
