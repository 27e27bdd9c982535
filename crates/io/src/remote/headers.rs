//! The headers of all shards of a model, from the Hub, with one request.

use std::path::PathBuf;
use std::sync::Arc;

use ingot_format::{Limits, ShardHeaders};

use super::access::Access;
use super::client::Client;
use super::document::{all_of, hub_file};
use super::fetch::Resource;
use super::hub::{self, MODEL_FILE};
use super::options::RemoteOptions;
use super::retry::Tries;
use super::secrets::redacted;
use super::session::variable;
use super::url::Url;
use crate::error::Error;
use crate::stop::StopFlag;
use crate::watch::Watch;
use crate::workers::watched;

/// Asks the Hub for the headers of all shards of a model in one document. `None` where it gives none that can be used,
/// for whatever reason: the files themselves will tell what is wrong, or do.
///
/// The Hub has such documents of indexes of models, as they are on the main branch. `url` names such an index, or a
/// repository, which stands for its index where it has no file that holds all of the model.
///
/// # Errors
/// [`Error::Interrupted`].
pub fn hub_headers(
    url: &str,
    options: &RemoteOptions,
    limits: &Limits,
    watch: &dyn Watch,
) -> Result<Option<ShardHeaders>, Error> {
    let fetching = |stop: StopFlag<'_>| fetch(url, options, limits, stop);
    let fetched = watched(true, fetching, watch);
    fetched.map_err(|failure| failure.about(Some(&PathBuf::from(redacted(url))), None))
}

fn fetch(url: &str, options: &RemoteOptions, limits: &Limits, stop: StopFlag<'_>) -> Option<ShardHeaders> {
    let file = hub_file(url, &variable)?.ok()?;
    let home = file.headers_url(options, &variable)?.ok()?;
    options.check().ok()?;
    if hub::is_offline(&variable) {
        return None;
    }
    // Whoever is not answered has another way, and does not wait for this one.
    let options = RemoteOptions {
        retries: 0,
        ..options.clone()
    };
    let access = Arc::new(Access::bearer(hub::token(&options, &variable).ok()?));
    let client = Arc::new(Client::new(options, &variable));
    let resource = |home: Url| Resource::new(Arc::clone(&client), home, Arc::clone(&access), false);
    let document = all_of(&resource(home), ShardHeaders::NBYTES, stop).ok()?;
    if file.is_folder() {
        let model = file.beside(MODEL_FILE).url(&client.options, &variable).ok()?;
        if !is_missing(&resource(model), stop) {
            return None;
        }
    }
    ShardHeaders::parse(&document, limits)
}

/// Whether the server says that there is no such file.
fn is_missing(resource: &Resource, stop: StopFlag<'_>) -> bool {
    let deadline = Tries::new(&resource.client().options, stop).deadline;
    let answer = resource.ask(&(0..1), None, deadline);
    answer.is_err_and(|fault| fault.status() == Some(404))
}
