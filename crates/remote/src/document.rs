//! Short files that are read whole.

use std::sync::Arc;

use ingot_format::StopFlag;

use crate::environment::PROCESS;
use crate::fault::{Fault, Result};
use crate::fetch::Resource;
use crate::http::client::Client;
use crate::http::pace::Deadline;
use crate::http::retry::Tries;
use crate::options::RemoteOptions;
use crate::place::hub_file;
use crate::store::Access;
use crate::store::hub::{self, MODEL_FILE};
use crate::url::Url;

impl Resource {
    /// Return the whole file, if it has at most `most` bytes.
    ///
    /// # Errors
    /// [`Fault`].
    pub fn document(&self, most: u64, stop: StopFlag<'_>) -> Result<Vec<u8>> {
        let attempt = |deadline: Deadline<'_>| {
            let answer = self.ask(&(0..most), None, deadline)?;
            if answer.part.is_some() && answer.pin.nbytes > most {
                return Err(Fault::too_large(most));
            }
            let bytes = self.body(answer, most, deadline)?;
            bytes.ok_or_else(|| Fault::too_large(most))
        };
        Tries::new(&self.client().options, stop).run(attempt)
    }
}

/// Return the Hub's document with the headers of all shards of a model, if it has at most `most` bytes. `None` if the Hub
/// has none, for any reason.
#[must_use]
pub fn shard_headers(url: &str, options: &RemoteOptions, most: u64, stop: StopFlag<'_>) -> Option<Vec<u8>> {
    let file = hub_file(url)?.ok()?;
    let home = file.headers_url(options, PROCESS)?.ok()?;
    options.check().ok()?;
    if hub::is_offline(PROCESS) || options.is_offline() {
        return None;
    }
    // Without retries, since callers can read the headers from the shards.
    let options = RemoteOptions {
        retries: 0,
        ..options.clone()
    };
    let access = Arc::new(Access::http(hub::token(&options, PROCESS).ok()?, &home));
    let client = Arc::new(Client::new(options));
    let resource = |home: Url| Resource::at(Arc::clone(&client), home, Arc::clone(&access), false);
    let document = resource(home).document(most, stop).ok()?;
    if file.is_folder() {
        // The folder means its index only if it has no file with the whole model.
        let model = file.beside(MODEL_FILE).url(&client.options, PROCESS).ok()?;
        let deadline = Deadline::within(client.options.timeout, stop);
        let answer = resource(model).ask(&(0..1), None, deadline);
        answer.err().filter(|fault| fault.status() == Some(404))?;
    }
    Some(document)
}
