//! Sources of keys of S3: what stands there, and what is issued for a while.

use std::path::PathBuf;
use std::time::Instant;

use jiff::Timestamp;

use super::asker::{Asker, element, form, posted, useless};
use super::issued::{Issued, Timed};
use super::process::run;
use super::sso::Sso;
use super::{Keys, refused, shown, token_in, until};
use crate::fault::Fault;
use crate::http::message::HttpRequest;
use crate::http::pace::Deadline;
use crate::options::{RemoteOptions, Secret};
use crate::store::sigv4::sign;
use crate::url::{Url, encode_segment};

static KEYS: Issued<Issuer, Keys> = Issued::new();

/// Where keys come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// They stand there.
    Known(Keys),
    /// They are issued for a while, and then again.
    Issued(Box<Issuer>),
}

/// Who issues keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Issuer {
    /// What its faults call it.
    name: String,
    way: Way,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// Amazon's token service issues those of a role.
    Role(Role),
    /// What a person gets who has logged in with `aws sso login`.
    Sso(Sso),
    /// What a program prints.
    Process(Secret),
    /// What is there for a container of ECS or EKS.
    Container {
        service: Url,
        token: Option<ContainerToken>,
    },
    /// What is there for a machine of EC2.
    Instance { service: Url },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Role {
    pub(super) service: Url,
    pub(super) region: String,
    pub(super) pairs: Vec<(&'static str, String)>,
    pub(super) proof: Proof,
}

/// What shows that a caller may take a role.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Proof {
    /// A signature with other keys.
    Keys(Box<Source>),
    /// The token that a file holds, as pods of EKS have one.
    Token(PathBuf),
}

/// What a container shows: the token, or a file that holds the present one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ContainerToken {
    Text(Secret),
    File(PathBuf),
}

impl Source {
    pub(super) fn issued(name: String, way: Way) -> Source {
        Source::Issued(Box::new(Issuer { name, way }))
    }

    /// Keys that are good for some minutes at least: those that were issued before, or new ones. None: the machine has
    /// no role.
    pub(crate) fn keys(
        &self,
        options: &RemoteOptions,
        deadline: Deadline<'_>,
    ) -> Result<Option<Keys>, Fault> {
        match self {
            Source::Known(keys) => Ok(Some(keys.clone())),
            Source::Issued(issuer) => {
                KEYS.get(issuer, &issuer.name, deadline, || issuer.issue(options, deadline))
            }
        }
    }

    /// Forgets keys that were issued by the time `sent` and then refused. Returns whether there may be others.
    pub(crate) fn forget(&self, sent: Instant) -> bool {
        match self {
            Source::Known(_) => false,
            Source::Issued(issuer) => KEYS.forget(issuer, sent),
        }
    }
}

impl Issuer {
    fn issue(&self, options: &RemoteOptions, deadline: Deadline<'_>) -> Result<Timed<Keys>, Fault> {
        match &self.way {
            Way::Role(role) => role.issue(options, deadline),
            Way::Sso(sso) => of_json(&sso.ask(options, deadline)?, &sso.portal.to_string()),
            Way::Process(command) => {
                let mut keys = of_json(&run(command, deadline)?, "the program")?;
                // What does not say when it is over is not over: a program is not run for each request.
                if keys.until == until(None) {
                    keys.until = Timed::<Keys>::nothing().until;
                }
                Ok(keys)
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
        }
    }
}

impl Role {
    fn issue(&self, options: &RemoteOptions, deadline: Deadline<'_>) -> Result<Timed<Keys>, Fault> {
        let pairs = self.pairs.iter().map(|(name, value)| (*name, value.as_str()));
        let asker = Asker::of(&self.service, options, deadline);
        let answer = match &self.proof {
            Proof::Token(file) => {
                let token = token_in(file)?.ok_or_else(|| refused(format!("{} is empty", shown(file))))?;
                let token = ("WebIdentityToken", token.reveal());
                asker.post(&self.service, &form(pairs.chain([token])))?
            }
            Proof::Keys(source) => {
                let body = form(pairs);
                let ask = || {
                    let keys = source.keys(options, deadline)?;
                    let keys = keys.ok_or_else(|| refused("this machine has no role"))?;
                    let mut request = posted(&self.service, "application/x-www-form-urlencoded", &body);
                    sign(&mut request, &keys, &self.region, "sts", Timestamp::now());
                    asker.ask(&request)
                };
                let sent = Instant::now();
                match ask() {
                    Err(fault) if fault.refuses_identity() && source.forget(sent) => ask()?,
                    answer => answer?,
                }
            }
        };
        let text = |name: &str| element(&answer, name).map(ToOwned::to_owned);
        let fields = ["AccessKeyId", "SecretAccessKey", "SessionToken", "Expiration"];
        keys_of(fields.map(text), &self.service.to_string())
    }
}

/// Version 2 of that service: first a token, which nobody gets who only makes this process follow a link.
fn of_instance(service: &Url, options: &RemoteOptions, deadline: Deadline<'_>) -> Result<Timed<Keys>, Fault> {
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

/// The keys in an answer of JSON: services differ in the case of the names.
fn of_json(body: &str, source: &str) -> Result<Timed<Keys>, Fault> {
    let answer: serde_json::Value = serde_json::from_str(body).unwrap_or_default();
    let answer = answer.get("roleCredentials").unwrap_or(&answer);
    let value = |name: &str| {
        let mut pairs = answer.as_object()?.iter();
        pairs
            .find(|pair| pair.0.eq_ignore_ascii_case(name))
            .map(|pair| pair.1)
    };
    let text = |name: &str| Some(value(name)?.as_str()?.to_owned());
    // In milliseconds.
    let over = value("Expiration").and_then(serde_json::Value::as_i64);
    let over = over
        .map(|millis| (millis / 1000).to_string())
        .or_else(|| text("Expiration"));
    let session = text("SessionToken").or_else(|| text("Token"));
    keys_of(
        [text("AccessKeyId"), text("SecretAccessKey"), session, over],
        source,
    )
}

/// The keys that a source has issued: name, secret, session and when they are over.
fn keys_of([id, secret, session, over]: [Option<String>; 4], source: &str) -> Result<Timed<Keys>, Fault> {
    let checked = |text: String| Secret::new(text).checked(&format!("what {source} has issued"));
    let given = |text: Option<String>| text.filter(|text| !text.trim().is_empty());
    let needed = |text: Option<String>| checked(given(text).ok_or_else(|| useless(source))?);
    Ok(Timed {
        value: Some(Keys {
            id: needed(id)?,
            secret: needed(secret)?,
            session: given(session).map(checked).transpose()?,
        }),
        until: until(over.as_deref()),
    })
}
