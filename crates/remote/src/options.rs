//! Options of remote files.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::credentials::{Credentials, Secret, is_header_value};
use crate::fault::{Fault, Result};

/// The token of `Authorization: Bearer …`.
///
/// ```
/// use ingot_remote::{RemoteOptions, Secret, Token};
///
/// let mut options = RemoteOptions::default();
/// assert_eq!(options.token, Token::Environment);
/// options.token = Token::Given(Secret::new("hf_1234"));
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Token {
    /// The token in the environment, for the Hub, Google's store and Azure's store.
    #[default]
    Environment,
    /// No token, even if the environment contains one.
    Withheld,
    /// This token.
    Given(Secret),
}

/// Options of remote files.
///
/// A field that is `None` has the value of the environment variables that the service's own tools read, or the default
/// of the service.
///
/// ```
/// use ingot_remote::RemoteOptions;
///
/// let mut options = RemoteOptions::default();
/// options.region = Some("eu-west-1".to_owned());
/// options.retries = 2;
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RemoteOptions {
    /// The token. It is sent to the host of the URL only.
    pub token: Token,
    /// Additional headers of requests. They are sent to the host of the URL only.
    pub headers: Vec<(String, Secret)>,
    /// Time limit to connect, which includes resolving the name and passing a proxy. The TLS handshake may take as long
    /// again.
    pub connect_timeout: Duration,
    /// Time limit for the head of a response, and then for each [`RemoteOptions::min_rate`] times as many bytes.
    pub stall_timeout: Duration,
    /// Time limit for one request of up to 8 MiB, including retries. Each MiB that arrives renews it.
    pub timeout: Duration,
    /// Bytes per second. A server that sends fewer during `stall_timeout` is an error.
    pub min_rate: u64,
    /// Number of retries of a request after a failure that may be temporary.
    pub retries: u32,
    /// A file of certificates in PEM to trust instead of the system's, for servers and for proxies of `https:`.
    pub ca_file: Option<PathBuf>,
    /// Follow redirects to other hosts and ports that are not of the public internet.
    pub allow_private_redirects: bool,
    /// The URL of the service, for S3, Google's store, Azure and the Hub. It may be `http:`.
    pub endpoint: Option<String>,
    /// The region of an S3 bucket.
    pub region: Option<String>,
    /// Whether the bucket is in the path (`true`) or in the host. By default it is in the path if there is an endpoint.
    pub path_style: Option<bool>,
    /// Send no credentials, even if the environment contains some.
    pub anonymous: bool,
    /// The profile of Amazon's files to use instead of the environment.
    pub profile: Option<String>,
    /// Whether the requester pays for what S3 sends, as some buckets require.
    pub request_payer: Option<bool>,
    /// The access key of S3 with its secret, or an HMAC key of Google's store.
    pub access_key: Option<(String, Secret)>,
    /// The session token of temporary keys of S3.
    pub session_token: Option<Secret>,
    /// The account of Azure.
    pub account: Option<String>,
    /// The key of the account of Azure.
    pub account_key: Option<Secret>,
    /// A signed query of Azure.
    pub sas_token: Option<Secret>,
    /// A connection string of Azure: account, endpoint, and key or signed query.
    pub connection_string: Option<Secret>,
    /// The application of Azure, or the managed identity.
    pub client_id: Option<String>,
    /// The directory of the application.
    pub tenant_id: Option<String>,
    /// The secret of the application.
    pub client_secret: Option<Secret>,
    /// A file of credentials of Google.
    pub credentials_file: Option<PathBuf>,
    /// The directory of the cache of blocks, instead of `INGOT_CACHE`. An empty path: no cache.
    pub cache_dir: Option<PathBuf>,
    /// The most bytes of the cache, instead of `INGOT_CACHE_SIZE`.
    pub cache_size: Option<u64>,
    /// Make no request for files, and read only what the cache holds; instead of `INGOT_OFFLINE`.
    pub offline: Option<bool>,
    /// The source of the identity, instead of all others.
    pub credentials: Option<Arc<dyn Credentials>>,
    /// The source of identities that the environment configures and ingot does not read itself: profiles, accounts,
    /// managed identities.
    pub sdks: Option<Arc<dyn Credentials>>,
}

impl Default for RemoteOptions {
    fn default() -> RemoteOptions {
        RemoteOptions {
            token: Token::Environment,
            headers: Vec::new(),
            connect_timeout: Duration::from_secs(10),
            stall_timeout: Duration::from_secs(30),
            timeout: Duration::from_secs(600),
            min_rate: 1024,
            retries: 4,
            ca_file: None,
            allow_private_redirects: false,
            endpoint: None,
            region: None,
            path_style: None,
            anonymous: false,
            profile: None,
            request_payer: None,
            access_key: None,
            session_token: None,
            account: None,
            account_key: None,
            sas_token: None,
            connection_string: None,
            client_id: None,
            tenant_id: None,
            client_secret: None,
            credentials_file: None,
            cache_dir: None,
            cache_size: None,
            offline: None,
            credentials: None,
            sdks: None,
        }
    }
}

/// Headers that reading sets, besides `If-…`. A second value would be ambiguous.
const OURS: &[&str] = &[
    "accept-encoding",
    "connection",
    "content-length",
    "host",
    "proxy-authorization",
    "range",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
];

impl RemoteOptions {
    /// Return the options without empty credentials, which scripts set and which count as absent.
    pub(crate) fn without_empty(&self) -> RemoteOptions {
        let mut options = self.clone();
        if self.given_token().is_some_and(Secret::is_empty) {
            options.token = Token::Environment;
        }
        options
            .access_key
            .take_if(|(id, secret)| id.is_empty() && secret.is_empty());
        for secret in [
            &mut options.session_token,
            &mut options.account_key,
            &mut options.sas_token,
            &mut options.connection_string,
            &mut options.client_secret,
        ] {
            secret.take_if(|secret| secret.is_empty());
        }
        options
    }

    pub(crate) fn given_token(&self) -> Option<&Secret> {
        match &self.token {
            Token::Given(token) => Some(token),
            Token::Environment | Token::Withheld => None,
        }
    }

    /// Reject headers and credentials that no request can contain, and two identities.
    pub(crate) fn check(&self) -> Result<()> {
        for (name, value) in &self.headers {
            let lower = name.to_ascii_lowercase();
            let why = if !is_header_name(name) {
                "is not a valid name"
            } else if OURS.contains(&lower.as_str()) || lower.starts_with("if-") {
                "is set by ingot itself"
            } else if !is_header_value(value.reveal()) {
                "has a value with control characters"
            } else {
                continue;
            };
            return Err(Fault::option(format!("the header {name:?} {why}")));
        }
        let id = self.access_key.as_ref().map(|(id, _)| Secret::new(id));
        let secrets = [
            ("token", self.given_token()),
            ("access_key_id", id.as_ref()),
            (
                "secret_access_key",
                self.access_key.as_ref().map(|(_, secret)| secret),
            ),
            ("session_token", self.session_token.as_ref()),
            ("account_key", self.account_key.as_ref()),
            ("sas_token", self.sas_token.as_ref()),
            ("connection_string", self.connection_string.as_ref()),
            ("client_secret", self.client_secret.as_ref()),
        ];
        for (name, secret) in secrets {
            secret.map(|secret| secret.clone().checked(name)).transpose()?;
        }
        if self.credentials.is_none() {
            return Ok(());
        }
        let others = [
            ("token", self.token != Token::Environment),
            ("credentials_file", self.credentials_file.is_some()),
            ("profile", self.profile.is_some()),
            ("anonymous", self.anonymous),
        ];
        let given = secrets.map(|(name, secret)| (name, secret.is_some()));
        match given.iter().chain(&others).find(|other| other.1) {
            Some((name, _)) => Err(Fault::option(format!(
                "`credentials` and `{name}` are two identities: expected one of them"
            ))),
            None => Ok(()),
        }
    }
}

/// Whether `name` is a token of RFC 9110.
pub(crate) fn is_header_name(name: &str) -> bool {
    let may = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
    !name.is_empty() && name.bytes().all(may)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_that_reading_sets_are_rejected() {
        for (name, value) in [
            ("Range", "bytes=0-"),
            ("HOST", "other"),
            ("X Y", "z"),
            ("X", "a\r\nHost: other"),
            ("", "z"),
        ] {
            let options = RemoteOptions {
                headers: vec![(name.to_owned(), Secret::new(value))],
                ..RemoteOptions::default()
            };
            assert_eq!(options.check().unwrap_err().code(), "storage-option", "{name}");
        }
    }

    #[test]
    fn all_credentials_in_options_are_checked() {
        let bad = || Some(Secret::new("hunter2\r\nX: y"));
        let usual = RemoteOptions::default;
        for (name, options) in [
            (
                "token",
                RemoteOptions {
                    token: Token::Given(Secret::new("hunter2\rX")),
                    ..usual()
                },
            ),
            (
                "access_key_id",
                RemoteOptions {
                    access_key: Some(("hunter2\n\n".to_owned(), Secret::new("s"))),
                    ..usual()
                },
            ),
            (
                "secret_access_key",
                RemoteOptions {
                    access_key: bad().map(|bad| ("id".to_owned(), bad)),
                    ..usual()
                },
            ),
            (
                "session_token",
                RemoteOptions {
                    session_token: bad(),
                    ..usual()
                },
            ),
            (
                "account_key",
                RemoteOptions {
                    account_key: bad(),
                    ..usual()
                },
            ),
            (
                "sas_token",
                RemoteOptions {
                    sas_token: bad(),
                    ..usual()
                },
            ),
            (
                "connection_string",
                RemoteOptions {
                    connection_string: bad(),
                    ..usual()
                },
            ),
            (
                "client_secret",
                RemoteOptions {
                    client_secret: bad(),
                    ..usual()
                },
            ),
        ] {
            let fault = options.check().unwrap_err();
            assert_eq!(fault.code(), "storage-option");
            assert_eq!(fault.to_string(), format!("{name} has control characters"));
        }
    }

    #[test]
    fn debug_output_hides_secrets() {
        let options = RemoteOptions {
            token: Token::Given(Secret::new("hunter2")),
            headers: vec![("X-Key".to_owned(), Secret::new("hunter2"))],
            access_key: Some(("id".to_owned(), Secret::new("hunter2"))),
            ..RemoteOptions::default()
        };
        assert!(!format!("{options:?}").contains("hunter2"));
    }
}
