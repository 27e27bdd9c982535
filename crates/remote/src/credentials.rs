//! Credentials, and the trait for sources of them.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::time::SystemTime;

use crate::fault::{Fault, Result};

/// Text that no error and no log may show.
///
/// ```
/// use ingot_remote::Secret;
///
/// let token = Secret::new("hf_1234\n"); // as read from a file
/// assert_eq!(format!("{token:?}"), "…");
/// assert_eq!(token, Secret::new("hf_1234"));
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// Return a secret without the line end that files and mounted secrets add to it.
    #[must_use]
    pub fn new(text: impl Into<String>) -> Secret {
        let mut text = text.into();
        if text.ends_with('\n') {
            text.truncate(text.len() - if text.ends_with("\r\n") { 2 } else { 1 });
        }
        Secret(text)
    }

    /// Check that the credential fits into one header line. Every credential passes this check. The error contains its
    /// `source` and not its text, which is secret.
    pub(crate) fn checked(self, source: &str) -> Result<Secret> {
        if is_header_value(&self.0) {
            Ok(self)
        } else {
            Err(Fault::option(format!("{source} has control characters")))
        }
    }

    /// Whether the text is empty or blank.
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
    /// Return keys, with a session token if they are temporary.
    #[must_use]
    pub fn new(id: Secret, secret: Secret, session: Option<Secret>) -> Keys {
        Keys { id, secret, session }
    }
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
    /// Other state that the identity depends on: the versions of files, the values of variables.
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

/// The credential that requests carry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Credential {
    /// Keys that sign requests: of S3, or the HMAC keys of Google's store.
    Keys(Keys),
    /// A token that is sent as `Authorization: Bearer …`.
    Token(Secret),
    /// Nothing: everybody may read.
    Anonymous,
}

/// The setting that contains an identity, and the identity if it is keys or a token.
pub type Found = (String, Option<Identity>);

/// A credential, when it expires, and where it is valid.
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

    /// Check that the credential fits into a request.
    pub(crate) fn checked(self, source: &str) -> Result<Identity> {
        let secrets = match &self.credential {
            Credential::Anonymous => vec![],
            Credential::Token(token) => vec![token],
            Credential::Keys(keys) => [&keys.id, &keys.secret]
                .into_iter()
                .chain(&keys.session)
                .collect(),
        };
        for secret in secrets {
            secret.clone().checked(&format!("the answer of {source}"))?;
        }
        Ok(self)
    }
}

/// Whether a header line can contain `value`.
pub(crate) fn is_header_value(value: &str) -> bool {
    let may = |byte: u8| byte == b'\t' || (byte >= 0x20 && byte != 0x7F);
    value.bytes().all(may)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credentials_are_one_line_without_its_end() {
        for (text, kept) in [("k\n", "k"), ("k\r\n", "k"), ("k", "k"), ("", ""), ("\n", "")] {
            assert_eq!(Secret::new(text).checked("K").unwrap().reveal(), kept);
        }
        for text in ["k\n\n", "k\r", "a\r\nX: b", "a\nb", "\nk", "\0", "\u{7f}"] {
            let fault = Secret::new(text).checked("AWS_X").unwrap_err();
            assert_eq!(fault.to_string(), "AWS_X has control characters");
        }
    }
}
