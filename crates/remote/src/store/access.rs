//! The credentials of requests for a file, which are sent to the host of its URL only.

use std::time::Instant;

use jiff::Timestamp;
use ring::hmac;

use super::credentials::source::Source;
use super::{shared_key, sigv4};
use crate::credentials::{Credential, Found, Secret};
use crate::fault::{Fault, Result};
use crate::http::message::HttpRequest;
use crate::http::pace::Deadline;
use crate::http::proxy::basic;
use crate::options::RemoteOptions;
use crate::url::Url;

/// The version of Azure's service. Versions before 2017 know no tokens.
const AZURE_VERSION: &str = "2021-12-02";

/// The source of the credential of requests, and the form in which requests carry it.
#[derive(Debug)]
pub(crate) struct Access {
    /// `None` for requests without credentials.
    source: Option<Source>,
    auth: Auth,
}

/// The form in which requests carry a credential.
#[derive(Debug)]
pub(crate) enum Auth {
    /// `Authorization: Bearer …` with the token of the source.
    Bearer,
    /// This value of `Authorization`, from the user of a URL.
    Basic(Secret),
    /// A signature with the keys of the source.
    S3 { region: String, is_payer: bool },
    /// The token of the source, a signature with the key of the account, or neither.
    Azure { account: String, key: Option<hmac::Key> },
}

impl Access {
    pub(crate) fn new(source: Option<Source>, auth: Auth) -> Access {
        Access { source, auth }
    }

    /// Return the access of a source with a token, or of the user of a URL.
    pub(crate) fn http(source: Option<Source>, url: &Url) -> Access {
        match &url.user {
            Some(user) if source.is_none() => Access::new(None, Auth::Basic(Secret::new(basic(user)))),
            _ => Access::new(source, Auth::Bearer),
        }
    }

    /// Forget an identity that was issued by the time `sent` and then refused. Returns whether there may be another.
    pub(crate) fn forget(&self, sent: Instant) -> bool {
        self.source.as_ref().is_some_and(|source| source.forget(sent))
    }

    /// Return the setting that holds the identity, and the identity if it is keys or a token.
    pub(crate) fn identity(
        &self,
        url: &Url,
        options: &RemoteOptions,
        deadline: Deadline<'_>,
    ) -> Result<Option<Found>> {
        if let Some(source) = &self.source {
            let identity = source.identity(options, deadline)?;
            let identity = identity.filter(|identity| identity.credential != Credential::Anonymous);
            return Ok(identity.map(|identity| (source.name().to_owned(), Some(identity))));
        }
        let setting = match &self.auth {
            Auth::Basic(_) => "the user of the URL",
            Auth::Azure { key: Some(_), .. } => "the key of the account",
            Auth::Azure { key: None, .. } if url.is_secret() => "a signed query",
            _ => return Ok(None),
        };
        Ok(Some((setting.to_owned(), None)))
    }

    /// Add the headers of the options and the credential to a request. Returns whether any of them is secret.
    pub(crate) fn apply(
        &self,
        request: &mut HttpRequest<'_>,
        options: &RemoteOptions,
        deadline: Deadline<'_>,
    ) -> Result<bool> {
        for (name, value) in &options.headers {
            request.add(name, value.reveal());
        }
        let is_given = |name: &str| {
            options
                .headers
                .iter()
                .any(|header| header.0.eq_ignore_ascii_case(name))
        };
        // The caller's own header replaces the credential.
        if matches!(self.auth, Auth::Bearer | Auth::Basic(_)) && is_given("authorization") {
            return Ok(true);
        }
        let credential = match &self.source {
            Some(source) => source.credential(options, deadline)?,
            None => Credential::Anonymous,
        };
        Ok(self.add(request, &credential)? || !options.headers.is_empty())
    }

    fn add(&self, request: &mut HttpRequest<'_>, credential: &Credential) -> Result<bool> {
        match &self.auth {
            Auth::S3 { is_payer: true, .. } => request.add("x-amz-request-payer", "requester"),
            Auth::Azure { .. } => request.add("x-ms-version", AZURE_VERSION),
            _ => {}
        }
        match (&self.auth, credential) {
            (Auth::Basic(value), _) => {
                request.add("Authorization", value.reveal());
                Ok(true)
            }
            (Auth::S3 { region, .. }, Credential::Keys(keys)) => {
                sigv4::sign(request, keys, region, Timestamp::now());
                // The signature is valid for this request and a few minutes. The session token is valid for longer.
                Ok(keys.session.is_some())
            }
            (
                Auth::Azure {
                    account,
                    key: Some(key),
                },
                Credential::Anonymous,
            ) => {
                shared_key::sign(request, account, key);
                Ok(false)
            }
            (_, Credential::Anonymous) => Ok(false),
            (Auth::S3 { .. }, Credential::Token(_)) => Err(self.mismatch("keys", "a token")),
            (_, Credential::Keys(_)) => Err(self.mismatch("a token", "keys")),
            (_, Credential::Token(token)) => {
                request.add("Authorization", format!("Bearer {}", token.reveal()));
                Ok(true)
            }
        }
    }

    fn mismatch(&self, expected: &str, found: &str) -> Fault {
        let name = self.source.as_ref().map_or("", Source::name);
        Fault::option(format!("expected {expected}, found {found}")).of_credentials(name)
    }
}
