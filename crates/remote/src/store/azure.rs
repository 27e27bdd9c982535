//! Azure Blob Storage.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use ring::hmac;

use super::credentials::azure;
use super::credentials::source::{Source, given};
use super::{Access, Auth, Object};
use crate::credentials::{Credential, Secret};
use crate::environment::Environment;
use crate::fault::{Fault, Result};
use crate::options::{RemoteOptions, Token};
use crate::url::Url;

/// Return the URL of a blob, and the credentials for it.
pub(crate) fn locate(
    object: Object<'_>,
    options: &RemoteOptions,
    environment: Environment<'_>,
) -> Result<(Url, Access)> {
    let settings = settings(options, environment)?;
    let first = |get: &dyn Fn(&Settings) -> Option<String>| settings.iter().find_map(get);
    let is_name = |name: &String| !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric());
    let account = first(&|settings| settings.account.clone()).filter(is_name);
    let account = account.ok_or_else(|| {
        Fault::option("az:// needs the name of an account: give `account`, or set AZURE_STORAGE_ACCOUNT_NAME")
    })?;
    let usual = || format!("https://{account}.blob.core.windows.net");
    let endpoint = first(&|settings| settings.endpoint(&account)).unwrap_or_else(usual);
    let mut url = object.at(&Url::parse(&endpoint)?);
    let entry = if options.anonymous {
        Entry::default()
    } else {
        entry(&settings, options, environment)?
    };
    url.query = entry.query;
    let auth = Auth::Azure {
        account,
        key: entry.key,
    };
    Ok((url, Access::new(entry.source, auth)))
}

/// Settings of an account from one origin.
#[derive(Default)]
struct Settings {
    account: Option<String>,
    endpoint: Option<String>,
    /// The protocol and the domain of the endpoint, if they are configured apart.
    protocol: Option<String>,
    domain: Option<String>,
    /// A signed query.
    query: Option<Secret>,
    /// The key of the account.
    key: Option<Secret>,
}

/// Return the settings in the order of their precedence: options, a connection string in the options, variables, a
/// connection string in the variables.
fn settings(options: &RemoteOptions, environment: Environment<'_>) -> Result<[Settings; 4]> {
    let given = Settings {
        account: options.account.clone(),
        endpoint: options.endpoint.clone(),
        query: options.sas_token.clone(),
        key: options.account_key.clone(),
        ..Settings::default()
    };
    let secret = |names: &[&str]| environment.get(names).map(Secret::new);
    let variables = Settings {
        account: environment.get(&["AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT"]),
        endpoint: environment.get(&["AZURE_STORAGE_ENDPOINT"]),
        query: secret(&["AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_SAS_KEY"]),
        key: secret(&["AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_KEY"]),
        ..Settings::default()
    };
    let text = environment.secret(&["AZURE_STORAGE_CONNECTION_STRING"])?;
    let connection = Settings::parse(options.connection_string.as_ref());
    Ok([given, connection, variables, Settings::parse(text.as_ref())])
}

impl Settings {
    /// Parse a connection string: `AccountName=…;AccountKey=…` and the like.
    fn parse(text: Option<&Secret>) -> Settings {
        let text = text.map(Secret::reveal).unwrap_or_default();
        let pairs: Vec<(&str, &str)> = text.split(';').filter_map(|pair| pair.split_once('=')).collect();
        let get = |name: &str| {
            let pair = pairs
                .iter()
                .find(|pair| pair.0.trim().eq_ignore_ascii_case(name))?;
            Some(pair.1.trim().to_owned()).filter(|value| !value.is_empty())
        };
        Settings {
            account: get("AccountName"),
            endpoint: get("BlobEndpoint"),
            protocol: get("DefaultEndpointsProtocol"),
            domain: get("EndpointSuffix"),
            query: get("SharedAccessSignature").map(Secret::new),
            key: get("AccountKey").map(Secret::new),
        }
    }

    fn endpoint(&self, account: &str) -> Option<String> {
        let protocol = self.protocol.as_deref().unwrap_or("https");
        let usual = |domain: &String| format!("{protocol}://{account}.blob.{domain}");
        self.endpoint.clone().or_else(|| self.domain.as_ref().map(usual))
    }

    /// Return the signed query, or the key. Only the credential that is used is checked.
    fn entry(&self) -> Result<Option<Entry>> {
        let is_given = |secret: &&Secret| !bare(secret).is_empty();
        if let Some(query) = self.query.as_ref().filter(is_given) {
            let query = query.clone().checked("the signed query")?;
            if !bare(&query).bytes().all(|byte| byte.is_ascii_graphic()) {
                return Err(Fault::option("the signed query has characters that no query has"));
            }
            let query = Some(bare(&query).to_owned());
            return Ok(Some(Entry {
                query,
                ..Entry::default()
            }));
        }
        let Some(key) = self.key.as_ref().filter(is_given) else {
            return Ok(None);
        };
        let key = key.clone().checked("the key of the account")?;
        let decoded = STANDARD.decode(bare(&key));
        let decoded = decoded.map_err(|_| Fault::option("the key of the account is not base64"))?;
        let key = Some(hmac::Key::new(hmac::HMAC_SHA256, &decoded));
        Ok(Some(Entry {
            key,
            ..Entry::default()
        }))
    }
}

/// Return the text of a signed query without its question mark, or of a key.
fn bare(secret: &Secret) -> &str {
    secret.reveal().trim().trim_start_matches('?')
}

/// The credential: a signed query, a key, or a source of tokens.
#[derive(Default)]
struct Entry {
    query: Option<String>,
    key: Option<hmac::Key>,
    source: Option<Source>,
}

impl From<Source> for Entry {
    fn from(source: Source) -> Entry {
        Entry {
            source: Some(source),
            ..Entry::default()
        }
    }
}

/// Return the first credential that is configured.
fn entry(settings: &[Settings; 4], options: &RemoteOptions, environment: Environment<'_>) -> Result<Entry> {
    if let Some(source) = given(options, "az") {
        return Ok(source.into());
    }
    let [first, others @ ..] = settings;
    let is_signed = first.query.as_ref().is_some_and(|query| !bare(query).is_empty());
    if let Some(token) = options.given_token().filter(|_| !is_signed) {
        return Ok(Source::known("storage_options", Credential::Token(token.clone())).into());
    }
    if let Some(entry) = first.entry()? {
        return Ok(entry);
    }
    if options.client_secret.is_some() {
        return azure::of_client_secret(options, environment).map(Entry::from);
    }
    for settings in others {
        if let Some(entry) = settings.entry()? {
            return Ok(entry);
        }
    }
    let source = match options.token {
        Token::Withheld => None,
        _ => azure::of_environment(options, environment)?,
    };
    Ok(source.map(Entry::from).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOTHING: Environment<'static> = Environment(&|_| None);

    #[test]
    fn blobs_have_urls_that_hide_a_signed_query() {
        let located = |options: &RemoteOptions| {
            locate(Object::parse("models/a b").unwrap(), options, NOTHING)
                .unwrap()
                .0
        };
        let mut options = RemoteOptions {
            account: Some("me".to_owned()),
            ..RemoteOptions::default()
        };
        let url = located(&options);
        assert_eq!(url.to_string(), "https://me.blob.core.windows.net/models/a%20b");
        assert_eq!(url.query, None);
        options.sas_token = Some(Secret::new("?sv=1&sig=hunter2"));
        let url = located(&options);
        assert_eq!(url.target(), "/models/a%20b?sv=1&sig=hunter2");
        assert!(!url.to_string().contains("hunter2"));
    }

    #[test]
    fn an_account_is_required() {
        let object = Object::parse("c/b").unwrap();
        let fault = locate(object, &RemoteOptions::default(), NOTHING).unwrap_err();
        assert_eq!(fault.code(), "storage-option");
    }
}
