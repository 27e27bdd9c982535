//! Sources of identities: constant ones, and issuers, whose identities expire.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use super::issued::Identities;
use super::issuer::{Issuer, Provider, Way};
use crate::credentials::{Credential, Credentials, Identity, Wanted};
use crate::fault::{Fault, FaultKind, Result};
use crate::http::pace::Deadline;
use crate::options::RemoteOptions;

static IDENTITIES: Identities = Identities::new();

/// A source of identities.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// The setting that contains the credential, and the credential.
    Known(String, Credential),
    Issued(Box<Issuer>),
}

impl Source {
    pub(crate) fn known(setting: &str, credential: Credential) -> Source {
        Source::Known(setting.to_owned(), credential)
    }

    pub(super) fn issued(name: String, way: Way) -> Source {
        Source::Issued(Box::new(Issuer { name, way }))
    }

    fn provider(provider: &Arc<dyn Credentials>, wanted: Wanted) -> Source {
        let provider = Provider(Arc::clone(provider));
        Source::issued(wanted.source.clone(), Way::Provider(provider, wanted))
    }

    /// Return the name for errors.
    pub(crate) fn name(&self) -> &str {
        match self {
            Source::Known(name, _) => name,
            Source::Issued(issuer) => &issuer.name,
        }
    }

    pub(crate) fn is_provider(&self) -> bool {
        matches!(self, Source::Issued(issuer) if matches!(issuer.way, Way::Provider(..)))
    }

    /// Return an identity that is valid for some minutes at least, an earlier one or a new one. `None` if the machine has
    /// no identity.
    pub(crate) fn identity(
        &self,
        options: &RemoteOptions,
        deadline: Deadline<'_>,
    ) -> Result<Option<Identity>> {
        match self {
            Source::Known(_, credential) => Ok(Some(Identity::new(credential.clone()))),
            Source::Issued(issuer) => IDENTITIES.get(issuer, deadline, || issuer.issue(options, deadline)),
        }
    }

    /// Return the credential of [`Source::identity`].
    pub(crate) fn credential(&self, options: &RemoteOptions, deadline: Deadline<'_>) -> Result<Credential> {
        let identity = self.identity(options, deadline)?;
        Ok(identity.map_or(Credential::Anonymous, |identity| identity.credential))
    }

    /// Forget the identity that was issued by the time `sent` and then refused. Returns whether there may be another.
    pub(crate) fn forget(&self, sent: Instant) -> bool {
        match self {
            Source::Known(..) => false,
            Source::Issued(issuer) => IDENTITIES.forget(issuer, sent),
        }
    }
}

/// Return the source of the caller's provider, if there is one.
pub(crate) fn given(options: &RemoteOptions, store: &'static str) -> Option<Source> {
    let wanted = Wanted::new(store, "the provider in `credentials`");
    Some(Source::provider(options.credentials.as_ref()?, wanted))
}

/// Return the source of an identity that the vendors' SDKs find.
pub(super) fn delegated(options: &RemoteOptions, wanted: Wanted) -> Result<Source> {
    let Some(sdks) = &options.sdks else {
        let why = "ingot for Rust does not read it: set `RemoteOptions::credentials`, or export keys with `ingot \
                   credentials --process`";
        let error = io::Error::new(io::ErrorKind::Unsupported, why);
        return Err(Fault::new(FaultKind::Provider(error)).of_credentials(&wanted.source));
    };
    Ok(Source::provider(sdks, wanted))
}
