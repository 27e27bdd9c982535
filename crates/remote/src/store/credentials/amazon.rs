//! Identities, region and endpoint of S3, from options and the environment. Amazon's files are read by its SDK.

use std::path::PathBuf;

use super::issuer::Way;
use super::source::{Source, delegated};
use super::{firmware_says, shown, stamp};
use crate::credentials::{Credential, Keys, Secret, Wanted};
use crate::environment::Environment;
use crate::fault::{Fault, Result};
use crate::options::RemoteOptions;
use crate::url::{Scheme, Url, encode_segment};

/// The region, if nothing names one.
const DEFAULT_REGION: &str = "us-east-1";

/// The hosts of the services of containers of ECS and EKS, besides the container itself.
const CONTAINER_HOSTS: &[&str] = &["169.254.170.2", "169.254.170.23", "fd00:ec2::23"];

/// The metadata service of machines of EC2.
const INSTANCE_SERVICE: &str = "http://169.254.169.254";

/// The variables that override the region and the endpoint of a profile.
const OVERRIDES: &[&str] = &[
    "AWS_ENDPOINT_URL_S3",
    "AWS_ENDPOINT_URL",
    "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS",
    "AWS_DEFAULT_REGION",
];

/// Return the region that options, the provider or the environment name.
pub(crate) fn region(given: Option<String>, environment: Environment<'_>) -> Result<String> {
    let region = given.or_else(|| environment.get(&["AWS_REGION", "AWS_DEFAULT_REGION"]));
    let region = region.unwrap_or_else(|| DEFAULT_REGION.to_owned());
    let may = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
    if !region.bytes().all(may) {
        return Err(Fault::option("invalid region: expected letters, digits and -"));
    }
    Ok(region)
}

/// Return the endpoint of a service that the environment names.
pub(crate) fn endpoint(service: &str, environment: Environment<'_>) -> Option<String> {
    if environment.is("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", &["true"]) {
        return None;
    }
    environment.get(&[&format!("AWS_ENDPOINT_URL_{service}"), "AWS_ENDPOINT_URL"])
}

/// Return the first source that is configured, in the order of Amazon's tools: options, keys in the environment, profiles
/// (by the SDK), the token of a pod, the service of a container, the metadata service of EC2.
pub(crate) fn source(options: &RemoteOptions, environment: Environment<'_>) -> Result<Option<Source>> {
    if let Some((id, secret)) = options.access_key.clone() {
        let session = options.session_token.as_ref().or(options.given_token());
        let keys = Keys::new(Secret::new(id), secret, session.cloned());
        return Ok(Some(Source::known("storage_options", Credential::Keys(keys))));
    }
    if options.profile.is_none()
        && let Some(mut keys) = environment.keys("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")?
    {
        keys.session = environment.secret(&["AWS_SESSION_TOKEN"])?;
        return Ok(Some(Source::known("AWS_ACCESS_KEY_ID", Credential::Keys(keys))));
    }
    if let Some(wanted) = profile(options, environment) {
        return delegated(options, wanted).map(Some);
    }
    if let Some(source) = web_identity(environment)? {
        return Ok(Some(source));
    }
    match container(environment)? {
        Some(source) => Ok(Some(source)),
        None => instance(environment),
    }
}

/// Return the profile that is named, or the default one if Amazon's files exist.
fn profile(options: &RemoteOptions, environment: Environment<'_>) -> Option<Wanted> {
    let file = |setting: &str, usual: &str| {
        let path = environment.get(&[setting]).map(PathBuf::from);
        let path = path.or_else(|| Some(environment.home()?.join(".aws").join(usual)))?;
        path.is_file().then_some(path)
    };
    let files = [
        file("AWS_CONFIG_FILE", "config"),
        file("AWS_SHARED_CREDENTIALS_FILE", "credentials"),
    ];
    let found: Vec<PathBuf> = files.into_iter().flatten().collect();
    let named = options.profile.clone();
    let named = named.or_else(|| environment.get(&["AWS_PROFILE", "AWS_DEFAULT_PROFILE"]));
    let source = match named {
        Some(profile) => format!("the profile {}", ingot_format::Quoted(&profile)),
        None => shown(found.first()?),
    };
    let stamps = found.iter().map(|path| stamp(path));
    Some(Wanted {
        profile: options.profile.clone(),
        state: stamps.chain(environment.values(OVERRIDES)).collect(),
        ..Wanted::new("s3", source)
    })
}

/// Return the token of a pod of EKS.
fn web_identity(environment: Environment<'_>) -> Result<Option<Source>> {
    let name = "AWS_WEB_IDENTITY_TOKEN_FILE";
    let Some(file) = environment.get(&[name]) else {
        return Ok(None);
    };
    let missing = || Fault::option(format!("{name} needs AWS_ROLE_ARN beside it"));
    let role = environment.get(&["AWS_ROLE_ARN"]).ok_or_else(missing)?;
    let session = environment.get(&["AWS_ROLE_SESSION_NAME"]);
    let service = match endpoint("STS", environment) {
        Some(service) => service,
        None => host_of("sts", &region(None, environment)?),
    };
    let session = encode_segment(session.as_deref().unwrap_or("ingot"));
    let role = encode_segment(&role);
    let action = "Action=AssumeRoleWithWebIdentity&Version=2011-06-15";
    let way = Way::WebIdentity {
        service: Url::parse(&service)?,
        form: format!("{action}&RoleArn={role}&RoleSessionName={session}"),
        file: file.into(),
    };
    Ok(Some(Source::issued(name.to_owned(), way)))
}

/// Return the service that the environment names for a container.
fn container(environment: Environment<'_>) -> Result<Option<Source>> {
    let relative = "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI";
    let full = "AWS_CONTAINER_CREDENTIALS_FULL_URI";
    let (name, service) = match (environment.get(&[relative]), environment.get(&[full])) {
        (Some(path), _) => (relative, format!("http://{}{path}", CONTAINER_HOSTS[0])),
        (None, Some(url)) => (full, url),
        (None, None) => return Ok(None),
    };
    let service = Url::parse(&service)?;
    let is_near = match service.address() {
        Some(address) => address.is_loopback(),
        None => service.host == "localhost",
    };
    // Keys must not cross networks that others can read. Amazon's own tools refuse this too.
    if service.scheme == Scheme::Http && !is_near && !CONTAINER_HOSTS.contains(&service.host.as_str()) {
        return Err(Fault::option(format!("{full} names another host over http://")));
    }
    let file = environment.get(&["AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"]);
    let way = Way::Container {
        service,
        file: file.map(PathBuf::from),
        token: environment.secret(&["AWS_CONTAINER_AUTHORIZATION_TOKEN"])?,
    };
    Ok(Some(Source::issued(name.to_owned(), way)))
}

/// Return the metadata service, if this is a machine of EC2.
fn instance(environment: Environment<'_>) -> Result<Option<Source>> {
    if environment.is("AWS_EC2_METADATA_DISABLED", &["true"]) {
        return Ok(None);
    }
    let says = |file| firmware_says(file, "Amazon EC2");
    let usual = || (says("sys_vendor") || says("bios_vendor")).then(|| INSTANCE_SERVICE.to_owned());
    let named = environment.get(&["AWS_EC2_METADATA_SERVICE_ENDPOINT"]);
    let Some(service) = named.or_else(usual) else {
        return Ok(None);
    };
    let name = "the metadata service of this machine (not used with AWS_EC2_METADATA_DISABLED=true)";
    let way = Way::Instance(Url::parse(&service)?);
    Ok(Some(Source::issued(name.to_owned(), way)))
}

/// Return the URL of a service of Amazon.
pub(crate) fn host_of(service: &str, region: &str) -> String {
    let china = if region.starts_with("cn-") { ".cn" } else { "" };
    format!("https://{service}.{region}.amazonaws.com{china}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn containers_need_tls_for_other_hosts() {
        let find = |url: &str| {
            let variable = |name: &str| match name {
                "AWS_CONTAINER_CREDENTIALS_FULL_URI" => Some(url.to_owned()),
                "AWS_EC2_METADATA_DISABLED" => Some("true".to_owned()),
                _ => None,
            };
            source(&RemoteOptions::default(), Environment(&variable))
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
    fn services_have_regional_hosts() {
        assert_eq!(host_of("sts", "eu-west-1"), "https://sts.eu-west-1.amazonaws.com");
        assert_eq!(
            host_of("s3", "cn-north-1"),
            "https://s3.cn-north-1.amazonaws.com.cn"
        );
    }
}
