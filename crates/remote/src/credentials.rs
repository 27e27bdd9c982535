//! Credentials, and the trait for sources of them.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::time::SystemTime;

use crate::fault::{Fault, FaultKind};

/// What environment variables hold.
pub(crate) type Variable<'v> = &'v dyn Fn(&str) -> Option<String>;

/// Text that no error and no log may show.
///
/// ```
/// use ingot_remote::Secret;
///
/// let token = Secret::new("hf_1234\n"); // as a file has it
/// assert_eq!(format!("{token:?}"), "…");
/// assert_eq!(token, Secret::new("hf_1234"));
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// Keeps `text`, without the line end that a secret ends with which was read from a file, or is mounted as one.
    #[must_use]
    pub fn new(text: impl Into<String>) -> Secret {
        let mut text = text.into();
        if text.ends_with('\n') {
            text.truncate(text.len() - if text.ends_with("\r\n") { 2 } else { 1 });
        }
        Secret(text)
    }

    /// Check that the credential fits into one header line. Every credential passes this check. The error has its
    /// `source` and not its text, which is secret.
    pub(crate) fn checked(self, source: &str) -> Result<Secret, Fault> {
        if is_header_value(&self.0) {
            Ok(self)
        } else {
            Err(FaultKind::Option(format!("{source} has control characters")).into())
        }
    }

    /// Whether it is no secret at all.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.trim().is_empty()
    }

    /// Return the text, which must not be printed.
    #[must_use]
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("…")
    }
}

/// Keys that sign requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Keys {
    /// The access key ID.
    pub id: Secret,
    /// The secret access key.
    pub secret: Secret,
    /// The session token of temporary keys.
    pub session: Option<Secret>,
}

impl Keys {
    /// A key and its secret, which has to be there where the key is.
    pub(crate) fn pair(
        id: Option<Secret>,
        secret: Option<Secret>,
        source: &str,
    ) -> Result<Option<Keys>, Fault> {
        let Some(id) = id else {
            return Ok(None);
        };
        let secret = secret.ok_or_else(|| Fault::option(format!("{source} has no secret beside it")))?;
        let session = None;
        Ok(Some(Keys { id, secret, session }))
    }

    /// Those of two environment variables.
    pub(crate) fn of_variables(
        variable: Variable<'_>,
        id: &str,
        secret: &str,
    ) -> Result<Option<Keys>, Fault> {
        let source = format!("the environment with {id} and {secret}");
        Keys::pair(
            credential(variable, &[id])?,
            credential(variable, &[secret])?,
            &source,
        )
    }
}

/// The credential that the first of these variables holds that is set to something.
pub(crate) fn credential(
    variable: &dyn Fn(&str) -> Option<String>,
    names: &[&str],
) -> Result<Option<Secret>, Fault> {
    for name in names {
        if let Some(secret) = variable(name)
            .map(Secret::new)
            .filter(|secret| !secret.is_empty())
        {
            return secret.checked(name).map(Some);
        }
    }
    Ok(None)
}

/// A source of identities for stores.
///
/// [`Credentials::identity`] runs on a thread of its own, without a lock of this crate. If the caller is interrupted, or
/// its [`timeout`](crate::RemoteOptions::timeout) is over, the call continues there and its result is dropped. The
/// identity is used until five minutes before it expires, or until a store answers that it is expired or unknown (401,
/// `ExpiredToken`). Then, and in a child of a fork, the identity is requested again.
///
/// ```
/// use std::sync::Arc;
///
/// use ingot_remote::{Credential, Credentials, Identity, RemoteOptions, Secret, Wanted};
///
/// #[derive(Debug)]
/// struct Vault;
///
/// impl Credentials for Vault {
///     fn identity(&self, _: &Wanted) -> std::io::Result<Identity> {
///         Ok(Identity::new(Credential::Token(Secret::new("from the vault"))))
///     }
/// }
///
/// let mut options = RemoteOptions::default();
/// options.credentials = Some(Arc::new(Vault));
/// ```
pub trait Credentials: fmt::Debug + Send + Sync {
    /// Return the identity to use now.
    ///
    /// # Errors
    /// The reason, without a secret in it. The kind decides the class: `PermissionDenied` if a service refused,
    /// `InvalidInput` if a setting is wrong, `Unsupported` if a library is missing.
    fn identity(&self, wanted: &Wanted) -> io::Result<Identity>;
}

/// The identity that options and environment name, for [`Credentials`] that serve several.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Wanted {
    /// `http`, `hf`, `s3`, `gs` or `az`.
    pub store: &'static str,
    /// The setting that names the identity, for errors.
    pub source: String,
    /// The profile of Amazon's files.
    pub profile: Option<String>,
    /// The file of credentials of Google; `None` for the identity of the machine.
    pub credentials_file: Option<PathBuf>,
    /// The application of Azure, or the managed identity.
    pub client_id: Option<String>,
    /// The directory of the application.
    pub tenant_id: Option<String>,
    /// The secret of the application.
    pub client_secret: Option<Secret>,
    /// What else the identity depends on: the versions of files, the values of variables.
    pub(crate) state: Vec<Secret>,
}

impl Wanted {
    pub(crate) fn new(store: &'static str, source: impl Into<String>) -> Wanted {
        Wanted {
            store,
            source: source.into(),
            ..Wanted::default()
        }
    }
}

/// What requests carry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Credential {
    /// Keys that sign requests: of S3, or the HMAC keys of Google's store.
    Keys(Keys),
    /// A token that is sent as `Authorization: Bearer …`.
    Token(Secret),
    /// Nothing: everybody may read.
    Anonymous,
}

/// An identity, and where and how long it is valid.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Identity {
    /// Keys or a token, or neither.
    pub credential: Credential,
    /// The time at which the credential expires. Without one, it is used for an hour or until a store refuses it.
    pub expiry: Option<SystemTime>,
    /// The region of S3, unless the options name one.
    pub region: Option<String>,
    /// The endpoint of S3, unless the options name one.
    pub endpoint: Option<String>,
}

impl Identity {
    /// Return an identity without expiry, region and endpoint.
    #[must_use]
    pub fn new(credential: Credential) -> Identity {
        Identity {
            credential,
            expiry: None,
            region: None,
            endpoint: None,
        }
    }

    /// Check that all of it fits into a request.
    pub(crate) fn checked(self, source: &str) -> Result<Identity, Fault> {
        let what = format!("the answer of {source}");
        let check = |secret: &Secret| secret.clone().checked(&what).map(drop);
        match &self.credential {
            Credential::Anonymous => {}
            Credential::Token(token) => check(token)?,
            Credential::Keys(keys) => {
                check(&keys.id)?;
                check(&keys.secret)?;
                keys.session.as_ref().map(check).transpose()?;
            }
        }
        Ok(self)
    }
}

/// Whether a header line can hold `value`.
pub(crate) fn is_header_value(value: &str) -> bool {
    value
        .bytes()
        .all(|byte| byte == b'\t' || (byte >= 0x20 && byte != 0x7F))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_credential_is_one_line_and_a_line_end_is_none_of_it() {
        for (text, kept) in [("k\n", "k"), ("k\r\n", "k"), ("k", "k"), ("", ""), ("\n", "")] {
            assert_eq!(Secret::new(text).checked("K").unwrap().reveal(), kept);
        }
        for text in ["k\n\n", "k\r", "a\r\nX: b", "a\nb", "\nk", "\0", "\u{7f}"] {
            let fault = Secret::new(text).checked("AWS_X").unwrap_err();
            assert_eq!(fault.to_string(), "AWS_X has control characters");
        }
    }
}
