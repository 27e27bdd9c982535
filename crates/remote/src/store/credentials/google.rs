//! Identities for Google's store: tokens and HMAC keys. Its SDK reads files and asks machines.

use std::path::PathBuf;

use super::source::{Source, delegated};
use super::{firmware_says, shown, stamp};
use crate::credentials::{Credential, Keys, Secret, Wanted};
use crate::environment::Environment;
use crate::fault::Result;
use crate::options::{RemoteOptions, Token};
use crate::system::GCLOUD_VARIABLE;

/// The variables of machines of Google, and of its services.
const MACHINES: &[&str] = &[
    "GCE_METADATA_HOST",
    "GCE_METADATA_ROOT",
    "K_SERVICE",
    "CLOUD_RUN_JOB",
    "GAE_ENV",
];

/// Return the first source that is configured: options, the environment, the files of Google's tools, the machine.
pub(crate) fn source(options: &RemoteOptions, environment: Environment<'_>) -> Result<Option<Source>> {
    let known = |name, credential| Ok(Some(Source::known(name, credential)));
    match (&options.token, &options.access_key, &options.credentials_file) {
        (Token::Given(token), ..) => return known("storage_options", Credential::Token(token.clone())),
        (_, Some((id, secret)), _) => {
            let keys = Keys::new(Secret::new(id), secret.clone(), None);
            return known("storage_options", Credential::Keys(keys));
        }
        (_, _, Some(path)) => return of_file(path.clone(), "credentials_file", options),
        (Token::Withheld, ..) => return Ok(None),
        (Token::Environment, ..) => {}
    }
    for name in ["GOOGLE_OAUTH_ACCESS_TOKEN", "CLOUDSDK_AUTH_ACCESS_TOKEN"] {
        if let Some(token) = environment.secret(&[name])? {
            return known(name, Credential::Token(token));
        }
    }
    if let Some(keys) = environment.keys("GS_ACCESS_KEY_ID", "GS_SECRET_ACCESS_KEY")? {
        return known("GS_ACCESS_KEY_ID", Credential::Keys(keys));
    }
    let name = "GOOGLE_APPLICATION_CREDENTIALS";
    if let Some(path) = environment.get(&[name]) {
        return of_file(path.into(), name, options);
    }
    if let Some(path) = default_file(environment).filter(|path| path.exists()) {
        return of_file(path, "the file of gcloud", options);
    }
    let is_off = environment.is("NO_GCE_CHECK", &["true"]);
    let is_machine = || environment.get(MACHINES).is_some() || firmware_says("product_name", "Google");
    if is_off || !is_machine() {
        return Ok(None);
    }
    let name = "the metadata service of this machine (not used with NO_GCE_CHECK=true)";
    let wanted = Wanted {
        state: environment.values(MACHINES),
        ..Wanted::new("gs", name)
    };
    delegated(options, wanted).map(Some)
}

fn of_file(path: PathBuf, setting: &str, options: &RemoteOptions) -> Result<Option<Source>> {
    let wanted = Wanted {
        state: vec![stamp(&path)],
        credentials_file: Some(path.clone()),
        ..Wanted::new("gs", format!("{} ({setting})", shown(&path)))
    };
    delegated(options, wanted).map(Some)
}

/// Return the file to which `gcloud auth application-default login` writes its token.
fn default_file(environment: Environment<'_>) -> Option<PathBuf> {
    let folder = |name: &str| environment.get(&[name]).map(PathBuf::from);
    let usual = || match GCLOUD_VARIABLE {
        Some(name) => Some(folder(name)?.join("gcloud")),
        None => Some(environment.home()?.join(".config").join("gcloud")),
    };
    let folder = folder("CLOUDSDK_CONFIG").or_else(usual)?;
    Some(folder.join("application_default_credentials.json"))
}
