//! Tokens that are issued for a while, by OAuth 2.0 and by the services of machines: those of Google and of Azure.

use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ring::rand::SystemRandom;
use ring::signature::{RSA_PKCS1_SHA256, RsaKeyPair};
use rustls::pki_types::PrivatePkcs8KeyDer;
use rustls::pki_types::pem::PemObject;
use serde_json::{Value, json};

use super::asker::{Asker, form, posted, useless};
use super::issued::{Issued, Timed};
use super::{read, refused, shown, until};
use crate::fault::Fault;
use crate::http::pace::Deadline;
use crate::options::{RemoteOptions, Secret};
use crate::url::Url;

/// How long the claim may be used that a token is asked for with.
const CLAIM_VALIDITY: Duration = Duration::from_secs(3600);

static TOKENS: Issued<TokenSource, Secret> = Issued::new();

/// Where a token comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TokenSource {
    /// What its faults call it.
    pub(crate) name: String,
    pub(crate) service: Url,
    pub(crate) question: Question,
    /// The service that gives a token of another account for that one, and what may be done with it.
    pub(crate) other_account: Option<(Url, &'static str)>,
}

/// How the service is asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Question {
    /// By a form.
    Form(Vec<(&'static str, Field)>),
    /// For what belongs to the machine; `nobody` are the answers of one to which nothing does.
    Machine {
        header: (&'static str, Secret),
        nobody: &'static [u16],
    },
}

/// What stands in a form.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Field {
    Text(Secret),
    /// What a file holds at the time, or one field of the JSON in it.
    File(PathBuf, Option<String>),
    /// What a service answers, or one field of the JSON in that.
    Answer {
        url: Url,
        headers: Vec<(String, Secret)>,
        field: Option<String>,
    },
    /// A JSON Web Token that says who asks for what, signed (RFC 7523).
    Claim {
        email: String,
        id: String,
        pem: Secret,
        scope: &'static str,
    },
}

impl TokenSource {
    pub(crate) fn form(name: &str, service: Url, fields: Vec<(&'static str, Field)>) -> TokenSource {
        TokenSource {
            name: name.to_owned(),
            service,
            question: Question::Form(fields),
            other_account: None,
        }
    }

    /// A token that is good for some minutes at least. None: the machine has no identity.
    pub(crate) fn token(
        &self,
        options: &RemoteOptions,
        deadline: Deadline<'_>,
    ) -> Result<Option<Secret>, Fault> {
        TOKENS.get(self, &self.name, deadline, || self.issue(options, deadline))
    }

    /// Forgets a token that was issued by the time `sent` and then refused. Returns whether there may be others.
    pub(crate) fn forget(&self, sent: Instant) -> bool {
        TOKENS.forget(self, sent)
    }

    fn issue(&self, options: &RemoteOptions, deadline: Deadline<'_>) -> Result<Timed<Secret>, Fault> {
        let asker = Asker::of(&self.service, options, deadline);
        let answer = match &self.question {
            Question::Form(fields) => {
                let values = fields
                    .iter()
                    .map(|(_, field)| field.value(&self.service, options, deadline));
                let values = values.collect::<Result<Vec<Secret>, Fault>>()?;
                let names = fields.iter().map(|(name, _)| *name);
                asker.post(&self.service, &form(names.zip(values.iter().map(Secret::reveal))))?
            }
            Question::Machine { header, nobody } => {
                match asker.get(&self.service, &[(header.0, &header.1)]) {
                    Err(fault) if fault.status().is_some_and(|status| nobody.contains(&status)) => {
                        return Ok(Timed::nothing());
                    }
                    answer => answer?,
                }
            }
        };
        let token = token_of(&answer, &self.service)?;
        match (&self.other_account, &token.value) {
            (Some((service, scope)), Some(first)) => {
                let body = json!({"scope": [scope], "lifetime": "3600s"}).to_string();
                let mut request = posted(service, "application/json", &body);
                let value = format!("Bearer {}", first.reveal());
                request.headers.push(("Authorization".to_owned(), value));
                token_of(&Asker::of(service, options, deadline).ask(&request)?, service)
            }
            _ => Ok(token),
        }
    }
}

impl Field {
    /// Some text.
    pub(crate) fn text(text: impl Into<String>) -> Field {
        Field::Text(Secret::new(text))
    }

    fn value(&self, service: &Url, options: &RemoteOptions, deadline: Deadline<'_>) -> Result<Secret, Fault> {
        match self {
            Field::Text(text) => Ok(text.clone()),
            Field::File(path, field) => {
                let source = format!("the token in {}", shown(path));
                one_field(&read(path)?, field.as_deref(), &source)
            }
            Field::Answer { url, headers, field } => {
                let headers: Vec<_> = headers
                    .iter()
                    .map(|(name, value)| (name.as_str(), value))
                    .collect();
                let answer = Asker::of(url, options, deadline).get(url, &headers)?;
                one_field(&answer, field.as_deref(), &format!("the token of {url}"))
            }
            Field::Claim {
                email,
                id,
                pem,
                scope,
            } => claim(service, email, id, pem, scope),
        }
    }
}

/// The token that is all of `text`, or the one in this field of its JSON.
fn one_field(text: &str, field: Option<&str>, source: &str) -> Result<Secret, Fault> {
    let json: Value = match field {
        Some(_) => serde_json::from_str(text).unwrap_or_default(),
        None => text.trim().into(),
    };
    let token = field
        .map_or(Some(&json), |field| json.get(field))
        .and_then(Value::as_str);
    let token = token.filter(|token| !token.trim().is_empty()).ok_or_else(|| {
        let field = field.map(|field| format!(" in the field {}", ingot_format::Quoted(field)));
        refused(format!("{source}: there is none{}", field.unwrap_or_default()))
    })?;
    Secret::new(token).checked(source)
}

/// The token in an answer, and when it is over: in how many seconds, or at which time.
fn token_of(answer: &str, service: &Url) -> Result<Timed<Secret>, Fault> {
    let answer: Value = serde_json::from_str(answer).unwrap_or_default();
    let text = |names: [&str; 2]| {
        let value = names.iter().find_map(|name| answer.get(name))?;
        // Some services of Azure send numbers as text.
        value
            .as_str()
            .map(ToOwned::to_owned)
            .or_else(|| Some(value.as_u64()?.to_string()))
    };
    let token = text(["access_token", "accessToken"]).filter(|token| !token.trim().is_empty());
    let token = token.ok_or_else(|| useless(&service.to_string()))?;
    let seconds = text(["expires_in", "expiresIn"]).and_then(|seconds| seconds.parse::<u64>().ok());
    Ok(Timed {
        value: Some(Secret::new(token).checked(&format!("the token of {service}"))?),
        until: match seconds {
            Some(seconds) => SystemTime::now() + Duration::from_secs(seconds.min(86_400)),
            None => until(text(["expires_on", "expireTime"]).as_deref()),
        },
    })
}

fn claim(service: &Url, email: &str, id: &str, pem: &Secret, scope: &str) -> Result<Secret, Fault> {
    let refuse = |why: String| refused(format!("the private key of {email} cannot be used: {why}"));
    let der = PrivatePkcs8KeyDer::from_pem_slice(pem.reveal().as_bytes());
    let der = der.map_err(|fault| refuse(fault.to_string()))?;
    let key = RsaKeyPair::from_pkcs8(der.secret_pkcs8_der()).map_err(|fault| refuse(fault.to_string()))?;
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let head = json!({"alg": "RS256", "typ": "JWT", "kid": id});
    let body = json!({
        "iss": email,
        "scope": scope,
        "aud": service.to_string(),
        "iat": since.as_secs(),
        "exp": (since + CLAIM_VALIDITY).as_secs(),
    });
    let encode = |bytes: &[u8]| URL_SAFE_NO_PAD.encode(bytes);
    let text = [head, body]
        .map(|part| encode(part.to_string().as_bytes()))
        .join(".");
    let mut signature = vec![0; key.public().modulus_len()];
    key.sign(
        &RSA_PKCS1_SHA256,
        &SystemRandom::new(),
        text.as_bytes(),
        &mut signature,
    )
    .map_err(|fault| refuse(fault.to_string()))?;
    Ok(Secret::new(format!("{text}.{}", encode(&signature))))
}
