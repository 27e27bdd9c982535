//! Tokens of Google for whoever has a file of credentials.

use std::fs;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ring::rand::SystemRandom;
use ring::signature::{RSA_PKCS1_SHA256, RsaKeyPair};
use rustls::pki_types::PrivatePkcs8KeyDer;
use rustls::pki_types::pem::PemObject;

use crate::fault::{Fault, FaultKind};
use crate::http::client::Client;
use crate::options::{RemoteOptions, Secret};
use crate::stop::StopFlag;
use crate::store::asker::{Asker, useless};
use crate::store::issued::{Issued, Timed};
use crate::url::{Scheme, Url, encode_segment};

/// What may be done with the token: to read.
const SCOPE: &str = "https://www.googleapis.com/auth/devstorage.read_only";

/// Where tokens are issued, where a file does not say.
const TOKEN_SERVICE: &str = "https://oauth2.googleapis.com/token";

/// How long the claim may be used that a token is asked for with.
const CLAIM_VALIDITY: Duration = Duration::from_secs(3600);

static TOKENS: Issued<Account, Secret> = Issued::new();

/// Who asks for a token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Account {
    service: Url,
    grant: Grant,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Grant {
    /// A signature with the key of a service account.
    Key { email: String, id: String, pem: Secret },
    /// What a person was given who logged in.
    Refresh {
        client: String,
        secret: Secret,
        token: Secret,
    },
}

impl Account {
    /// Reads a file of credentials: that of a service account, or of a person who logged in.
    pub(crate) fn read(path: &Path) -> Result<Account, Fault> {
        let refuse = |why: &str| {
            let path = path.to_string_lossy();
            let path = ingot_format::Escaped(&path).to_string();
            Fault::new(FaultKind::Option(format!(
                "the credentials in {path} cannot be used: {why}"
            )))
        };
        let text = fs::read_to_string(path).map_err(|fault| refuse(&fault.to_string()))?;
        let file: serde_json::Value = serde_json::from_str(&text).map_err(|_| refuse("they are no JSON"))?;
        let text = |name: &str| {
            let text = file.get(name).and_then(serde_json::Value::as_str);
            text.ok_or_else(|| refuse(&format!("they have no {name}")))
        };
        let grant = match text("type")? {
            "service_account" => Grant::Key {
                email: text("client_email")?.to_owned(),
                id: text("private_key_id").unwrap_or_default().to_owned(),
                pem: Secret::new(text("private_key")?),
            },
            "authorized_user" => Grant::Refresh {
                client: text("client_id")?.to_owned(),
                secret: Secret::new(text("client_secret")?),
                token: Secret::new(text("refresh_token")?),
            },
            other => {
                let other = ingot_format::Quoted(other).to_string();
                return Err(refuse(&format!(
                    "their type is {other}: expected service_account or authorized_user"
                )));
            }
        };
        let service = Url::parse(text("token_uri").unwrap_or(TOKEN_SERVICE))?;
        let is_near = service.address().is_some_and(|address| address.is_loopback());
        match service.scheme == Scheme::Https || is_near {
            true => Ok(Account { service, grant }),
            false => Err(refuse("their token_uri is none of https://")),
        }
    }

    /// A token that is good for some minutes at least.
    pub(crate) fn token(&self, options: &RemoteOptions, stop: StopFlag<'_>) -> Result<Secret, Fault> {
        TOKENS.get(self, || self.issue(options, stop))
    }

    fn issue(&self, options: &RemoteOptions, stop: StopFlag<'_>) -> Result<Timed<Secret>, Fault> {
        let now = SystemTime::now();
        let form = match &self.grant {
            Grant::Key { email, id, pem } => {
                let claim = self.claim(email, id, pem, now)?;
                format!("grant_type=urn%3Aietf%3Aparams%3Aoauth%3Agrant-type%3Ajwt-bearer&assertion={claim}")
            }
            Grant::Refresh {
                client,
                secret,
                token,
            } => format!(
                "grant_type=refresh_token&client_id={}&client_secret={}&refresh_token={}",
                encode_segment(client),
                encode_segment(secret.reveal()),
                encode_segment(token.reveal())
            ),
        };
        let client = Client::new(options.clone());
        let asker = Asker { client, stop };
        let answer = asker.post(&self.service, &form)?;
        let answer: serde_json::Value = serde_json::from_str(&answer).map_err(|_| useless(&self.service))?;
        let token = answer.get("access_token").and_then(serde_json::Value::as_str);
        let seconds = answer.get("expires_in").and_then(serde_json::Value::as_u64);
        let token = Secret::new(token.ok_or_else(|| useless(&self.service))?);
        Ok(Timed {
            value: token.checked(&format!("the token of {}", self.service))?,
            until: now + Duration::from_secs(seconds.unwrap_or(0).min(86_400)),
        })
    }

    /// A JSON Web Token that says who asks, signed (RFC 7523).
    fn claim(&self, email: &str, id: &str, pem: &Secret, now: SystemTime) -> Result<String, Fault> {
        let refuse =
            |why: String| FaultKind::Option(format!("the private key of {email} cannot be used: {why}"));
        let der = PrivatePkcs8KeyDer::from_pem_slice(pem.reveal().as_bytes());
        let der = der.map_err(|fault| refuse(fault.to_string()))?;
        let key =
            RsaKeyPair::from_pkcs8(der.secret_pkcs8_der()).map_err(|fault| refuse(fault.to_string()))?;
        let since = now.duration_since(UNIX_EPOCH).unwrap_or_default();
        let head = serde_json::json!({"alg": "RS256", "typ": "JWT", "kid": id});
        let body = serde_json::json!({
            "iss": email,
            "scope": SCOPE,
            "aud": self.service.to_string(),
            "iat": since.as_secs(),
            "exp": (since + CLAIM_VALIDITY).as_secs(),
        });
        let encode = |bytes: &[u8]| URL_SAFE_NO_PAD.encode(bytes);
        let text = format!(
            "{}.{}",
            encode(head.to_string().as_bytes()),
            encode(body.to_string().as_bytes())
        );
        let mut signature = vec![0; key.public().modulus_len()];
        key.sign(
            &RSA_PKCS1_SHA256,
            &SystemRandom::new(),
            text.as_bytes(),
            &mut signature,
        )
        .map_err(|fault| refuse(fault.to_string()))?;
        Ok(format!("{text}.{}", encode(&signature)))
    }
}
