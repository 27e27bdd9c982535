//! The identity of requests.

use ingot_remote::{Found, Location, RemoteOptions};

use super::session::{header_limits, in_session, refused};
use crate::error::Error;
use crate::watch::Watch;

/// Return the setting that contains the identity of requests for `url`, and the identity if it is keys or a token. `None`
/// for requests without credentials and for files of this machine.
///
/// # Errors
/// [`Failure::Open`](crate::Failure::Open), which contains a [`Fault`](ingot_remote::Fault);
/// [`Failure::Interrupted`](crate::Failure::Interrupted).
pub fn identity(url: &str, options: &RemoteOptions, watch: &dyn Watch) -> Result<Option<Found>, Error> {
    in_session(url, options, &header_limits(), watch, |session| {
        let (Location::Remote(remote) | Location::Cached(_, Some(remote))) = session.locate(url)? else {
            return Ok(None);
        };
        let identity = remote.identity(options, session.stop);
        identity.map_err(|fault| refused(&remote.shown, fault))
    })
}
