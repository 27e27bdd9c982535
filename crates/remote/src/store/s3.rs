//! Amazon S3, and what speaks like it.

use std::time::Instant;

use jiff::Timestamp;

use crate::fault::Fault;
use crate::http::message::HttpRequest;
use crate::http::pace::Deadline;
use crate::options::RemoteOptions;
use crate::store::bucket::Object;
use crate::store::credentials::amazon::{Amazon, host_of};
use crate::store::credentials::source::Source;
use crate::store::credentials::{Keys, Variable, set};
use crate::store::sigv4::sign;
use crate::url::{Url, encode_path, encode_segment};

/// How requests for one bucket are signed.
#[derive(Debug)]
pub(crate) struct S3Access {
    /// None: anybody may read.
    keys: Option<Source>,
    region: String,
    /// Whether who asks pays.
    is_payer: bool,
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
    variable: Variable<'_>,
) -> Result<(Url, S3Access), Fault> {
    let amazon = Amazon::read(options, variable)?;
    let url = address(rest, options, &amazon)?;
    let pays = set(variable, &["AWS_REQUEST_PAYER"]).is_some_and(|value| {
        ["requester", "true"]
            .iter()
            .any(|word| value.eq_ignore_ascii_case(word))
    });
    let access = S3Access {
        keys: amazon.source()?,
        region: amazon.region,
        is_payer: options.request_payer.unwrap_or(pays),
    };
    Ok((url, access))
}

/// Where the object is: with its bucket in the path, or in the name of the host.
fn address(rest: &str, options: &RemoteOptions, amazon: &Amazon<'_>) -> Result<Url, Fault> {
    let endpoint = match &options.endpoint {
        Some(endpoint) => Some(endpoint.clone()),
        None => amazon.endpoint("s3")?,
    };
    let path = without_version(rest);
    let version = rest.get(path.len() + VERSION.len()..);
    let Object { bucket, key } = Object::parse(path)?;
    // A certificate for *.s3.… is good for one label more, not for two.
    let in_path = options
        .path_style
        .unwrap_or(endpoint.is_some() || bucket.contains('.'));
    let endpoint = Url::parse(&endpoint.unwrap_or_else(|| host_of("s3", &amazon.region)))?;
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

impl S3Access {
    /// How requests to Google's store are signed, which takes such signatures with keys of its own.
    pub(crate) fn of_google(keys: Keys) -> S3Access {
        S3Access {
            keys: Some(Source::Known(keys)),
            region: "auto".to_owned(),
            is_payer: false,
        }
    }

    /// Forgets keys that were issued by the time `sent` and then refused. Returns whether there may be others.
    pub(crate) fn forget(&self, sent: Instant) -> bool {
        self.keys.as_ref().is_some_and(|source| source.forget(sent))
    }

    /// Signs a request, if there is anything to sign it with; says whether what it carries is secret.
    pub(crate) fn sign(
        &self,
        request: &mut HttpRequest<'_>,
        options: &RemoteOptions,
        deadline: Deadline<'_>,
    ) -> Result<bool, Fault> {
        if self.is_payer {
            let payer = ("x-amz-request-payer".to_owned(), "requester".to_owned());
            request.headers.push(payer);
        }
        let source = self.keys.as_ref();
        let keys = source.map(|source| source.keys(options, deadline)).transpose()?;
        let Some(keys) = keys.flatten() else {
            return Ok(false);
        };
        sign(request, &keys, &self.region, "s3", Timestamp::now());
        // A signature is good for this request and a few minutes, and the secret does not go over the wire. That of a
        // session does.
        Ok(keys.session.is_some())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::Secret;
    use ingot_format::StopFlag;
    use std::fs;
    use std::time::Duration;

    fn nothing(_: &str) -> Option<String> {
        None
    }

    #[test]
    fn keys_are_never_put_in_another_form() {
        let options = RemoteOptions::default();
        let located = |text: &str| locate(text, &options, &nothing).unwrap().0;
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
        let (url, _) = locate("bucket/k", &options, &nothing).unwrap();
        assert_eq!(url.to_string(), "http://localhost:9000/base/bucket/k");
        options.path_style = Some(false);
        let (url, _) = locate("bucket/k", &options, &nothing).unwrap();
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
            let (_, access) = locate("b/k", options, &variable).unwrap();
            let deadline = Deadline::within(Duration::ZERO, StopFlag::never());
            let keys = access.keys?.keys(options, deadline).unwrap();
            Some(keys?.id.reveal().to_owned())
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
