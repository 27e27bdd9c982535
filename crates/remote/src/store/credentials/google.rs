//! Who a caller is to Google's store.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::token::{Field, Question, TokenSource};
use super::{Keys, Variable, firmware_says, home, read_json, refused, safe_service, set, shown};
use crate::fault::Fault;
use crate::options::{RemoteOptions, Secret, Token, credential};
use crate::system::GCLOUD_VARIABLE;
use crate::url::Url;

/// What may be done with the token: to read.
const SCOPE: &str = "https://www.googleapis.com/auth/devstorage.read_only";

/// What may be done with the token by which that of another account is asked for.
const ACCOUNT_SCOPE: &str = "https://www.googleapis.com/auth/iam";

/// Where tokens are issued, where a file does not say.
const TOKEN_SERVICE: &str = "https://oauth2.googleapis.com/token";

/// By what a request is let in.
#[derive(Debug)]
pub(crate) enum Entry {
    Token(Secret),
    Issued(Box<TokenSource>),
    /// Keys for what speaks like S3.
    Keys(Keys),
}

/// The first that is configured: by the caller, the environment, the files of Google's tools, or by the machine.
pub(crate) fn entry(options: &RemoteOptions, variable: Variable<'_>) -> Result<Option<Entry>, Fault> {
    let issued = |source: TokenSource| Some(Entry::Issued(Box::new(source)));
    match (&options.token, &options.access_key, &options.credentials_file) {
        _ if options.anonymous => return Ok(None),
        (Token::Given(token), ..) => return Ok(Some(Entry::Token(token.clone()))),
        (_, Some((id, secret)), _) => {
            let (id, secret, session) = (Secret::new(id), secret.clone(), None);
            return Ok(Some(Entry::Keys(Keys { id, secret, session })));
        }
        (_, _, Some(path)) => return of_file(path, "credentials_file").map(issued),
        (Token::Withheld, ..) => return Ok(None),
        (Token::Environment, ..) => {}
    }
    let names = ["GOOGLE_OAUTH_ACCESS_TOKEN", "CLOUDSDK_AUTH_ACCESS_TOKEN"];
    if let Some(token) = credential(variable, &names)? {
        return Ok(Some(Entry::Token(token)));
    }
    if let Some(keys) = Keys::of_variables(variable, "GS_ACCESS_KEY_ID", "GS_SECRET_ACCESS_KEY")? {
        return Ok(Some(Entry::Keys(keys)));
    }
    let name = "GOOGLE_APPLICATION_CREDENTIALS";
    if let Some(path) = set(variable, &[name]) {
        return of_file(Path::new(&path), name).map(issued);
    }
    match default_file(variable).filter(|path| path.exists()) {
        Some(path) => of_file(&path, "the file of gcloud").map(issued),
        None => Ok(machine(variable)?.and_then(issued)),
    }
}

/// Where `gcloud auth application-default login` keeps what it was given.
fn default_file(variable: Variable<'_>) -> Option<PathBuf> {
    let named = set(variable, &["CLOUDSDK_CONFIG"]).map(PathBuf::from);
    let usual = || match GCLOUD_VARIABLE {
        Some(folder) => Some(PathBuf::from(set(variable, &[folder])?).join("gcloud")),
        None => Some(home(variable)?.join(".config").join("gcloud")),
    };
    Some(named.or_else(usual)?.join("application_default_credentials.json"))
}

/// The service of a machine of Google, or of what runs there.
fn machine(variable: Variable<'_>) -> Result<Option<TokenSource>, Fault> {
    let is_off = set(variable, &["NO_GCE_CHECK"]).is_some_and(|value| value.eq_ignore_ascii_case("true"));
    let names = ["GCE_METADATA_HOST", "GCE_METADATA_ROOT"];
    let runs = ["K_SERVICE", "CLOUD_RUN_JOB", "GAE_ENV"];
    let host = match set(variable, &names) {
        _ if is_off => return Ok(None),
        Some(host) => host,
        None if set(variable, &runs).is_some() || firmware_says("product_name", "Google") => {
            "169.254.169.254".to_owned()
        }
        None => return Ok(None),
    };
    let mut service = Url::parse(&format!(
        "http://{host}/computeMetadata/v1/instance/service-accounts/default/token"
    ))?;
    service.query = Some(super::asker::form([("scopes", SCOPE)]));
    Ok(Some(TokenSource {
        name: "the metadata service of this machine (not asked with NO_GCE_CHECK=true)".to_owned(),
        service,
        question: Question::Machine {
            header: ("Metadata-Flavor", Secret::new("Google")),
            nobody: &[404],
        },
        other_account: None,
    }))
}

/// Reads a file of credentials. `named_by` says what names it.
fn of_file(path: &Path, named_by: &str) -> Result<TokenSource, Fault> {
    let name = format!("{} ({named_by})", shown(path));
    let source = read_json(path).and_then(|file| of_json(&file, &name, SCOPE));
    source.map_err(|fault| fault.of_credentials(&name))
}

/// What the JSON of such a file says, for a token that may be used for `scope`.
fn of_json(file: &Value, name: &str, scope: &'static str) -> Result<TokenSource, Fault> {
    let text = |name: &str| text(file, name);
    let field = |name: &str| text(name).map(Field::text);
    let service = safe_service(text("token_uri").unwrap_or(TOKEN_SERVICE), "its token_uri");
    match text("type")? {
        "service_account" => {
            let claim = Field::Claim {
                email: text("client_email")?.to_owned(),
                id: text("private_key_id").unwrap_or_default().to_owned(),
                pem: Secret::new(text("private_key")?),
                scope,
            };
            let grant = Field::text("urn:ietf:params:oauth:grant-type:jwt-bearer");
            let fields = vec![("grant_type", grant), ("assertion", claim)];
            Ok(TokenSource::form(name, service?, fields))
        }
        "authorized_user" => {
            let fields = vec![
                ("grant_type", Field::text("refresh_token")),
                ("client_id", field("client_id")?),
                ("client_secret", field("client_secret")?),
                ("refresh_token", field("refresh_token")?),
            ];
            Ok(TokenSource::form(name, service?, fields))
        }
        "external_account" => {
            let other_account = other_account(file)?;
            let scope = if other_account.is_some() {
                ACCOUNT_SCOPE
            } else {
                scope
            };
            let fields = vec![
                (
                    "grant_type",
                    Field::text("urn:ietf:params:oauth:grant-type:token-exchange"),
                ),
                (
                    "requested_token_type",
                    Field::text("urn:ietf:params:oauth:token-type:access_token"),
                ),
                ("audience", field("audience")?),
                ("scope", Field::text(scope)),
                ("subject_token_type", field("subject_token_type")?),
                ("subject_token", subject(file)?),
            ];
            let service = safe_service(text("token_url")?, "its token_url")?;
            let source = TokenSource::form(name, service, fields);
            Ok(TokenSource {
                other_account,
                ..source
            })
        }
        "impersonated_service_account" => {
            let source = file.get("source_credentials").unwrap_or(&Value::Null);
            let source = of_json(source, name, ACCOUNT_SCOPE)?;
            let other_account = other_account(file)?;
            Ok(TokenSource {
                other_account,
                ..source
            })
        }
        other => Err(refused(format!(
            "its type is {}: expected service_account, authorized_user, external_account or \
             impersonated_service_account",
            ingot_format::Quoted(other)
        ))),
    }
}

fn text<'f>(file: &'f Value, name: &str) -> Result<&'f str, Fault> {
    let text = file.get(name).and_then(Value::as_str);
    text.ok_or_else(|| refused(format!("it has no {name}")))
}

/// The service that gives a token of another account.
fn other_account(file: &Value) -> Result<Option<(Url, &'static str)>, Fault> {
    let name = "service_account_impersonation_url";
    let Ok(url) = text(file, name) else {
        return Ok(None);
    };
    safe_service(url, &format!("its {name}")).map(|url| Some((url, SCOPE)))
}

/// The token of somebody else whom Google trusts.
fn subject(file: &Value) -> Result<Field, Fault> {
    let source = file.get("credential_source").unwrap_or(&Value::Null);
    let format = source.get("format").unwrap_or(&Value::Null);
    let field = match text(format, "type") {
        Ok("json") => Some(text(format, "subject_token_field_name")?.to_owned()),
        _ => None,
    };
    match (text(source, "file"), text(source, "url")) {
        (Ok(path), _) => Ok(Field::File(path.into(), field)),
        (_, Ok(url)) if source.get("environment_id").is_none() => {
            let headers = source
                .get("headers")
                .and_then(Value::as_object)
                .into_iter()
                .flatten();
            let header = |(name, value): (&String, &Value)| {
                let value = Secret::new(value.as_str().unwrap_or_default());
                Ok((name.clone(), value.checked("a header of its credential_source")?))
            };
            Ok(Field::Answer {
                url: safe_service(url, "the url of its credential_source")?,
                headers: headers.map(header).collect::<Result<_, Fault>>()?,
                field,
            })
        }
        _ => Err(refused(
            "its credential_source is none of a file and a url: no others are read",
        )),
    }
}
