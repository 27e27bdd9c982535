//! Where keys of S3 come from: what the caller, the environment and the files of Amazon's tools say.

use super::asker::form;
use super::profiles::{File, Profiles};
use super::source::{ContainerToken, Proof, Role, Source, Way};
use super::sso::Sso;
use super::{Keys, Variable, firmware_says, home, refused, set};
use crate::fault::Fault;
use crate::options::{RemoteOptions, Secret, Token, credential};
use crate::url::{Scheme, Url};

/// Where buckets are when nobody says so.
const DEFAULT_REGION: &str = "us-east-1";

/// Where containers of ECS and EKS ask, besides themselves.
const CONTAINER_HOSTS: &[&str] = &["169.254.170.2", "169.254.170.23", "fd00:ec2::23"];

/// Where machines of EC2 ask.
const INSTANCE_SERVICE: &str = "http://169.254.169.254";

/// What is set up for Amazon's services: by the caller, in the environment, in the files of Amazon's tools.
pub(crate) struct Amazon<'a> {
    options: &'a RemoteOptions,
    variable: Variable<'a>,
    profiles: Profiles,
    profile: String,
    pub(crate) region: String,
}

impl<'a> Amazon<'a> {
    pub(crate) fn read(options: &'a RemoteOptions, variable: Variable<'a>) -> Result<Amazon<'a>, Fault> {
        let named = options.profile.clone();
        let named = named.or_else(|| set(variable, &["AWS_PROFILE", "AWS_DEFAULT_PROFILE"]));
        let profile = named.clone().unwrap_or_else(|| "default".to_owned());
        let profiles = match Profiles::read(variable) {
            // Of files that cannot be read, anybody needs the region at most.
            Err(_) if options.anonymous => Profiles::default(),
            profiles => profiles?,
        };
        if named.is_some() && !options.anonymous && !profiles.has(&format!("profile {profile}")) {
            let profile = ingot_format::Quoted(&profile).to_string();
            return Err(refused(format!(
                "the profile {profile} is in none of the files of Amazon's tools"
            )));
        }
        let mut amazon = Amazon {
            options,
            variable,
            profiles,
            profile,
            region: String::new(),
        };
        amazon.region = amazon.find_region()?;
        Ok(amazon)
    }

    fn find_region(&self) -> Result<String, Fault> {
        let region = self.options.region.clone();
        let region = region
            .or_else(|| set(self.variable, &["AWS_REGION", "AWS_DEFAULT_REGION"]))
            .or_else(|| self.get(&self.profile, "region"))
            .unwrap_or_else(|| DEFAULT_REGION.to_owned());
        let may = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
        match region.bytes().all(may) {
            true => Ok(region),
            false => Err(refused("the region is none")),
        }
    }

    fn get(&self, profile: &str, name: &str) -> Option<String> {
        let found = self.profiles.get(&format!("profile {profile}"), name);
        found.map(ToOwned::to_owned)
    }

    /// Where a service is, if it is not where Amazon has it: in the order of Amazon's own tools.
    pub(crate) fn endpoint(&self, service: &str) -> Result<Option<String>, Fault> {
        let variable = format!("AWS_ENDPOINT_URL_{}", service.to_ascii_uppercase());
        let is_off = set(self.variable, &["AWS_IGNORE_CONFIGURED_ENDPOINT_URLS"]);
        if is_off.is_some_and(|value| value.eq_ignore_ascii_case("true")) {
            return Ok(None);
        }
        if let Some(endpoint) = set(self.variable, &[&variable, "AWS_ENDPOINT_URL"]) {
            return Ok(Some(endpoint));
        }
        if let Some(services) = self.get(&self.profile, "services") {
            let section = format!("services {services}");
            if !self.profiles.has(&section) {
                let section = ingot_format::Quoted(&section);
                return Err(refused(format!("the profile names {section}, which no file has")));
            }
            if let Some(endpoint) = self.profiles.get(&section, &format!("{service}.endpoint_url")) {
                return Ok(Some(endpoint.to_owned()));
            }
        }
        Ok(self.get(&self.profile, "endpoint_url"))
    }

    /// Where a service is that issues keys.
    fn service(&self, name: &str, host: &str, region: &str) -> Result<Url, Fault> {
        Url::parse(&self.endpoint(name)?.unwrap_or_else(|| host_of(host, region)))
    }

    /// The first source that is configured: by the caller, the environment, the profile, for a container, or by the
    /// machine, where it is one of EC2. The order is that of Amazon's own tools.
    pub(crate) fn source(&self) -> Result<Option<Source>, Fault> {
        let options = self.options;
        if options.anonymous {
            return Ok(None);
        }
        if let Some((id, secret)) = options.access_key.clone() {
            let token = match &options.token {
                Token::Given(token) => Some(token.clone()),
                _ => None,
            };
            return Ok(Some(Source::Known(Keys {
                id: Secret::new(id),
                secret,
                session: options.session_token.clone().or(token),
            })));
        }
        // A profile that the caller names is meant, whatever the environment holds.
        let is_named = options.profile.is_some();
        if !is_named && let Some(source) = self.of_environment()? {
            return Ok(Some(source));
        }
        if let Some(source) = self.of_profile(&self.profile, !is_named, &mut Vec::new())? {
            return Ok(Some(source));
        }
        match self.container()? {
            Some(source) => Ok(Some(source)),
            None => self.instance(false),
        }
    }

    fn of_environment(&self) -> Result<Option<Source>, Fault> {
        let keys = Keys::of_variables(self.variable, "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")?;
        let Some(keys) = keys else {
            return Ok(None);
        };
        let session = credential(self.variable, &["AWS_SESSION_TOKEN"])?;
        Ok(Some(Source::Known(Keys { session, ..keys })))
    }

    /// What a profile says. `in_environment`: the environment may name the token of a pod, which is more than what the
    /// profile has. `above`: the profiles whose roles are taken with what this one has.
    fn of_profile(
        &self,
        profile: &str,
        in_environment: bool,
        above: &mut Vec<String>,
    ) -> Result<Option<Source>, Fault> {
        let get = |name: &str| self.get(profile, name);
        let named = |what: &str| format!("{what} of the profile {}", ingot_format::Quoted(profile));
        let has_keys = get("aws_access_key_id").is_some() || get("aws_secret_access_key").is_some();
        if let Some(role) = get("role_arn")
            && get("web_identity_token_file").is_none()
            && (above.is_empty() || !has_keys)
        {
            return self.of_role(profile, role, above).map(Some);
        }
        let of = |variable: &str, name: &str| {
            let held = in_environment.then(|| set(self.variable, &[variable])).flatten();
            held.or_else(|| get(name))
        };
        if let Some(file) = of("AWS_WEB_IDENTITY_TOKEN_FILE", "web_identity_token_file") {
            let name = named("AWS_WEB_IDENTITY_TOKEN_FILE or the web_identity_token_file");
            let role = of("AWS_ROLE_ARN", "role_arn");
            let role =
                role.ok_or_else(|| refused(format!("{name}: there is no AWS_ROLE_ARN and no role_arn")))?;
            let session = of("AWS_ROLE_SESSION_NAME", "role_session_name");
            let mut pairs = role_pairs("AssumeRoleWithWebIdentity", role, session);
            pairs.extend(get("duration_seconds").map(|seconds| ("DurationSeconds", seconds)));
            let proof = Proof::Token(file.into());
            return self.role(name, pairs, proof).map(Some);
        }
        if get("sso_account_id").is_some() || get("sso_role_name").is_some() {
            let name = named("the SSO");
            let sso = self.sso(profile, &name)?;
            return Ok(Some(Source::issued(name, Way::Sso(sso))));
        }
        if let Some(keys) = self.keys(File::Credentials, profile)? {
            return Ok(Some(keys));
        }
        if get("login_session").is_some() {
            let name = named("the login_session");
            let instead = "credential_process = aws configure export-credentials --format process";
            return Err(refused(format!(
                "{name} cannot be read: put `{instead}` into another profile"
            )));
        }
        if let Some(command) = get("credential_process") {
            let (name, way) = (
                named("the credential_process"),
                Way::Process(Secret::new(command)),
            );
            return Ok(Some(Source::issued(name, way)));
        }
        self.keys(File::Config, profile)
    }

    /// The keys that stand in one of the files.
    fn keys(&self, file: File, profile: &str) -> Result<Option<Source>, Fault> {
        let section = format!("profile {profile}");
        let source = |name: &str| format!("{name} of the profile {}", ingot_format::Quoted(profile));
        let get = |name: &str| {
            let found = self.profiles.get_of(file, &section, name).map(Secret::new);
            let found = found.filter(|secret| !secret.is_empty());
            found.map(|secret| secret.checked(&source(name))).transpose()
        };
        let (id, secret) = (get("aws_access_key_id")?, get("aws_secret_access_key")?);
        let Some(keys) = Keys::pair(id, secret, &source("aws_access_key_id"))? else {
            return Ok(None);
        };
        let session = get("aws_session_token")?;
        Ok(Some(Source::Known(Keys { session, ..keys })))
    }

    /// A role, taken with the keys of another profile or of where the profile says.
    fn of_role(&self, profile: &str, role: String, above: &mut Vec<String>) -> Result<Source, Fault> {
        let get = |name: &str| self.get(profile, name);
        let name = format!("the role_arn of the profile {}", ingot_format::Quoted(profile));
        let refuse = |why: &str| refused(format!("{name}: {why}"));
        if get("mfa_serial").is_some() {
            return Err(refuse(
                "its mfa_serial asks for a code: export the keys, or give a credential_process",
            ));
        }
        above.push(profile.to_owned());
        let source = match (get("source_profile"), get("credential_source").as_deref()) {
            (Some(source), None) if source != profile && above.contains(&source) => {
                return Err(refuse("its source_profile leads back to it"));
            }
            (Some(source), None) if above.len() > 1 && source == profile => {
                return Err(refuse("its source_profile is itself"));
            }
            (Some(source), None) => self.of_profile(&source, false, above)?,
            (None, Some("Environment")) => self.of_environment()?,
            (None, Some("EcsContainer")) => self.container()?,
            (None, Some("Ec2InstanceMetadata")) => self.instance(true)?,
            _ => {
                return Err(refuse(
                    "expected a source_profile or a credential_source of Environment, EcsContainer or \
                     Ec2InstanceMetadata",
                ));
            }
        };
        let source = source.ok_or_else(|| refuse("the source of its keys has none"))?;
        let mut pairs = role_pairs("AssumeRole", role, get("role_session_name"));
        for (name, value) in [
            ("ExternalId", "external_id"),
            ("DurationSeconds", "duration_seconds"),
        ] {
            pairs.extend(get(value).map(|value| (name, value)));
        }
        self.role(name, pairs, Proof::Keys(Box::new(source)))
    }

    fn role(&self, name: String, pairs: Vec<(&'static str, String)>, proof: Proof) -> Result<Source, Fault> {
        let way = Way::Role(Role {
            service: self.service("sts", "sts", &self.region)?,
            region: self.region.clone(),
            pairs,
            proof,
        });
        Ok(Source::issued(name, way))
    }

    fn sso(&self, profile: &str, name: &str) -> Result<Sso, Fault> {
        let session = self.get(profile, "sso_session");
        let section = session.as_ref().map(|session| format!("sso-session {session}"));
        let get = |name: &str| {
            let of_session = section
                .as_ref()
                .and_then(|section| self.profiles.get(section, name));
            of_session
                .map(ToOwned::to_owned)
                .or_else(|| self.get(profile, name))
        };
        let needed = |key: &str| get(key).ok_or_else(|| refused(format!("{name}: there is no {key}")));
        let (start, region) = (needed("sso_start_url")?, needed("sso_region")?);
        let folder =
            home(self.variable).ok_or_else(|| refused(format!("{name}: there is no home folder")))?;
        Ok(Sso {
            portal: self.service("sso", "portal.sso", &region)?,
            login: self.service("sso_oidc", "oidc", &region)?,
            query: form([
                ("role_name", needed("sso_role_name")?.as_str()),
                ("account_id", needed("sso_account_id")?.as_str()),
            ]),
            is_renewed: session.is_some(),
            file: Sso::file(&folder, session.as_deref().unwrap_or(&start)),
        })
    }

    /// The service that the environment names for a container.
    fn container(&self) -> Result<Option<Source>, Fault> {
        let named = |name: &str| set(self.variable, &[name]);
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
        let file =
            named("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE").map(|path| ContainerToken::File(path.into()));
        let text = credential(self.variable, &["AWS_CONTAINER_AUTHORIZATION_TOKEN"])?;
        let token = file.or_else(|| text.map(ContainerToken::Text));
        let (name, way) = (name.to_owned(), Way::Container { service, token });
        Ok(Some(Source::issued(name, way)))
    }

    /// The machine, where it is known to be one of EC2 or has to be one.
    fn instance(&self, has_to_be: bool) -> Result<Option<Source>, Fault> {
        let named = |name: &str| set(self.variable, &[name]);
        let is_off =
            named("AWS_EC2_METADATA_DISABLED").is_some_and(|value| value.eq_ignore_ascii_case("true"));
        let says = || {
            has_to_be
                || firmware_says("sys_vendor", "Amazon EC2")
                || firmware_says("bios_vendor", "Amazon EC2")
        };
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
}

/// Where Amazon has a service.
pub(crate) fn host_of(service: &str, region: &str) -> String {
    let china = if region.starts_with("cn-") { ".cn" } else { "" };
    format!("https://{service}.{region}.amazonaws.com{china}")
}

fn role_pairs(action: &str, role: String, session: Option<String>) -> Vec<(&'static str, String)> {
    vec![
        ("Action", action.to_owned()),
        ("Version", "2011-06-15".to_owned()),
        ("RoleArn", role),
        ("RoleSessionName", session.unwrap_or_else(|| "ingot".to_owned())),
    ]
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
            Amazon::read(&RemoteOptions::default(), &variable)?.source()
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
