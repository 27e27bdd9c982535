//! Sources of identities: constant ones, and those that expire and are requested again.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use super::asker::{Asker, element, form, useless};
use super::issued::{Issued, Issuing, Timed};
use super::{refused, shown, token_in, until};
use crate::credentials::{Credential, Credentials, Identity, Keys, Secret, Wanted};
use crate::fault::{Fault, FaultKind};
use crate::http::aside::aside;
use crate::http::message::HttpRequest;
use crate::http::pace::Deadline;
use crate::options::RemoteOptions;
use crate::url::{Url, encode_segment};

static IDENTITIES: Issued<Issuer, Identity> = Issued::new();

/// A provider, equal only to itself.
#[derive(Clone, Debug)]
pub(crate) struct Provider(pub(crate) Arc<dyn Credentials>);

impl PartialEq for Provider {
    fn eq(&self, other: &Provider) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Provider {}

impl Provider {
    /// Call the provider on a helper thread.
    fn ask(&self, wanted: &Wanted, deadline: Deadline<'_>) -> Result<Identity, Fault> {
        let (provider, wanted) = (Arc::clone(&self.0), wanted.clone());
        let (source, begun) = (wanted.source.clone(), Instant::now());
        let answer = aside(move || provider.identity(&wanted), deadline)?;
        if deadline.left()?.is_zero() && answer.is_err() {
            let (what, after) = ("the provider did not answer", begun.elapsed());
            return Err(FaultKind::Slow { what, after }.into());
        }
        answer
            .map_err(|error| Fault::new(FaultKind::Provider(error)))?
            .checked(&source)
    }
}

/// Where an identity comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// The setting that holds the credential, and the credential.
    Known(&'static str, Credential),
    /// A service or a provider.
    Issued(Box<Issuer>),
}

/// A service or a provider of identities.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Issuer {
    /// The name in errors.
    name: String,
    way: Way,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// Amazon's token service, for the token that a file holds, as pods of EKS have one.
    WebIdentity {
        service: Url,
        pairs: Vec<(&'static str, String)>,
        file: PathBuf,
    },
    /// The service of a container of ECS or EKS.
    Container {
        service: Url,
        token: Option<ContainerToken>,
    },
    /// The service of a machine of EC2.
    Instance { service: Url },
    /// The caller's provider, or the vendors' SDKs.
    Provider(Provider, Wanted),
}

/// The token that a container sends, or the file that holds the present one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ContainerToken {
    Text(Secret),
    File(PathBuf),
}

impl Source {
    pub(super) fn issued(name: String, way: Way) -> Source {
        Source::Issued(Box::new(Issuer { name, way }))
    }

    pub(crate) fn provider(provider: Provider, wanted: Wanted) -> Source {
        Source::issued(wanted.source.clone(), Way::Provider(provider, wanted))
    }

    /// The name in errors.
    pub(crate) fn name(&self) -> &str {
        match self {
            Source::Known(name, _) => name,
            Source::Issued(issuer) => &issuer.name,
        }
    }

    pub(crate) fn is_provider(&self) -> bool {
        matches!(self, Source::Issued(issuer) if matches!(issuer.way, Way::Provider(..)))
    }

    /// Return an identity that is valid for some minutes at least, an earlier one or a new one. `None`: the machine has
    /// no identity.
    pub(crate) fn identity(
        &self,
        options: &RemoteOptions,
        deadline: Deadline<'_>,
    ) -> Result<Option<Identity>, Fault> {
        match self {
            Source::Known(_, credential) => Ok(Some(Identity::new(credential.clone()))),
            Source::Issued(issuer) => {
                IDENTITIES.get(issuer, &issuer.name, deadline, || issuer.issue(options, deadline))
            }
        }
    }

    fn credential(
        &self,
        options: &RemoteOptions,
        deadline: Deadline<'_>,
    ) -> Result<Option<Credential>, Fault> {
        let identity = self.identity(options, deadline)?;
        Ok(identity.map(|identity| identity.credential))
    }

    /// Return the keys, which the source must hold instead of a token.
    pub(crate) fn keys(
        &self,
        options: &RemoteOptions,
        deadline: Deadline<'_>,
    ) -> Result<Option<Keys>, Fault> {
        match self.credential(options, deadline)? {
            None | Some(Credential::Anonymous) => Ok(None),
            Some(Credential::Keys(keys)) => Ok(Some(keys)),
            Some(Credential::Token(_)) => Err(self.mismatch("keys", "a token")),
        }
    }

    /// Return the token, which the source must hold instead of keys.
    pub(crate) fn token(
        &self,
        options: &RemoteOptions,
        deadline: Deadline<'_>,
    ) -> Result<Option<Secret>, Fault> {
        match self.credential(options, deadline)? {
            None | Some(Credential::Anonymous) => Ok(None),
            Some(Credential::Token(token)) => Ok(Some(token)),
            Some(Credential::Keys(_)) => Err(self.mismatch("a token", "keys")),
        }
    }

    fn mismatch(&self, expected: &str, found: &str) -> Fault {
        refused(format!("expected {expected}, found {found}")).of_credentials(self.name())
    }

    /// Forget the identity that was issued by the time `sent` and then refused. Return whether there may be another.
    pub(crate) fn forget(&self, sent: Instant) -> bool {
        match self {
            Source::Known(..) => false,
            Source::Issued(issuer) => IDENTITIES.forget(issuer, sent),
        }
    }
}

impl Issuing for Issuer {
    fn is_unused(&self) -> bool {
        matches!(&self.way, Way::Provider(provider, _) if Arc::strong_count(&provider.0) == 1)
    }
}

impl Issuer {
    fn issue(&self, options: &RemoteOptions, deadline: Deadline<'_>) -> Result<Timed<Identity>, Fault> {
        match &self.way {
            Way::WebIdentity { service, pairs, file } => {
                let token = token_in(file)?.ok_or_else(|| refused(format!("{} is empty", shown(file))))?;
                let pairs = pairs.iter().map(|(name, value)| (*name, value.as_str()));
                let body = form(pairs.chain([("WebIdentityToken", token.reveal())]));
                let answer = Asker::of(service, options, deadline).post(service, &body)?;
                let text = |name: &str| element(&answer, name).map(ToOwned::to_owned);
                let fields = ["AccessKeyId", "SecretAccessKey", "SessionToken", "Expiration"];
                keys_of(fields.map(text), &service.to_string())
            }
            Way::Container { service, token } => {
                let token = match token {
                    Some(ContainerToken::Text(text)) => Some(text.clone()),
                    Some(ContainerToken::File(path)) => token_in(path)?,
                    None => None,
                };
                let headers: Vec<_> = token.iter().map(|token| ("Authorization", token)).collect();
                let answer = Asker::of(service, options, deadline).get(service, &headers)?;
                of_json(&answer, &service.to_string())
            }
            Way::Instance { service } => of_instance(service, options, deadline),
            Way::Provider(provider, wanted) => {
                let identity = provider.ask(wanted, deadline)?;
                Ok(Timed {
                    until: identity
                        .expiry
                        .unwrap_or_else(|| Timed::<Identity>::nothing().until),
                    value: Some(identity),
                })
            }
        }
    }
}

/// The identity that the caller's provider returns, if there is one.
pub(crate) fn given(options: &RemoteOptions, store: &'static str) -> Option<Source> {
    let provider = Provider(Arc::clone(options.credentials.as_ref()?));
    Some(Source::provider(
        provider,
        Wanted::new(store, "the provider in `credentials`"),
    ))
}

/// The identity that the SDKs of the vendors find.
pub(super) fn delegated(options: &RemoteOptions, wanted: Wanted) -> Result<Source, Fault> {
    let Some(sdks) = &options.sdks else {
        let why = "ingot for Rust does not read it: set `RemoteOptions::credentials`, or export keys with `ingot \
                   credentials --process`";
        let fault = Fault::new(FaultKind::Provider(io::Error::new(
            io::ErrorKind::Unsupported,
            why,
        )));
        return Err(fault.of_credentials(&wanted.source));
    };
    Ok(Source::provider(Provider(Arc::clone(sdks)), wanted))
}

/// Version 2 of that service: first a token, which nobody gets who only makes this process follow a link.
fn of_instance(
    service: &Url,
    options: &RemoteOptions,
    deadline: Deadline<'_>,
) -> Result<Timed<Identity>, Fault> {
    let asker = Asker::of(service, options, deadline);
    let at = |path: &str| Url {
        path: format!("{}{path}", service.path.trim_end_matches('/')),
        ..service.clone()
    };
    let roles = "/latest/meta-data/iam/security-credentials/";
    let first = || {
        let token = asker.ask(&HttpRequest {
            method: "PUT",
            url: &at("/latest/api/token"),
            headers: vec![(
                "X-aws-ec2-metadata-token-ttl-seconds".to_owned(),
                "21600".to_owned(),
            )],
            body: &[],
        })?;
        let token = Secret::new(token.trim()).checked("the token of the machine")?;
        if token.is_empty() {
            return Err(useless(&service.to_string()));
        }
        let role = asker.get(&at(roles), &[("X-aws-ec2-metadata-token", &token)])?;
        Ok((token, role))
    };
    let (token, role) = match first() {
        Err(fault) if Fault::status(&fault) == Some(404) => return Ok(Timed::nothing()),
        answer => answer?,
    };
    let role = encode_segment(role.lines().next().unwrap_or_default().trim());
    let answer = asker.get(
        &at(&format!("{roles}{role}")),
        &[("X-aws-ec2-metadata-token", &token)],
    )?;
    of_json(&answer, &service.to_string())
}

/// The keys in an answer of JSON.
fn of_json(body: &str, source: &str) -> Result<Timed<Identity>, Fault> {
    let answer: serde_json::Value = serde_json::from_str(body).unwrap_or_default();
    let text = |name: &str| Some(answer.get(name)?.as_str()?.to_owned());
    let fields = ["AccessKeyId", "SecretAccessKey", "Token", "Expiration"];
    keys_of(fields.map(text), source)
}

/// The keys that a source has issued: name, secret, session and when they are over.
fn keys_of([id, secret, session, over]: [Option<String>; 4], source: &str) -> Result<Timed<Identity>, Fault> {
    let checked = |text: String| Secret::new(text).checked(&format!("what {source} has issued"));
    let given = |text: Option<String>| text.filter(|text| !text.trim().is_empty());
    let needed = |text: Option<String>| checked(given(text).ok_or_else(|| useless(source))?);
    let until = until(over.as_deref());
    let credential = Credential::Keys(Keys {
        id: needed(id)?,
        secret: needed(secret)?,
        session: given(session).map(checked).transpose()?,
    });
    Ok(Timed {
        value: Some(Identity {
            expiry: Some(until),
            ..Identity::new(credential)
        }),
        until,
    })
}
