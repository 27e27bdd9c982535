//! The identity of requests.

use ingot_remote::{Identity, Location, RemoteOptions};

use super::session::{header_limits, in_session, refused};
use crate::error::Error;
use crate::watch::Watch;

/// Return the setting that holds the identity of requests for `url`, and the identity if it is keys or a token. `None` for
/// requests without credentials and for files of this machine.
///
/// # Errors
/// [`Error::Open`] with a [`Fault`](ingot_remote::Fault) inside; [`Error::Interrupted`].
pub fn identity(
    url: &str,
    options: &RemoteOptions,
    watch: &dyn Watch,
) -> Result<Option<(String, Option<Identity>)>, Error> {
    in_session(url, options, &header_limits(), watch, |session| {
        let remote = match session.locate(url)? {
            Location::Cached(_, remote) => remote,
            Location::Remote(remote) => Some(remote),
        };
        let found = remote.map(|remote| {
            remote
                .identity(options, session.stop)
                .map_err(|fault| refused(&remote.shown, fault))
        });
        Ok(found.transpose()?.flatten())
    })
}
