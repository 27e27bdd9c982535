//! Short files that are read whole.

use std::sync::Arc;

use crate::access::Access;
use crate::fault::Fault;
use crate::fetch::{Answer, Resource};
use crate::http::client::Client;
use crate::http::pace::Deadline;
use crate::http::retry::Tries;
use crate::options::{RemoteOptions, environment};
use crate::place::hub_file;
use crate::store::hub::{self, MODEL_FILE};
use crate::url::Url;
use ingot_format::StopFlag;

impl Resource {
    /// All that is there, if it has at most `most` bytes.
    ///
    /// # Errors
    /// [`Fault`].
    pub fn document(&self, most: u64, stop: StopFlag<'_>) -> Result<Vec<u8>, Fault> {
        let mut tries = Tries::new(&self.client().options, stop);
        loop {
            match attempt(self, most, tries.deadline) {
                Ok(bytes) => return Ok(bytes),
                Err(fault) => tries.after(fault)?,
            }
        }
    }
}

fn attempt(resource: &Resource, most: u64, deadline: Deadline<'_>) -> Result<Vec<u8>, Fault> {
    let (response, expected) = match resource.ask(&(0..most), None, deadline)? {
        Answer::Nothing => return Ok(Vec::new()),
        Answer::Part { pin, .. } if pin.nbytes > most => return Err(Fault::too_large(most)),
        Answer::Part { response, range, .. } => (response, Some(range.end)),
        Answer::Whole { response, nbytes, .. } => (response, nbytes),
    };
    let bytes = resource.body(response, expected, most, deadline)?;
    bytes.ok_or_else(|| Fault::too_large(most))
}

/// The document in which the Hub has the headers of all shards of a model, if it has at most `most` bytes. `None` where
/// it gives none that can be used, for whatever reason.
#[must_use]
pub fn shard_headers(url: &str, options: &RemoteOptions, most: u64, stop: StopFlag<'_>) -> Option<Vec<u8>> {
    let file = hub_file(url, &environment)?.ok()?;
    let home = file.headers_url(options, &environment)?.ok()?;
    options.check().ok()?;
    if hub::is_offline(&environment) {
        return None;
    }
    // Whoever is not answered has another way, and does not wait for this one.
    let options = RemoteOptions {
        retries: 0,
        ..options.clone()
    };
    let access = Arc::new(Access::bearer(hub::token(&options, &environment).ok()?));
    let client = Arc::new(Client::new(options));
    let resource = |home: Url| Resource::at(Arc::clone(&client), home, Arc::clone(&access), false);
    let document = resource(home).document(most, stop).ok()?;
    if file.is_folder() {
        let model = file.beside(MODEL_FILE).url(&client.options, &environment).ok()?;
        if !is_missing(&resource(model), stop) {
            return None;
        }
    }
    Some(document)
}

/// Whether the server says that there is no such file.
fn is_missing(resource: &Resource, stop: StopFlag<'_>) -> bool {
    let deadline = Tries::new(&resource.client().options, stop).deadline;
    let answer = resource.ask(&(0..1), None, deadline);
    answer.is_err_and(|fault| fault.status() == Some(404))
}
