//! Identities, region and endpoint of S3, from options and the environment. Amazon's files are read by its SDK.

use std::path::PathBuf;

use super::source::{ContainerToken, Source, Way, delegated};
use super::{firmware_says, home, refused, set, shown, stamp};
use crate::credentials::{Credential, Keys, Secret, Variable, Wanted, credential};
use crate::fault::Fault;
use crate::options::{RemoteOptions, Token};
use crate::url::{Scheme, Url};

/// The region, if nothing names one.
const DEFAULT_REGION: &str = "us-east-1";

/// Where containers of ECS and EKS ask, besides themselves.
const CONTAINER_HOSTS: &[&str] = &["169.254.170.2", "169.254.170.23", "fd00:ec2::23"];

/// Where machines of EC2 ask.
const INSTANCE_SERVICE: &str = "http://169.254.169.254";

/// The variables that are more than the region and the endpoint of a profile.
const PLACES: &[&str] = &[
    "AWS_ENDPOINT_URL_S3",
    "AWS_ENDPOINT_URL",
    "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS",
    "AWS_DEFAULT_REGION",
];

/// The region that options, the provider or the environment name.
pub(crate) fn region(given: Option<String>, variable: Variable<'_>) -> Result<String, Fault> {
    let region = given
        .or_else(|| set(variable, &["AWS_REGION", "AWS_DEFAULT_REGION"]))
        .unwrap_or_else(|| DEFAULT_REGION.to_owned());
    let may = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
    if region.bytes().all(may) {
        Ok(region)
    } else {
        Err(refused("the region is none"))
    }
}

/// The endpoint of a service that the environment names.
pub(crate) fn endpoint(service: &str, variable: Variable<'_>) -> Option<String> {
    let is_off = set(variable, &["AWS_IGNORE_CONFIGURED_ENDPOINT_URLS"]);
    if is_off.is_some_and(|value| value.eq_ignore_ascii_case("true")) {
        return None;
    }
    set(
        variable,
        &[&format!("AWS_ENDPOINT_URL_{service}"), "AWS_ENDPOINT_URL"],
    )
}

/// The first source that is configured, in the order of Amazon's tools: options, keys in the environment, profiles (by
/// the SDK), the token of a pod, the service of a container, the metadata service of EC2.
pub(crate) fn source(options: &RemoteOptions, variable: Variable<'_>) -> Result<Option<Source>, Fault> {
    if let Some((id, secret)) = options.access_key.clone() {
        let token = match &options.token {
            Token::Given(token) => Some(token.clone()),
            _ => None,
        };
        let keys = Keys {
            id: Secret::new(id),
            secret,
            session: options.session_token.clone().or(token),
        };
        return Ok(Some(Source::Known("storage_options", Credential::Keys(keys))));
    }
    if options.profile.is_none()
        && let Some(keys) = Keys::of_variables(variable, "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")?
    {
        let session = credential(variable, &["AWS_SESSION_TOKEN"])?;
        let keys = Credential::Keys(Keys { session, ..keys });
        return Ok(Some(Source::Known("AWS_ACCESS_KEY_ID", keys)));
    }
    if let Some(wanted) = profile(options, variable) {
        return delegated(options, wanted).map(Some);
    }
    if let Some(source) = web_identity(variable)? {
        return Ok(Some(source));
    }
    match container(variable)? {
        Some(source) => Ok(Some(source)),
        None => instance(variable),
    }
}

/// The profile that is named, or the default one if Amazon's files exist.
fn profile(options: &RemoteOptions, variable: Variable<'_>) -> Option<Wanted> {
    let files = [
        ("AWS_CONFIG_FILE", "config"),
        ("AWS_SHARED_CREDENTIALS_FILE", "credentials"),
    ];
    let file = |(setting, usual): (&str, &str)| {
        let path = set(variable, &[setting]).map(PathBuf::from);
        let path = path.or_else(|| Some(home(variable)?.join(".aws").join(usual)))?;
        path.is_file().then_some(path)
    };
    let found: Vec<PathBuf> = files.into_iter().filter_map(file).collect();
    let named = options.profile.clone();
    let named = named.or_else(|| set(variable, &["AWS_PROFILE", "AWS_DEFAULT_PROFILE"]));
    let source = match named {
        Some(profile) => format!("the profile {}", ingot_format::Quoted(&profile)),
        None => shown(found.first()?),
    };
    let held = |name: &&str| Secret::new(variable(name).unwrap_or_default());
    Some(Wanted {
        profile: options.profile.clone(),
        state: found
            .iter()
            .map(|path| stamp(path))
            .chain(PLACES.iter().map(held))
            .collect(),
        ..Wanted::new("s3", source)
    })
}

/// The token of a pod of EKS.
fn web_identity(variable: Variable<'_>) -> Result<Option<Source>, Fault> {
    let name = "AWS_WEB_IDENTITY_TOKEN_FILE";
    let Some(file) = set(variable, &[name]) else {
        return Ok(None);
    };
    let role = set(variable, &["AWS_ROLE_ARN"]);
    let role = role.ok_or_else(|| refused(format!("{name} needs AWS_ROLE_ARN beside it")))?;
    let session = set(variable, &["AWS_ROLE_SESSION_NAME"]);
    let service = endpoint("STS", variable);
    let service = match service {
        Some(service) => service,
        None => host_of("sts", &region(None, variable)?),
    };
    let way = Way::WebIdentity {
        service: Url::parse(&service)?,
        pairs: vec![
            ("Action", "AssumeRoleWithWebIdentity".to_owned()),
            ("Version", "2011-06-15".to_owned()),
            ("RoleArn", role),
            ("RoleSessionName", session.unwrap_or_else(|| "ingot".to_owned())),
        ],
        file: file.into(),
    };
    Ok(Some(Source::issued(name.to_owned(), way)))
}

/// The service that the environment names for a container.
fn container(variable: Variable<'_>) -> Result<Option<Source>, Fault> {
    let named = |name: &str| set(variable, &[name]);
    let (relative, full) = (
        "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
        "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    );
    let (name, service) = match (named(relative), named(full)) {
        (Some(path), _) => (
            relative,
            Url::parse(&format!("http://{}{path}", CONTAINER_HOSTS[0]))?,
        ),
        (None, Some(text)) => (full, Url::parse(&text)?),
        (None, None) => return Ok(None),
    };
    // Keys would come over networks that others can read, as Amazon's own tools refuse too.
    let is_near = match service.address() {
        Some(address) => address.is_loopback(),
        None => service.host == "localhost",
    };
    if service.scheme == Scheme::Http && !is_near && !CONTAINER_HOSTS.contains(&service.host.as_str()) {
        return Err(refused(format!("{full} names another host over http://")));
    }
    let file = named("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE").map(|path| ContainerToken::File(path.into()));
    let text = credential(variable, &["AWS_CONTAINER_AUTHORIZATION_TOKEN"])?;
    let token = file.or_else(|| text.map(ContainerToken::Text));
    let (name, way) = (name.to_owned(), Way::Container { service, token });
    Ok(Some(Source::issued(name, way)))
}

/// The machine, where it is known to be one of EC2.
fn instance(variable: Variable<'_>) -> Result<Option<Source>, Fault> {
    let named = |name: &str| set(variable, &[name]);
    let is_off = named("AWS_EC2_METADATA_DISABLED").is_some_and(|value| value.eq_ignore_ascii_case("true"));
    let says = || firmware_says("sys_vendor", "Amazon EC2") || firmware_says("bios_vendor", "Amazon EC2");
    let service = match named("AWS_EC2_METADATA_SERVICE_ENDPOINT") {
        _ if is_off => return Ok(None),
        Some(service) => service,
        None if says() => INSTANCE_SERVICE.to_owned(),
        None => return Ok(None),
    };
    let way = Way::Instance {
        service: Url::parse(&service)?,
    };
    let name =
        "the metadata service of this machine (not asked with AWS_EC2_METADATA_DISABLED=true)".to_owned();
    Ok(Some(Source::issued(name, way)))
}

/// Where Amazon has a service.
pub(crate) fn host_of(service: &str, region: &str) -> String {
    let china = if region.starts_with("cn-") { ".cn" } else { "" };
    format!("https://{service}.{region}.amazonaws.com{china}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_container_is_not_sent_to_other_hosts_without_tls() {
        let find = |url: &str| {
            let variable = |name: &str| match name {
                "AWS_CONTAINER_CREDENTIALS_FULL_URI" => Some(url.to_owned()),
                "AWS_EC2_METADATA_DISABLED" => Some("true".to_owned()),
                _ => None,
            };
            source(&RemoteOptions::default(), &variable)
        };
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
    fn services_are_where_amazon_has_them() {
        assert_eq!(host_of("sts", "eu-west-1"), "https://sts.eu-west-1.amazonaws.com");
        assert_eq!(
            host_of("s3", "cn-north-1"),
            "https://s3.cn-north-1.amazonaws.com.cn"
        );
    }
}
