//! Amazon S3, and what speaks like it.

use std::time::Instant;

use jiff::Timestamp;

use crate::credentials::Variable;
use crate::fault::Fault;
use crate::http::message::HttpRequest;
use crate::http::pace::Deadline;
use crate::options::RemoteOptions;
use crate::store::bucket::Object;
use crate::store::credentials::amazon::{self, host_of};
use crate::store::credentials::set;
use crate::store::credentials::source::{Source, given};
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
    deadline: Deadline<'_>,
) -> Result<(Url, S3Access), Fault> {
    let source = match given(options, "s3") {
        _ if options.anonymous => None,
        None => amazon::source(options, variable)?,
        source => source,
    };
    // Providers know the region and the endpoint too, as profiles have them.
    let found = source.as_ref().filter(|source| source.is_provider());
    let found = found
        .map(|source| source.identity(options, deadline))
        .transpose()?
        .flatten();
    let (region, endpoint) = found.map_or((None, None), |found| (found.region, found.endpoint));
    let region = amazon::region(options.region.clone().or(region), variable)?;
    let endpoint = options.endpoint.clone().or(endpoint);
    let endpoint = endpoint.or_else(|| amazon::endpoint("S3", variable));
    let url = address(rest, options.path_style, endpoint, &region)?;
    let pays = set(variable, &["AWS_REQUEST_PAYER"]).is_some_and(|value| {
        ["requester", "true"]
            .iter()
            .any(|word| value.eq_ignore_ascii_case(word))
    });
    let access = S3Access {
        keys: source,
        region,
        is_payer: options.request_payer.unwrap_or(pays),
    };
    Ok((url, access))
}

/// Where the object is: with its bucket in the path, or in the name of the host.
fn address(
    rest: &str,
    path_style: Option<bool>,
    endpoint: Option<String>,
    region: &str,
) -> Result<Url, Fault> {
    let path = without_version(rest);
    let version = rest.get(path.len() + VERSION.len()..);
    let Object { bucket, key } = Object::parse(path)?;
    // A certificate for *.s3.… is good for one label more, not for two.
    let in_path = path_style.unwrap_or(endpoint.is_some() || bucket.contains('.'));
    let endpoint = Url::parse(&endpoint.unwrap_or_else(|| host_of("s3", region)))?;
    let folder = endpoint.path.trim_end_matches('/');
    let key = encode_path(key);
    let (host, path) = if in_path {
        (endpoint.host.clone(), format!("{folder}/{bucket}/{key}"))
    } else {
        (format!("{bucket}.{}", endpoint.host), format!("{folder}/{key}"))
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
    pub(crate) fn of_google(keys: Source) -> S3Access {
        S3Access {
            keys: Some(keys),
            region: "auto".to_owned(),
            is_payer: false,
        }
    }

    /// The source of the keys.
    pub(crate) fn source(&self) -> Option<&Source> {
        self.keys.as_ref()
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
    use crate::credentials::Secret;
    use ingot_format::StopFlag;
    use std::time::Duration;

    fn soon() -> Deadline<'static> {
        Deadline::within(Duration::ZERO, StopFlag::never())
    }

    fn nothing(_: &str) -> Option<String> {
        None
    }

    #[test]
    fn keys_are_never_put_in_another_form() {
        let options = RemoteOptions::default();
        let located = |text: &str| locate(text, &options, &nothing, soon()).unwrap().0;
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
        let (url, _) = locate("bucket/k", &options, &nothing, soon()).unwrap();
        assert_eq!(url.to_string(), "http://localhost:9000/base/bucket/k");
        options.path_style = Some(false);
        let (url, _) = locate("bucket/k", &options, &nothing, soon()).unwrap();
        assert_eq!(url.to_string(), "http://bucket.localhost:9000/base/k");
    }

    #[test]
    fn keys_come_from_the_caller_then_the_environment() {
        let look = |pairs: &[(&str, &str)], options: &RemoteOptions| {
            let variable = |name: &str| {
                let pair = pairs.iter().find(|pair| pair.0 == name)?;
                Some(pair.1.to_owned())
            };
            let (_, access) = locate("b/k", options, &variable, soon())?;
            let keys = access
                .keys
                .map(|source| source.keys(options, soon()))
                .transpose()?;
            Ok::<_, Fault>(keys.flatten().map(|keys| keys.id.reveal().to_owned()))
        };
        let mut options = RemoteOptions::default();
        assert_eq!(
            look(&[], &options).unwrap(),
            None,
            "anybody, where nothing says who"
        );
        let fault = look(&[("AWS_PROFILE", "other")], &options).unwrap_err();
        assert_eq!(fault.code(), "missing-sdk");
        let environment = [
            ("AWS_PROFILE", "other"),
            ("AWS_ACCESS_KEY_ID", "env"),
            ("AWS_SECRET_ACCESS_KEY", "s"),
        ];
        assert_eq!(look(&environment, &options).unwrap().as_deref(), Some("env"));
        options.access_key = Some(("given".to_owned(), Secret::new("s")));
        assert_eq!(look(&environment, &options).unwrap().as_deref(), Some("given"));
        options.anonymous = true;
        assert_eq!(look(&environment, &options).unwrap(), None);
    }
}
