//! Google Cloud Storage.

use std::path::Path;

use crate::access::Access;
use crate::fault::Fault;
use crate::options::{RemoteOptions, Token, credential};
use crate::store::bucket::{Object, set};
use crate::store::google::Account;
use crate::url::{Url, encode_path};

const ENDPOINT: &str = "https://storage.googleapis.com";

/// The URL of an object, and how to be let in there: with a token, or as anybody.
pub(crate) fn locate(
    object: Object<'_>,
    options: &RemoteOptions,
    variable: &dyn Fn(&str) -> Option<String>,
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
    let access = match &options.token {
        Token::Given(token) => Access::bearer(Some(token.clone())),
        Token::Environment if !options.anonymous => of_environment(variable)?,
        _ => Access::bearer(None),
    };
    Ok((url, access))
}

/// A token that stands there, or a file of credentials that one is issued for.
fn of_environment(variable: &dyn Fn(&str) -> Option<String>) -> Result<Access, Fault> {
    let token = credential(
        variable,
        &["GOOGLE_OAUTH_ACCESS_TOKEN", "CLOUDSDK_AUTH_ACCESS_TOKEN"],
    )?;
    match (token, set(variable, &["GOOGLE_APPLICATION_CREDENTIALS"])) {
        (None, Some(path)) => {
            Account::read(Path::new(&path)).map(|account| Access::Google(Box::new(account)))
        }
        (token, _) => Ok(Access::bearer(token)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_have_urls() {
        let object = Object::parse("bucket/a b/../c").unwrap();
        let (url, _) = locate(object, &RemoteOptions::default(), &|_| None).unwrap();
        assert_eq!(
            url.to_string(),
            "https://storage.googleapis.com/bucket/a%20b/../c"
        );
    }
}
