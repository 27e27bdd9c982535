//! Amazon S3, and stores with its protocol.

use super::credentials::amazon::{self, host_of};
use super::credentials::source::given;
use super::{Access, Auth, Object};
use crate::environment::Environment;
use crate::fault::Result;
use crate::http::pace::Deadline;
use crate::options::RemoteOptions;
use crate::url::{Url, encode_path, encode_segment};

/// The text before a version. Other question marks are part of the key.
const VERSION: &str = "?versionId=";

/// Return `path` without the version.
pub(crate) fn without_version(path: &str) -> &str {
    path.rsplit_once(VERSION).map_or(path, |(path, _)| path)
}

/// Return the URL of the part after `s3://`, and the credentials for it.
pub(crate) fn locate(
    rest: &str,
    options: &RemoteOptions,
    environment: Environment<'_>,
    deadline: Deadline<'_>,
) -> Result<(Url, Access)> {
    let source = match given(options, "s3") {
        _ if options.anonymous => None,
        None => amazon::source(options, environment)?,
        source => source,
    };
    // Providers may know the region and the endpoint too, as profiles contain them.
    let found = match source.as_ref().filter(|source| source.is_provider()) {
        Some(source) => source.identity(options, deadline)?,
        None => None,
    };
    let (region, endpoint) = found.map_or((None, None), |found| (found.region, found.endpoint));
    let region = amazon::region(options.region.clone().or(region), environment)?;
    let endpoint = options.endpoint.clone().or(endpoint);
    let endpoint = endpoint.or_else(|| amazon::endpoint("S3", environment));
    let url = address(rest, options.path_style, endpoint, &region)?;
    let pays = || environment.is("AWS_REQUEST_PAYER", &["requester", "true"]);
    let is_payer = options.request_payer.unwrap_or_else(pays);
    Ok((url, Access::new(source, Auth::S3 { region, is_payer })))
}

/// Return the URL of an object, with its bucket in the path or in the host.
fn address(rest: &str, path_style: Option<bool>, endpoint: Option<String>, region: &str) -> Result<Url> {
    let path = without_version(rest);
    let version = rest.get(path.len() + VERSION.len()..);
    let object = Object::parse(path)?;
    // A certificate for *.s3.… covers one more label, not two.
    let in_path = path_style.unwrap_or(endpoint.is_some() || object.bucket.contains('.'));
    let endpoint = Url::parse(&endpoint.unwrap_or_else(|| host_of("s3", region)))?;
    let mut url = object.at(&endpoint);
    if !in_path {
        url.host = format!("{}.{}", object.bucket, endpoint.host);
        url.path = endpoint.below(&format!("/{}", encode_path(object.key))).path;
    }
    url.query = version.map(|version| format!("versionId={}", encode_segment(version)));
    Ok(url)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::credentials::{Credential, Secret};
    use crate::fault::Fault;
    use ingot_format::StopFlag;
    use std::time::Duration;

    fn soon() -> Deadline<'static> {
        Deadline::within(Duration::ZERO, StopFlag::never())
    }

    const NOTHING: Environment<'static> = Environment(&|_| None);

    #[test]
    fn keys_are_never_normalised() {
        let options = RemoteOptions::default();
        let located = |text: &str| locate(text, &options, NOTHING, soon()).unwrap().0;
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
    fn endpoints_have_the_bucket_in_the_path() {
        let mut options = RemoteOptions {
            endpoint: Some("http://localhost:9000/base/".to_owned()),
            ..RemoteOptions::default()
        };
        let (url, _) = locate("bucket/k", &options, NOTHING, soon()).unwrap();
        assert_eq!(url.to_string(), "http://localhost:9000/base/bucket/k");
        options.path_style = Some(false);
        let (url, _) = locate("bucket/k", &options, NOTHING, soon()).unwrap();
        assert_eq!(url.to_string(), "http://bucket.localhost:9000/base/k");
    }

    #[test]
    fn options_take_precedence_over_the_environment() {
        let look = |pairs: &[(&str, &str)], options: &RemoteOptions| {
            let variable = |name: &str| {
                let pair = pairs.iter().find(|pair| pair.0 == name)?;
                Some(pair.1.to_owned())
            };
            let (_, access) = locate("b/k", options, Environment(&variable), soon())?;
            let found = access.identity(&Url::parse("http://h")?, options, soon())?;
            Ok::<_, Fault>(found.map(|(_, identity)| match identity.unwrap().credential {
                Credential::Keys(keys) => keys.id.reveal().to_owned(),
                other => panic!("{other:?}"),
            }))
        };
        let mut options = RemoteOptions::default();
        assert_eq!(look(&[], &options).unwrap(), None, "anonymous by default");
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
