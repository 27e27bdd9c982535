//! Who we are: what a request says of that to the host that the caller has named, and to no other.

use std::time::Instant;

use crate::credentials::{Credential, Identity, Secret};
use crate::fault::Fault;
use crate::http::message::HttpRequest;
use crate::http::pace::Deadline;
use crate::http::proxy::basic;
use crate::options::RemoteOptions;
use crate::store::azure::AzureAccess;
use crate::store::credentials::source::Source;
use crate::store::s3::S3Access;
use crate::url::Url;

/// How requests show who sends them.
#[derive(Debug)]
pub(crate) enum Access {
    /// By a header, or not at all.
    Header(Option<Secret>),
    /// By a signature over the request.
    S3(S3Access),
    /// By one that is made otherwise, or by a token.
    Azure(AzureAccess),
    /// By a token of a source.
    Token(Source),
}

impl Access {
    /// `Authorization: Bearer …`, where there is a token.
    pub(crate) fn bearer(token: Option<Secret>) -> Access {
        Access::Header(token.map(|token| Secret::new(format!("Bearer {}", token.reveal()))))
    }

    /// `Authorization: Basic …`, where a URL names a user.
    pub(crate) fn basic(user: Option<&str>) -> Access {
        Access::Header(user.map(|user| Secret::new(basic(user))))
    }

    /// Forgets a token or keys that were issued by the time `sent` and then refused. Returns whether there may be others.
    pub(crate) fn forget(&self, sent: Instant) -> bool {
        match self {
            Access::Header(_) => false,
            Access::S3(access) => access.forget(sent),
            Access::Azure(access) => access.forget(sent),
            Access::Token(source) => source.forget(sent),
        }
    }

    /// Return the setting that holds the identity, and the identity if it is keys or a token.
    pub(crate) fn identity(
        &self,
        url: &Url,
        options: &RemoteOptions,
        deadline: Deadline<'_>,
    ) -> Result<Option<(String, Option<Identity>)>, Fault> {
        let source = match self {
            Access::Header(None) => None,
            Access::Header(Some(_)) => return Ok(Some(("a token or a password".to_owned(), None))),
            Access::S3(access) => access.source(),
            Access::Azure(access) => match access.source(url.is_secret()) {
                Ok(source) => Some(source),
                Err(name) => return Ok(name.map(|name| (name.to_owned(), None))),
            },
            Access::Token(source) => Some(source),
        };
        let Some(source) = source else {
            return Ok(None);
        };
        let identity = source.identity(options, deadline)?;
        let identity = identity.filter(|identity| identity.credential != Credential::Anonymous);
        Ok(identity.map(|identity| (source.name().to_owned(), Some(identity))))
    }

    /// Adds to a request what it needs to be let in; says whether any of it is secret.
    pub(crate) fn apply(
        &self,
        request: &mut HttpRequest<'_>,
        options: &RemoteOptions,
        deadline: Deadline<'_>,
    ) -> Result<bool, Fault> {
        let given = |(name, value): &(String, Secret)| (name.clone(), value.reveal().to_owned());
        request.headers.extend(options.headers.iter().map(given));
        let is_given = |name: &str| {
            options
                .headers
                .iter()
                .any(|header| header.0.eq_ignore_ascii_case(name))
        };
        let carries_secrets = match self {
            // Who gives the header himself knows why.
            Access::Header(_) | Access::Token(_) if is_given("authorization") => true,
            Access::Header(value) => {
                let header = |value: &Secret| ("Authorization".to_owned(), value.reveal().to_owned());
                request.headers.extend(value.as_ref().map(header));
                value.is_some()
            }
            Access::S3(access) => access.sign(request, options, deadline)?,
            Access::Azure(access) => access.sign(request, options, deadline)?,
            Access::Token(source) => {
                let token = source.token(options, deadline)?;
                let header =
                    |token: &Secret| ("Authorization".to_owned(), format!("Bearer {}", token.reveal()));
                request.headers.extend(token.as_ref().map(header));
                token.is_some()
            }
        };
        Ok(carries_secrets || !options.headers.is_empty())
    }
}
