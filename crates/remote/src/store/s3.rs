//! Amazon S3, and what speaks like it.

use std::fs;
use std::path::PathBuf;

use jiff::Timestamp;
use ring::{digest, hmac};

use crate::fault::{Fault, FaultKind};
use crate::http::message::HttpRequest;
use crate::options::{RemoteOptions, Secret, credential};
use crate::stop::StopFlag;
use crate::store::bucket::{Object, set};
use crate::store::issued::Credentials;
use crate::store::issuer::Issuer;
use crate::url::{Url, encode_path, encode_segment};

/// Where buckets are when nobody says so.
const DEFAULT_REGION: &str = "us-east-1";

/// Where keys come from.
#[derive(Debug)]
enum Keys {
    /// They stand somewhere.
    Known(Credentials),
    /// They are issued for a while, and then again.
    Issued(Issuer, Box<RemoteOptions>),
}

/// How requests for one bucket are signed.
#[derive(Debug)]
pub(crate) struct S3Access {
    /// None: anybody may read.
    keys: Option<Keys>,
    region: String,
}

/// What stands before the name of a version. Elsewhere a question mark is part of the key.
const VERSION: &str = "?versionId=";

/// `path` without the name of a version.
pub(crate) fn without_version(path: &str) -> &str {
    path.rsplit_once(VERSION).map_or(path, |(path, _)| path)
}

/// The URL of what follows `s3://`, and how to be let in there.
pub(crate) fn locate(
    rest: &str,
    options: &RemoteOptions,
    variable: &dyn Fn(&str) -> Option<String>,
    stop: StopFlag<'_>,
) -> Result<(Url, S3Access), Fault> {
    let profile = Profile::read(variable);
    let region = region(options, variable, &profile)?;
    let url = address(rest, &region, options, variable)?;
    let keys = match options.anonymous {
        true => None,
        false => match known(options, variable, &profile)? {
            Some(credentials) => Some(Keys::Known(credentials)),
            None => issued(&region, options, variable, stop)?,
        },
    };
    Ok((url, S3Access { keys, region }))
}

fn region(
    options: &RemoteOptions,
    variable: &dyn Fn(&str) -> Option<String>,
    profile: &Profile,
) -> Result<String, Fault> {
    let region = options
        .region
        .clone()
        .or_else(|| set(variable, &["AWS_REGION", "AWS_DEFAULT_REGION"]))
        .or_else(|| profile.get("region"))
        .unwrap_or_else(|| DEFAULT_REGION.to_owned());
    match region
        .bytes()
        .all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
    {
        true => Ok(region),
        false => Err(FaultKind::Option("the region is none".to_owned()).into()),
    }
}

/// Where the object is: with its bucket in the path, or in the name of the host.
fn address(
    rest: &str,
    region: &str,
    options: &RemoteOptions,
    variable: &dyn Fn(&str) -> Option<String>,
) -> Result<Url, Fault> {
    let endpoint = options
        .endpoint
        .clone()
        .or_else(|| set(variable, &["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"]));
    let path = without_version(rest);
    let version = rest.get(path.len() + VERSION.len()..);
    let Object { bucket, key } = Object::parse(path)?;
    // A certificate for *.s3.… is good for one label more, not for two.
    let in_path = options
        .path_style
        .unwrap_or(endpoint.is_some() || bucket.contains('.'));
    let endpoint = match endpoint {
        Some(endpoint) => Url::parse(&endpoint)?,
        None => Url::parse(&format!("https://s3.{region}.amazonaws.com"))?,
    };
    let folder = endpoint.path.trim_end_matches('/');
    let key = encode_path(key);
    let (host, path) = match in_path {
        true => (endpoint.host.clone(), format!("{folder}/{bucket}/{key}")),
        false => (format!("{bucket}.{}", endpoint.host), format!("{folder}/{key}")),
    };
    Ok(Url {
        host,
        path,
        query: version.map(|version| format!("versionId={}", encode_segment(version))),
        user: None,
        ..endpoint
    })
}

/// Keys that somebody issues, where anybody does.
fn issued(
    region: &str,
    options: &RemoteOptions,
    variable: &dyn Fn(&str) -> Option<String>,
    stop: StopFlag<'_>,
) -> Result<Option<Keys>, Fault> {
    let Some(issuer) = Issuer::find(region, variable)? else {
        return Ok(None);
    };
    // Not every machine has a role. Who has none reads what anybody may.
    if matches!(issuer, Issuer::Instance { .. }) && issuer.credentials(options, stop).is_err() {
        return Ok(None);
    }
    Ok(Some(Keys::Issued(issuer, Box::new(options.clone()))))
}

/// The credentials that are given, else those of the environment, else of the files that Amazon's own tools keep.
fn known(
    options: &RemoteOptions,
    variable: &dyn Fn(&str) -> Option<String>,
    profile: &Profile,
) -> Result<Option<Credentials>, Fault> {
    if let Some((id, secret)) = options.access_key.clone() {
        let (id, session) = (Secret::new(id), options.session_token.clone());
        return Ok(Some(Credentials { id, secret, session }));
    }
    let of_variables = |name: &str| credential(variable, &[&name.to_ascii_uppercase()]);
    match Credentials::of(&of_variables)? {
        None => Credentials::of(&|name| profile.credential(name)),
        found => Ok(found),
    }
}

impl Credentials {
    /// What stands under the names that Amazon's own tools give them, if it is enough.
    fn of(look: &dyn Fn(&str) -> Result<Option<Secret>, Fault>) -> Result<Option<Credentials>, Fault> {
        let (id, secret) = (look("aws_access_key_id")?, look("aws_secret_access_key")?);
        let (Some(id), Some(secret)) = (id, secret) else {
            return Ok(None);
        };
        let session = look("aws_session_token")?;
        Ok(Some(Credentials { id, secret, session }))
    }
}

/// What the files `~/.aws/credentials` and `~/.aws/config` hold for one profile; the first comes first.
struct Profile(Vec<(String, String)>);

impl Profile {
    fn read(variable: &dyn Fn(&str) -> Option<String>) -> Profile {
        let name = set(variable, &["AWS_PROFILE"]).unwrap_or_else(|| "default".to_owned());
        let file = |setting: &str, usual: &str| {
            let home = || {
                set(variable, &["HOME", "USERPROFILE"])
                    .map(|home| PathBuf::from(home).join(".aws").join(usual))
            };
            let path = set(variable, &[setting]).map(PathBuf::from).or_else(home)?;
            fs::read_to_string(path).ok()
        };
        let mut pairs = Vec::new();
        if let Some(text) = file("AWS_SHARED_CREDENTIALS_FILE", "credentials") {
            pairs.extend(section(&text, &[&name]));
        }
        if let Some(text) = file("AWS_CONFIG_FILE", "config") {
            pairs.extend(section(&text, &[&name, &format!("profile {name}")]));
        }
        Profile(pairs)
    }

    fn get(&self, name: &str) -> Option<String> {
        let pair = self.0.iter().find(|pair| pair.0 == name)?;
        Some(pair.1.clone())
    }

    fn credential(&self, name: &str) -> Result<Option<Secret>, Fault> {
        let found = self.get(name).map(Secret::new);
        found
            .map(|secret| secret.checked(&format!("{name} in the files of Amazon's tools")))
            .transpose()
    }
}

/// The pairs that stand below `[name]`, for any of these names.
fn section(text: &str, names: &[&str]) -> Vec<(String, String)> {
    let mut pairs = Vec::new();
    let mut is_ours = false;
    for line in text.lines() {
        let line = line.trim();
        if let Some(name) = line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            is_ours = names.contains(&name.trim());
        } else if is_ours
            && !line.starts_with(['#', ';'])
            && let Some((name, value)) = line.split_once('=')
        {
            pairs.push((name.trim().to_ascii_lowercase(), value.trim().to_owned()));
        }
    }
    pairs
}

impl S3Access {
    /// Signs a request, if there is anything to sign it with; says whether there is.
    pub(crate) fn sign(&self, request: &mut HttpRequest<'_>, stop: StopFlag<'_>) -> Result<bool, Fault> {
        let credentials = match &self.keys {
            None => return Ok(false),
            Some(Keys::Known(credentials)) => credentials,
            Some(Keys::Issued(issuer, options)) => &issuer.credentials(options, stop)?,
        };
        sign(request, credentials, &self.region, &timestamp(Timestamp::now()));
        // A signature is good for this request and a few minutes, and the secret does not go over the wire. That of a
        // session does.
        Ok(credentials.session.is_some())
    }
}

/// Signature Version 4, over a request without a body.
fn sign(request: &mut HttpRequest<'_>, credentials: &Credentials, region: &str, time: &str) {
    let mut add = |name: &str, value: &str| request.headers.push((name.to_owned(), value.to_owned()));
    add(
        "x-amz-content-sha256",
        &hex(digest::digest(&digest::SHA256, b"").as_ref()),
    );
    add("x-amz-date", time);
    if let Some(session) = &credentials.session {
        add("x-amz-security-token", session.reveal());
    }
    let mut signed: Vec<(String, &str)> = request
        .headers
        .iter()
        .map(|(name, value)| (name.to_ascii_lowercase(), value.trim()))
        .filter(|(name, _)| name == "range" || name.starts_with("x-amz-"))
        .collect();
    let authority = request.url.authority();
    signed.push(("host".to_owned(), &authority));
    signed.sort();
    let names: Vec<&str> = signed.iter().map(|header| header.0.as_str()).collect();
    let names = names.join(";");
    let lines: String = signed
        .iter()
        .map(|(name, value)| format!("{name}:{value}\n"))
        .collect();
    let canonical = format!(
        "{}\n{}\n{}\n{lines}\n{names}\n{}",
        request.method,
        request.url.path,
        canonical_query(request.url.query.as_deref().unwrap_or_default()),
        hex(digest::digest(&digest::SHA256, b"").as_ref()),
    );
    let day = &time[..8];
    let scope = format!("{day}/{region}/s3/aws4_request");
    let digest = digest::digest(&digest::SHA256, canonical.as_bytes());
    let to_sign = format!("AWS4-HMAC-SHA256\n{time}\n{scope}\n{}", hex(digest.as_ref()));
    let mut key = format!("AWS4{}", credentials.secret.reveal()).into_bytes();
    for step in [day, region, "s3", "aws4_request"] {
        key = keyed(&key, step.as_bytes());
    }
    let signature = hex(&keyed(&key, to_sign.as_bytes()));
    let value = format!(
        "AWS4-HMAC-SHA256 Credential={}/{scope}, SignedHeaders={names}, Signature={signature}",
        credentials.id.reveal()
    );
    request.headers.push(("Authorization".to_owned(), value));
}

/// The pairs of a query in the order of their names, each with a value.
fn canonical_query(query: &str) -> String {
    let pairs = query.split('&').filter(|pair| !pair.is_empty());
    let mut pairs: Vec<String> = pairs
        .map(|pair| match pair.contains('=') {
            true => pair.to_owned(),
            false => format!("{pair}="),
        })
        .collect();
    pairs.sort();
    pairs.join("&")
}

fn keyed(key: &[u8], text: &[u8]) -> Vec<u8> {
    hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, key), text)
        .as_ref()
        .to_vec()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A time as signatures have it, such as `20130524T000000Z`.
fn timestamp(time: Timestamp) -> String {
    time.strftime("%Y%m%dT%H%M%SZ").to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nothing(_: &str) -> Option<String> {
        None
    }

    /// The example of Amazon's page "Signature Calculations for the Authorization Header", GET Object.
    #[test]
    fn the_published_example_is_signed_as_published() {
        let url = Url::parse("https://examplebucket.s3.amazonaws.com/test.txt").unwrap();
        let mut request = HttpRequest {
            method: "GET",
            url: &url,
            headers: vec![("Range".to_owned(), "bytes=0-9".to_owned())],
            body: &[],
        };
        let credentials = Credentials {
            id: Secret::new("AKIAIOSFODNN7EXAMPLE"),
            secret: Secret::new("wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"),
            session: None,
        };
        sign(&mut request, &credentials, "us-east-1", "20130524T000000Z");
        let value = &request.headers.last().unwrap().1;
        assert_eq!(
            value,
            "AWS4-HMAC-SHA256 Credential=AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request, \
             SignedHeaders=host;range;x-amz-content-sha256;x-amz-date, \
             Signature=f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41"
        );
    }

    #[test]
    fn times_are_written_as_signatures_have_them() {
        for (seconds, expected) in [
            (0, "19700101T000000Z"),
            (951_782_399, "20000228T235959Z"),
            (951_868_799, "20000229T235959Z"),
            (1_369_353_600, "20130524T000000Z"),
            (4_107_542_400, "21000301T000000Z"),
        ] {
            assert_eq!(timestamp(Timestamp::from_second(seconds).unwrap()), expected);
        }
    }

    #[test]
    fn keys_are_never_put_in_another_form() {
        let options = RemoteOptions::default();
        let located = |text: &str| locate(text, &options, &nothing, StopFlag::never()).unwrap().0;
        assert_eq!(
            located("bucket/a/../b//c d?x#y%2F").path,
            "/a/../b//c%20d%3Fx%23y%252F"
        );
        assert_eq!(located("bucket/k").host, "bucket.s3.us-east-1.amazonaws.com");
        assert_eq!(located("dotted.bucket/k").host, "s3.us-east-1.amazonaws.com");
        let versioned = located("bucket/k?versionId=a/b");
        assert_eq!(versioned.target(), "/k?versionId=a%2Fb");
    }

    #[test]
    fn an_endpoint_takes_the_bucket_in_its_path() {
        let mut options = RemoteOptions {
            endpoint: Some("http://localhost:9000/base/".to_owned()),
            ..RemoteOptions::default()
        };
        let (url, _) = locate("bucket/k", &options, &nothing, StopFlag::never()).unwrap();
        assert_eq!(url.to_string(), "http://localhost:9000/base/bucket/k");
        options.path_style = Some(false);
        let (url, _) = locate("bucket/k", &options, &nothing, StopFlag::never()).unwrap();
        assert_eq!(url.to_string(), "http://bucket.localhost:9000/base/k");
    }

    #[test]
    fn credentials_come_from_the_caller_then_the_environment_then_the_files() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("credentials");
        let text = "[default]\naws_access_key_id = file\naws_secret_access_key=s\n# no\n[other]\naws_access_key_id=o\naws_secret_access_key=s\n";
        fs::write(&path, text).unwrap();
        let path = path.to_str().unwrap().to_owned();
        let look = |pairs: Vec<(&str, String)>, options: &RemoteOptions| {
            let pairs: Vec<(String, String)> = pairs.into_iter().map(|(n, v)| (n.to_owned(), v)).collect();
            let variable = move |name: &str| {
                let pair = pairs.iter().find(|pair| pair.0 == name)?;
                Some(pair.1.clone())
            };
            let (_, access) = locate("b/k", options, &variable, StopFlag::never()).unwrap();
            access.keys.map(|keys| match keys {
                Keys::Known(credentials) => credentials.id.reveal().to_owned(),
                Keys::Issued(..) => "issued".to_owned(),
            })
        };
        let mut options = RemoteOptions::default();
        let file = ("AWS_SHARED_CREDENTIALS_FILE", path);
        assert_eq!(look(vec![], &options), None, "anybody, where nothing says who");
        assert_eq!(look(vec![file.clone()], &options).as_deref(), Some("file"));
        let other = ("AWS_PROFILE", "other".to_owned());
        assert_eq!(look(vec![file.clone(), other], &options).as_deref(), Some("o"));
        let environment = vec![
            file.clone(),
            ("AWS_ACCESS_KEY_ID", "env".to_owned()),
            ("AWS_SECRET_ACCESS_KEY", "s".to_owned()),
        ];
        assert_eq!(look(environment.clone(), &options).as_deref(), Some("env"));
        options.access_key = Some(("given".to_owned(), Secret::new("s")));
        assert_eq!(look(environment.clone(), &options).as_deref(), Some("given"));
        options.anonymous = true;
        assert_eq!(look(environment, &options), None);
    }
}
