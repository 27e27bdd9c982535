//! Google Cloud Storage.

use crate::access::Access;
use crate::credentials::{Credential, Variable};
use crate::fault::Fault;
use crate::options::RemoteOptions;
use crate::store::bucket::Object;
use crate::store::credentials::source::{Source, given};
use crate::store::credentials::{google, set};
use crate::store::s3::S3Access;
use crate::url::{Url, encode_path};

const ENDPOINT: &str = "https://storage.googleapis.com";

/// The URL of an object, and how to be let in there.
pub(crate) fn locate(
    object: Object<'_>,
    options: &RemoteOptions,
    variable: Variable<'_>,
) -> Result<(Url, Access), Fault> {
    let named = options
        .endpoint
        .clone()
        .or_else(|| set(variable, &["STORAGE_EMULATOR_HOST"]));
    let endpoint = Url::parse(named.as_deref().unwrap_or(ENDPOINT))?;
    let folder = endpoint.path.trim_end_matches('/');
    let url = Url {
        path: format!("{folder}/{}/{}", object.bucket, encode_path(object.key)),
        query: None,
        user: None,
        ..endpoint
    };
    let source = match given(options, "gs") {
        _ if options.anonymous => None,
        None => google::source(options, variable)?,
        source => source,
    };
    let access = match source {
        None => Access::Header(None),
        Some(source @ Source::Known(_, Credential::Keys(_))) => Access::S3(S3Access::of_google(source)),
        Some(source) => Access::Token(source),
    };
    Ok((url, access))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_have_urls() {
        let object = Object::parse("bucket/a b/../c").unwrap();
        let (url, _) = locate(object, &RemoteOptions::default(), &|name| {
            (name == "NO_GCE_CHECK").then(|| "true".to_owned())
        })
        .unwrap();
        assert_eq!(
            url.to_string(),
            "https://storage.googleapis.com/bucket/a%20b/../c"
        );
    }
}
