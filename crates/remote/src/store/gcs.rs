//! Google Cloud Storage.

use super::credentials::google;
use super::credentials::source::{Source, given};
use super::{Access, Auth, Object};
use crate::credentials::Credential;
use crate::environment::Environment;
use crate::fault::Result;
use crate::options::RemoteOptions;
use crate::url::Url;

const ENDPOINT: &str = "https://storage.googleapis.com";

/// Return the URL of an object, and the credentials for it.
pub(crate) fn locate(
    object: Object<'_>,
    options: &RemoteOptions,
    environment: Environment<'_>,
) -> Result<(Url, Access)> {
    let endpoint = options
        .endpoint
        .clone()
        .or_else(|| environment.get(&["STORAGE_EMULATOR_HOST"]));
    let url = object.at(&Url::parse(endpoint.as_deref().unwrap_or(ENDPOINT))?);
    let source = match given(options, "gs") {
        _ if options.anonymous => None,
        None => google::source(options, environment)?,
        source => source,
    };
    let auth = match source {
        // Google's store accepts signatures of S3 with keys of its own.
        Some(Source::Known(_, Credential::Keys(_))) => Auth::S3 {
            region: "auto".to_owned(),
            is_payer: false,
        },
        _ => Auth::Bearer,
    };
    Ok((url, Access::new(source, auth)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_have_urls() {
        let object = Object::parse("bucket/a b/../c").unwrap();
        let variable = |name: &str| (name == "NO_GCE_CHECK").then(|| "true".to_owned());
        let (url, _) = locate(object, &RemoteOptions::default(), Environment(&variable)).unwrap();
        assert_eq!(
            url.to_string(),
            "https://storage.googleapis.com/bucket/a%20b/../c"
        );
    }
}
