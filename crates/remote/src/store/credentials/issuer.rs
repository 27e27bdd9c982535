//! Services and providers of identities.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use jiff::Timestamp;

use super::asker::{Asker, element};
use super::shown;
use crate::credentials::{Credential, Credentials, Identity, Keys, Secret, Wanted};
use crate::fault::{Fault, FaultKind, Result};
use crate::http::helper::on_helper_thread;
use crate::http::message::HttpRequest;
use crate::http::pace::Deadline;
use crate::options::RemoteOptions;
use crate::url::{Url, encode_segment};

/// A provider, equal only to itself.
#[derive(Clone, Debug)]
pub(super) struct Provider(pub(super) Arc<dyn Credentials>);

impl PartialEq for Provider {
    fn eq(&self, other: &Provider) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Provider {}

impl Provider {
    /// Call the provider on a helper thread.
    fn ask(&self, wanted: &Wanted, deadline: Deadline<'_>) -> Result<Identity> {
        let (provider, wanted) = (Arc::clone(&self.0), wanted.clone());
        let (source, begun) = (wanted.source.clone(), Instant::now());
        let answer = on_helper_thread(move || provider.identity(&wanted), deadline)?;
        if deadline.left()?.is_zero() && answer.is_err() {
            return Err(FaultKind::Slow("the provider did not answer", begun.elapsed()).into());
        }
        answer.map_err(FaultKind::Provider)?.checked(&source)
    }
}

/// A service or a provider of identities.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Issuer {
    /// The name in errors.
    pub(super) name: String,
    pub(super) way: Way,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// Amazon's token service, with this form and the token in a file, as in pods of EKS.
    WebIdentity {
        service: Url,
        form: String,
        file: PathBuf,
    },
    /// The service of a container of ECS or EKS, with the token in a file or this one.
    Container {
        service: Url,
        file: Option<PathBuf>,
        token: Option<Secret>,
    },
    /// The service of a machine of EC2.
    Instance(Url),
    /// The caller's provider, or the vendors' SDKs.
    Provider(Provider, Wanted),
}

impl Issuer {
    /// Whether no options refer to the provider any more.
    pub(super) fn is_unused(&self) -> bool {
        matches!(&self.way, Way::Provider(provider, _) if Arc::strong_count(&provider.0) == 1)
    }

    /// Request an identity.
    pub(super) fn issue(&self, options: &RemoteOptions, deadline: Deadline<'_>) -> Result<Option<Identity>> {
        let ask =
            |service: &Url, request: &HttpRequest<'_>| Asker::of(service, options, deadline).ask(request);
        match &self.way {
            Way::WebIdentity { service, form, file } => {
                let token = token_in(file)?;
                let token = token.ok_or_else(|| Fault::option(format!("{} is empty", shown(file))))?;
                let body = format!("{form}&WebIdentityToken={}", encode_segment(token.reveal()));
                let mut request = HttpRequest::new("POST", service);
                request.add("Content-Type", "application/x-www-form-urlencoded");
                request.body = body.as_bytes();
                let answer = ask(service, &request)?;
                let text = |name: &str| element(&answer, name).map(ToOwned::to_owned);
                let fields = ["AccessKeyId", "SecretAccessKey", "SessionToken", "Expiration"];
                keys_of(fields.map(text), service).map(Some)
            }
            Way::Container { service, file, token } => {
                let token = match file {
                    Some(file) => token_in(file)?,
                    None => token.clone(),
                };
                let mut request = HttpRequest::new("GET", service);
                if let Some(token) = token {
                    request.add("Authorization", token.reveal());
                }
                of_json(&ask(service, &request)?, service).map(Some)
            }
            Way::Instance(service) => of_instance(service, &Asker::of(service, options, deadline)),
            Way::Provider(provider, wanted) => provider.ask(wanted, deadline).map(Some),
        }
    }
}

/// Return the keys of an EC2 machine, by version 2 of its metadata service. The first request fetches a token, which a
/// redirect alone cannot obtain.
fn of_instance(service: &Url, asker: &Asker<'_>) -> Result<Option<Identity>> {
    let roles = "/latest/meta-data/iam/security-credentials/";
    let (token_url, roles_url) = (service.below("/latest/api/token"), service.below(roles));
    let get = |url: &Url, token: &Secret| {
        let mut request = HttpRequest::new("GET", url);
        request.add("X-aws-ec2-metadata-token", token.reveal());
        asker.ask(&request)
    };
    let first = || {
        let mut request = HttpRequest::new("PUT", &token_url);
        request.add("X-aws-ec2-metadata-token-ttl-seconds", "21600");
        let token = asker.ask(&request)?;
        let token = Secret::new(token.trim()).checked("the token of the machine")?;
        if token.is_empty() {
            return Err(useless(service));
        }
        let role = get(&roles_url, &token)?;
        Ok((token, role))
    };
    let (token, role) = match first() {
        Err(fault) if Fault::status(&fault) == Some(404) => return Ok(None),
        answer => answer?,
    };
    let role = encode_segment(role.lines().next().unwrap_or_default().trim());
    let answer = get(&service.below(&format!("{roles}{role}")), &token)?;
    of_json(&answer, service).map(Some)
}

/// Return the token in a file, or `None` if the file is empty.
fn token_in(path: &Path) -> Result<Option<Secret>> {
    let text = fs::read_to_string(path);
    let text = text.map_err(|fault| Fault::option(format!("{} cannot be read: {fault}", shown(path))))?;
    let token = Secret::new(text.trim()).checked(&format!("the token in {}", shown(path)))?;
    Ok(Some(token).filter(|token| !token.is_empty()))
}

/// Return the keys in a JSON answer.
fn of_json(body: &str, service: &Url) -> Result<Identity> {
    let answer: serde_json::Value = serde_json::from_str(body).unwrap_or_default();
    let text = |name: &str| Some(answer.get(name)?.as_str()?.to_owned());
    let fields = ["AccessKeyId", "SecretAccessKey", "Token", "Expiration"];
    keys_of(fields.map(text), service)
}

/// Return the keys that a service issued: ID, secret, session token and expiry.
fn keys_of([id, secret, session, expiry]: [Option<String>; 4], service: &Url) -> Result<Identity> {
    let checked = |text: String| Secret::new(text).checked(&format!("the answer of {service}"));
    let given = |text: Option<String>| text.filter(|text| !text.trim().is_empty());
    let needed = |text: Option<String>| checked(given(text).ok_or_else(|| useless(service))?);
    let session = given(session).map(checked).transpose()?;
    let keys = Keys::new(needed(id)?, needed(secret)?, session);
    let mut identity = Identity::new(Credential::Keys(keys));
    identity.expiry = Some(until(expiry.as_deref()));
    Ok(identity)
}

fn useless(service: &Url) -> Fault {
    Fault::malformed("it contains no keys and no token").at(service.to_string())
}

/// Parse an expiry: a time such as `2026-11-21T20:53:24Z`, or seconds since 1970. Keys without one are requested for every
/// request.
fn until(text: Option<&str>) -> SystemTime {
    let text = text.unwrap_or_default().trim();
    let seconds = text.parse().ok();
    let seconds = seconds.and_then(|seconds| Timestamp::from_second(seconds).ok());
    // Old versions of Amazon's tools write `UTC` for `Z`.
    let time = seconds.or_else(|| text.replace("UTC", "Z").parse().ok());
    time.map_or(UNIX_EPOCH, SystemTime::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expiries_are_parsed_in_the_forms_of_the_services() {
        for (text, seconds) in [
            ("1970-01-01T00:00:00Z", 0),
            ("2000-02-28T23:59:59Z", 951_782_399),
            ("2000-02-29T23:59:59.123Z", 951_868_799),
            ("2000-03-01T02:59:59+03:00", 951_868_799),
            ("2100-03-01T00:00:00UTC", 4_107_542_400),
            ("951782399", 951_782_399),
        ] {
            let since = until(Some(text)).duration_since(UNIX_EPOCH).unwrap();
            assert_eq!(since.as_secs(), seconds, "{text}");
        }
        for text in [
            "",
            "soon",
            "2000-13-01T00:00:00Z",
            "2000-01-01",
            "2000-01-01T24:00:00Z",
            "99999999999999",
        ] {
            assert_eq!(until(Some(text)), UNIX_EPOCH, "{text}");
        }
    }
}
