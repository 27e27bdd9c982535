//! Keys of S3 that somebody issues for a while: Amazon's token service, and what containers and machines of Amazon ask.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ingot_format::Escaped;
use jiff::Timestamp;

use crate::fault::{Fault, FaultKind};
use crate::http::client::Client;
use crate::options::{RemoteOptions, Secret, credential};
use crate::stop::StopFlag;
use crate::store::asker::{Asker, element, useless};
use crate::store::bucket::set;
use crate::store::issued::{Credentials, Issued, Timed};
use crate::url::{Scheme, Url, encode_segment};

/// Where containers of ECS and EKS ask, besides themselves.
const CONTAINER_HOSTS: &[&str] = &["169.254.170.2", "169.254.170.23", "fd00:ec2::23"];

/// Where machines of EC2 ask.
const INSTANCE_SERVICE: &str = "http://169.254.169.254";

/// A machine's own service answers in a few milliseconds, or is not there.
const INSTANCE_TIMEOUT: Duration = Duration::from_secs(1);

static KEYS: Issued<Issuer, Credentials> = Issued::new();

/// Who issues keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Issuer {
    /// Amazon's token service, to whoever has the token that the file holds, as pods of EKS have one.
    WebIdentity {
        service: Url,
        role: String,
        session: String,
        token_file: PathBuf,
    },
    /// What is there for a container of ECS or EKS.
    Container {
        service: Url,
        token: Option<ContainerToken>,
    },
    /// What is there for a machine of EC2.
    Instance { service: Url },
}

/// What a container shows: the token, or a file that holds the present one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ContainerToken {
    Text(Secret),
    File(PathBuf),
}

impl Issuer {
    /// Whom the environment names, in the order of Amazon's own tools; or the machine, where it is one of EC2.
    pub(crate) fn find(
        region: &str,
        variable: &dyn Fn(&str) -> Option<String>,
    ) -> Result<Option<Issuer>, Fault> {
        let named = |name: &str| set(variable, &[name]);
        if let (Some(file), Some(role)) = (named("AWS_WEB_IDENTITY_TOKEN_FILE"), named("AWS_ROLE_ARN")) {
            let usual = || format!("https://sts.{region}.amazonaws.com");
            let service = set(variable, &["AWS_ENDPOINT_URL_STS", "AWS_ENDPOINT_URL"]).unwrap_or_else(usual);
            return Ok(Some(Issuer::WebIdentity {
                service: Url::parse(&service)?,
                role,
                session: named("AWS_ROLE_SESSION_NAME").unwrap_or_else(|| "ingot".to_owned()),
                token_file: file.into(),
            }));
        }
        if let Some(service) = container(&named)? {
            let file = || {
                named("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE").map(|path| ContainerToken::File(path.into()))
            };
            let text = credential(variable, &["AWS_CONTAINER_AUTHORIZATION_TOKEN"])?;
            return Ok(Some(Issuer::Container {
                service,
                token: file().or_else(|| text.map(ContainerToken::Text)),
            }));
        }
        let is_off =
            named("AWS_EC2_METADATA_DISABLED").is_some_and(|value| value.eq_ignore_ascii_case("true"));
        let service = match named("AWS_EC2_METADATA_SERVICE_ENDPOINT") {
            _ if is_off => return Ok(None),
            Some(service) => service,
            // Elsewhere nobody is asked: the address may be anybody's, and asking it in vain takes a second.
            None if is_machine_of_amazon() => INSTANCE_SERVICE.to_owned(),
            None => return Ok(None),
        };
        Url::parse(&service).map(|service| Some(Issuer::Instance { service }))
    }

    /// Keys that are good for some minutes at least: those that were issued before, or new ones.
    pub(crate) fn credentials(
        &self,
        options: &RemoteOptions,
        stop: StopFlag<'_>,
    ) -> Result<Credentials, Fault> {
        KEYS.get(self, || self.issue(options, stop))
    }

    fn issue(&self, options: &RemoteOptions, stop: StopFlag<'_>) -> Result<Timed<Credentials>, Fault> {
        match self {
            Issuer::WebIdentity {
                service,
                role,
                session,
                token_file,
            } => {
                let token = read(token_file)?;
                let body = format!(
                    "Action=AssumeRoleWithWebIdentity&Version=2011-06-15&RoleArn={}&RoleSessionName={}&WebIdentityToken={}",
                    encode_segment(role),
                    encode_segment(session),
                    encode_segment(token.reveal()),
                );
                let client = Client::new(options.clone());
                let asker = Asker { client, stop };
                of_xml(&asker.post(service, &body)?, service)
            }
            Issuer::Container { service, token } => {
                let token = match token {
                    Some(ContainerToken::Text(text)) => Some(text.clone()),
                    Some(ContainerToken::File(path)) => Some(read(path)?),
                    None => None,
                };
                let header = |token: &Secret| ("Authorization".to_owned(), token.reveal().to_owned());
                let headers = token.as_ref().map(header).into_iter().collect();
                // It is on this machine, or next to it: no proxy leads there, and none shall see the token.
                let client = Client::direct(options.clone());
                let asker = Asker { client, stop };
                let answer = asker.ask("GET", service, headers, &[])?;
                of_json(&answer, service)
            }
            Issuer::Instance { service } => of_instance(service, options, stop),
        }
    }
}

/// The service that the environment names for a container.
fn container(named: &dyn Fn(&str) -> Option<String>) -> Result<Option<Url>, Fault> {
    if let Some(path) = named("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI") {
        return Url::parse(&format!("http://{}{path}", CONTAINER_HOSTS[0])).map(Some);
    }
    let Some(text) = named("AWS_CONTAINER_CREDENTIALS_FULL_URI") else {
        return Ok(None);
    };
    let url = Url::parse(&text)?;
    let is_near = url
        .address()
        .map_or(url.host == "localhost", |address| address.is_loopback())
        || CONTAINER_HOSTS.contains(&url.host.as_str());
    match url.scheme == Scheme::Https || is_near {
        true => Ok(Some(url)),
        // Keys would come over networks that others can read, as Amazon's own tools refuse too.
        false => Err(FaultKind::Option(
            "AWS_CONTAINER_CREDENTIALS_FULL_URI names another host over http://".to_owned(),
        )
        .into()),
    }
}

/// Whether the firmware says so.
fn is_machine_of_amazon() -> bool {
    let says =
        |path: &str, word: &str| fs::read_to_string(path).is_ok_and(|text| text.trim().starts_with(word));
    says("/sys/devices/virtual/dmi/id/sys_vendor", "Amazon EC2")
        || says("/sys/devices/virtual/dmi/id/bios_vendor", "Amazon EC2")
        || says("/sys/hypervisor/uuid", "ec2")
}

/// Version 2 of that service: first a token, which nobody gets who only makes this process follow a link.
fn of_instance(
    service: &Url,
    options: &RemoteOptions,
    stop: StopFlag<'_>,
) -> Result<Timed<Credentials>, Fault> {
    let quick = RemoteOptions {
        connect_timeout: INSTANCE_TIMEOUT,
        stall_timeout: INSTANCE_TIMEOUT,
        timeout: 3 * INSTANCE_TIMEOUT,
        retries: 0,
        ..options.clone()
    };
    let client = Client::direct(quick);
    let asker = Asker { client, stop };
    let header =
        |name: &str, value: &str| vec![(format!("X-aws-ec2-metadata-token{name}"), value.to_owned())];
    let at = |path: &str| Url {
        path: format!("{}{path}", service.path.trim_end_matches('/')),
        ..service.clone()
    };
    let token = asker.ask(
        "PUT",
        &at("/latest/api/token"),
        header("-ttl-seconds", "21600"),
        &[],
    )?;
    let token = header("", token.trim());
    let roles = "/latest/meta-data/iam/security-credentials/";
    let role = asker.ask("GET", &at(roles), token.clone(), &[])?;
    let role = role.lines().next().unwrap_or_default().trim();
    let keys = asker.ask(
        "GET",
        &at(&format!("{roles}{}", encode_segment(role))),
        token,
        &[],
    )?;
    of_json(&keys, service)
}

fn read(path: &PathBuf) -> Result<Secret, Fault> {
    let source = format!("the token in {}", Escaped(&path.to_string_lossy()));
    let text = fs::read_to_string(path)
        .map_err(|fault| FaultKind::Option(format!("{source} cannot be read: {fault}")))?;
    Secret::new(text.trim()).checked(&source)
}

fn of_xml(body: &str, service: &Url) -> Result<Timed<Credentials>, Fault> {
    let text = |name: &str| element(body, name);
    let names = ["AccessKeyId", "SecretAccessKey", "SessionToken"];
    keys_of(names.map(text), text("Expiration"), service)
}

fn of_json(body: &str, service: &Url) -> Result<Timed<Credentials>, Fault> {
    let answer: serde_json::Value = serde_json::from_str(body).map_err(|_| useless(service))?;
    let text = |name: &str| answer.get(name)?.as_str();
    let names = ["AccessKeyId", "SecretAccessKey", "Token"];
    keys_of(names.map(text), text("Expiration"), service)
}

/// The keys that a service has issued: name, secret and session.
fn keys_of(
    [id, secret, session]: [Option<&str>; 3],
    expiration: Option<&str>,
    service: &Url,
) -> Result<Timed<Credentials>, Fault> {
    let checked = |text: &str| Secret::new(text).checked(&format!("what {service} has issued"));
    let needed = |text: Option<&str>| checked(text.ok_or_else(|| useless(service))?);
    Ok(Timed {
        value: Credentials {
            id: needed(id)?,
            secret: needed(secret)?,
            session: session.map(checked).transpose()?,
        },
        until: until(expiration),
    })
}

/// When keys are over, a time such as `2026-11-21T20:53:24Z`. Where that is not said, they are asked for each time.
fn until(text: Option<&str>) -> SystemTime {
    let time = text.and_then(|text| text.trim().parse::<Timestamp>().ok());
    time.map_or(UNIX_EPOCH, SystemTime::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(pairs: &[(&str, &str)]) -> Result<Option<Issuer>, Fault> {
        Issuer::find("eu-west-1", &|name| {
            let pair = pairs.iter().find(|pair| pair.0 == name)?;
            Some(pair.1.to_owned())
        })
    }

    const OFF: (&str, &str) = ("AWS_EC2_METADATA_DISABLED", "true");

    #[test]
    fn who_is_asked_is_what_the_environment_names_first() {
        assert_eq!(of(&[OFF]).unwrap(), None);
        let instance = ("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://127.0.0.1:1");
        assert!(matches!(of(&[instance]).unwrap(), Some(Issuer::Instance { .. })));
        assert_eq!(of(&[instance, OFF]).unwrap(), None);
        let relative = ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "/v2/x");
        match of(&[instance, relative]).unwrap() {
            Some(Issuer::Container { service, token: None }) => {
                assert_eq!(service.to_string(), "http://169.254.170.2/v2/x");
            }
            other => panic!("{other:?}"),
        }
        let web = [
            ("AWS_WEB_IDENTITY_TOKEN_FILE", "/t"),
            ("AWS_ROLE_ARN", "arn:aws:iam::1:role/r"),
        ];
        match of(&[relative, web[0], web[1]]).unwrap() {
            Some(Issuer::WebIdentity { service, .. }) => {
                assert_eq!(service.to_string(), "https://sts.eu-west-1.amazonaws.com/");
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_container_is_not_sent_to_other_hosts_without_tls() {
        let find = |url: &str| of(&[OFF, ("AWS_CONTAINER_CREDENTIALS_FULL_URI", url)]);
        for url in [
            "http://127.0.0.1:9/x",
            "http://localhost/x",
            "http://[fd00:ec2::23]/v1",
            "https://h/x",
        ] {
            assert!(find(url).unwrap().is_some(), "{url}");
        }
        for url in ["http://10.0.0.1/x", "http://h/x", "http://169.254.169.254/x"] {
            assert_eq!(find(url).unwrap_err().code(), "storage-option", "{url}");
        }
    }

    #[test]
    fn times_are_those_of_the_services() {
        for (text, seconds) in [
            ("1970-01-01T00:00:00Z", 0),
            ("2000-02-28T23:59:59Z", 951_782_399),
            ("2000-02-29T23:59:59.123Z", 951_868_799),
            ("2000-03-01T02:59:59+03:00", 951_868_799),
            ("2100-03-01T00:00:00Z", 4_107_542_400),
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
        ] {
            assert_eq!(until(Some(text)), UNIX_EPOCH, "{text}");
        }
    }
}
