//! How remote files are reached, as the caller says.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::credentials::{Credentials, Secret, is_header_value};
use crate::fault::{Fault, FaultKind};

/// What an environment variable holds.
pub(crate) fn environment(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// What is sent as `Authorization: Bearer …`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Token {
    /// What the environment of the service holds, where there is one: that of the Hub, and of Google's and Azure's
    /// stores.
    #[default]
    Environment,
    /// None, whatever the environment holds.
    Withheld,
    /// This one.
    Given(Secret),
}

/// How remote files are reached.
///
/// Everything that is `None` comes from the environment variables that the service's own tools read, or is what the
/// service does by default.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RemoteOptions {
    /// The token. It goes to the host of the URL, and nowhere else.
    pub token: Token,
    /// Headers of requests, besides those that reading needs. They go to the host of the URL, and nowhere else.
    pub headers: Vec<(String, Secret)>,
    /// Time for a connection to be made, to resolve the name of its host and to get through a proxy among it, and then
    /// for it to be made safe.
    pub connect_timeout: Duration,
    /// The server has this long for an answer, and then for each [`RemoteOptions::min_rate`] times as many bytes.
    pub stall_timeout: Duration,
    /// Time for one request of up to 8 MiB, including retries. Each MiB that arrives renews it.
    pub timeout: Duration,
    /// Bytes per second; a server that gives fewer over `stall_timeout` is given up.
    pub min_rate: u64,
    /// How often a request is tried again that failed for a reason that may pass.
    pub retries: u32,
    /// Certificates in PEM to trust instead of the system's, for servers and for proxies of `https:`.
    pub ca_file: Option<PathBuf>,
    /// Follow redirects to other hosts and ports outside of the public internet too.
    pub allow_private_redirects: bool,
    /// Where the service is: for S3, Azure and the Hub. Given so, it needs no TLS.
    pub endpoint: Option<String>,
    /// The region of an S3 bucket.
    pub region: Option<String>,
    /// Whether the bucket stands in the path (`true`) or in the host. In the path by default where there is an
    /// endpoint.
    pub path_style: Option<bool>,
    /// Send no credentials, whatever the environment holds.
    pub anonymous: bool,
    /// The profile of Amazon's files that is used instead of what the environment holds.
    pub profile: Option<String>,
    /// Whether who asks pays for what S3 sends, as some buckets want it.
    pub request_payer: Option<bool>,
    /// The key of S3, or of what speaks like it at Google's, with its secret.
    pub access_key: Option<(String, Secret)>,
    /// What makes keys of S3 that last for a while valid.
    pub session_token: Option<Secret>,
    /// The account of Azure.
    pub account: Option<String>,
    /// The key of Azure's account.
    pub account_key: Option<Secret>,
    /// A signed query of Azure.
    pub sas_token: Option<Secret>,
    /// Account, endpoint and key or signed query of Azure in one text.
    pub connection_string: Option<Secret>,
    /// The application of Azure that reads, or the managed identity.
    pub client_id: Option<String>,
    /// The directory that it belongs to.
    pub tenant_id: Option<String>,
    /// Its secret.
    pub client_secret: Option<Secret>,
    /// A file of credentials of Google.
    pub credentials_file: Option<PathBuf>,
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
            credentials: None,
            sdks: None,
        }
    }
}

/// Headers that reading is made of. One that was set twice would mean two things.
const OURS: &[&str] = &[
    "accept-encoding",
    "connection",
    "content-length",
    "host",
    "if-match",
    "if-modified-since",
    "if-none-match",
    "if-range",
    "if-unmodified-since",
    "proxy-authorization",
    "range",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
];

impl RemoteOptions {
    /// The same without credentials that are empty, which count as absent: scripts set them so.
    pub(crate) fn without_empty(&self) -> RemoteOptions {
        let mut options = self.clone();
        if matches!(&options.token, Token::Given(token) if token.is_empty()) {
            options.token = Token::Environment;
        }
        if matches!(&options.access_key, Some((id, secret)) if id.is_empty() && secret.is_empty()) {
            options.access_key = None;
        }
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

    /// Refuses what no request can hold.
    pub(crate) fn check(&self) -> Result<(), Fault> {
        for (name, value) in &self.headers {
            let refuse = |why: &str| FaultKind::Option(format!("the header {name:?} {why}"));
            if !is_header_name(name) {
                return Err(refuse("has a name that no header has").into());
            }
            if OURS.contains(&name.to_ascii_lowercase().as_str()) {
                return Err(refuse("is one that reading sets itself").into());
            }
            if !is_header_value(value.reveal()) {
                return Err(refuse("has a value with control characters").into());
            }
        }
        let token = match &self.token {
            Token::Given(token) => Some(token.clone()),
            _ => None,
        };
        let (id, secret) = self.access_key.clone().unzip();
        for (name, given) in [
            ("token", token),
            ("access_key_id", id.map(Secret::new)),
            ("secret_access_key", secret),
            ("session_token", self.session_token.clone()),
            ("account_key", self.account_key.clone()),
            ("sas_token", self.sas_token.clone()),
            ("connection_string", self.connection_string.clone()),
            ("client_secret", self.client_secret.clone()),
        ] {
            given.map(|secret| secret.checked(name)).transpose()?;
        }
        self.check_provider()
    }

    /// Refuse keys, a token or `anonymous` together with a provider.
    fn check_provider(&self) -> Result<(), Fault> {
        let others = [
            ("token", self.token != Token::Environment),
            ("access_key_id", self.access_key.is_some()),
            ("session_token", self.session_token.is_some()),
            ("account_key", self.account_key.is_some()),
            ("sas_token", self.sas_token.is_some()),
            ("connection_string", self.connection_string.is_some()),
            ("client_secret", self.client_secret.is_some()),
            ("credentials_file", self.credentials_file.is_some()),
            ("profile", self.profile.is_some()),
            ("anonymous", self.anonymous),
        ];
        match others.iter().find(|other| other.1) {
            Some((name, _)) if self.credentials.is_some() => {
                let why = format!("`credentials` and `{name}` are two identities: expected one of them");
                Err(FaultKind::Option(why).into())
            }
            _ => Ok(()),
        }
    }
}

/// A token of RFC 9110.
pub(crate) fn is_header_name(name: &str) -> bool {
    let may = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
    !name.is_empty() && name.bytes().all(may)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_that_would_change_what_is_asked_for_are_refused() {
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
    fn every_credential_that_is_given_is_checked() {
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
    fn secrets_do_not_print() {
        let options = RemoteOptions {
            token: Token::Given(Secret::new("hunter2")),
            headers: vec![("X-Key".to_owned(), Secret::new("hunter2"))],
            access_key: Some(("id".to_owned(), Secret::new("hunter2"))),
            ..RemoteOptions::default()
        };
        assert!(!format!("{options:?}").contains("hunter2"));
    }
}
