//! Identities for Google's store: tokens and HMAC keys. Files and machines are left to its SDK.

use std::path::PathBuf;

use super::source::{Source, delegated};
use super::{firmware_says, home, set, shown, stamp};
use crate::credentials::{Credential, Keys, Secret, Variable, Wanted, credential};
use crate::fault::Fault;
use crate::options::{RemoteOptions, Token};
use crate::system::GCLOUD_VARIABLE;

/// The variables of machines of Google, and of what runs on them.
const MACHINES: &[&str] = &[
    "GCE_METADATA_HOST",
    "GCE_METADATA_ROOT",
    "K_SERVICE",
    "CLOUD_RUN_JOB",
    "GAE_ENV",
];

/// The first source that is configured: options, the environment, the files of Google's tools, the machine.
pub(crate) fn source(options: &RemoteOptions, variable: Variable<'_>) -> Result<Option<Source>, Fault> {
    let known = |name, credential| Ok(Some(Source::Known(name, credential)));
    match (&options.token, &options.access_key, &options.credentials_file) {
        (Token::Given(token), ..) => return known("storage_options", Credential::Token(token.clone())),
        (_, Some((id, secret)), _) => {
            let (id, secret, session) = (Secret::new(id), secret.clone(), None);
            return known("storage_options", Credential::Keys(Keys { id, secret, session }));
        }
        (_, _, Some(path)) => return of_file(path.clone(), "credentials_file", options),
        (Token::Withheld, ..) => return Ok(None),
        (Token::Environment, ..) => {}
    }
    for name in ["GOOGLE_OAUTH_ACCESS_TOKEN", "CLOUDSDK_AUTH_ACCESS_TOKEN"] {
        if let Some(token) = credential(variable, &[name])? {
            return known(name, Credential::Token(token));
        }
    }
    if let Some(keys) = Keys::of_variables(variable, "GS_ACCESS_KEY_ID", "GS_SECRET_ACCESS_KEY")? {
        return known("GS_ACCESS_KEY_ID", Credential::Keys(keys));
    }
    let name = "GOOGLE_APPLICATION_CREDENTIALS";
    if let Some(path) = set(variable, &[name]) {
        return of_file(path.into(), name, options);
    }
    if let Some(path) = default_file(variable).filter(|path| path.exists()) {
        return of_file(path, "the file of gcloud", options);
    }
    if is_machine(variable) {
        let name = "the metadata service of this machine (not asked with NO_GCE_CHECK=true)";
        let held = |name: &&str| Secret::new(variable(name).unwrap_or_default());
        let wanted = Wanted {
            state: MACHINES.iter().map(held).collect(),
            ..Wanted::new("gs", name)
        };
        return delegated(options, wanted).map(Some);
    }
    Ok(None)
}

fn of_file(path: PathBuf, named_by: &str, options: &RemoteOptions) -> Result<Option<Source>, Fault> {
    let wanted = Wanted {
        state: vec![stamp(&path)],
        credentials_file: Some(path.clone()),
        ..Wanted::new("gs", format!("{} ({named_by})", shown(&path)))
    };
    delegated(options, wanted).map(Some)
}

/// Where `gcloud auth application-default login` keeps its token.
fn default_file(variable: Variable<'_>) -> Option<PathBuf> {
    let named = set(variable, &["CLOUDSDK_CONFIG"]).map(PathBuf::from);
    let usual = || match GCLOUD_VARIABLE {
        Some(folder) => Some(PathBuf::from(set(variable, &[folder])?).join("gcloud")),
        None => Some(home(variable)?.join(".config").join("gcloud")),
    };
    Some(named.or_else(usual)?.join("application_default_credentials.json"))
}

/// Whether this is a machine of Google, or something that runs on one.
fn is_machine(variable: Variable<'_>) -> bool {
    let is_off = set(variable, &["NO_GCE_CHECK"]).is_some_and(|value| value.eq_ignore_ascii_case("true"));
    !is_off && (set(variable, MACHINES).is_some() || firmware_says("product_name", "Google"))
}
