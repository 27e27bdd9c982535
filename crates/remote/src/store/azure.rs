//! Azure Blob Storage.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use jiff::Timestamp;
use ring::hmac;

use crate::fault::{Fault, FaultKind};
use crate::http::message::{HttpRequest, http_date};
use crate::options::{RemoteOptions, Secret, Token, credential};
use crate::store::bucket::{Object, set};
use crate::url::{Url, encode_path};

/// The version of the service that requests are written for.
const VERSION: &str = "2021-12-02";

/// How requests for one account are signed.
pub(crate) struct AzureAccess {
    account: String,
    key: hmac::Key,
}

impl std::fmt::Debug for AzureAccess {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "AzureAccess({})", self.account)
    }
}

/// What lets requests in that do not carry a signed query.
#[derive(Debug)]
pub(crate) enum Credential {
    Token(Secret),
    Key(AzureAccess),
}

/// The URL of a blob, and how to be let in there: by a signed query, by the key of the account, with a token, or as
/// anybody.
pub(crate) fn locate(
    object: Object<'_>,
    options: &RemoteOptions,
    variable: &dyn Fn(&str) -> Option<String>,
) -> Result<(Url, Option<Credential>), Fault> {
    let account = account(options, variable)?;
    let endpoint = endpoint(&account, options, variable)?;
    let (query, credential) = entry(account, options, variable)?;
    let folder = endpoint.path.trim_end_matches('/');
    let url = Url {
        path: format!("{folder}/{}/{}", object.bucket, encode_path(object.key)),
        query,
        user: None,
        ..endpoint
    };
    Ok((url, credential))
}

fn account(options: &RemoteOptions, variable: &dyn Fn(&str) -> Option<String>) -> Result<String, Fault> {
    let account = options
        .account
        .clone()
        .or_else(|| set(variable, &["AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT"]));
    let is_name = |name: &str| !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric());
    account.filter(|name| is_name(name)).ok_or_else(|| {
        option("az:// needs the name of an account: give `account`, or set AZURE_STORAGE_ACCOUNT_NAME")
    })
}

fn endpoint(
    account: &str,
    options: &RemoteOptions,
    variable: &dyn Fn(&str) -> Option<String>,
) -> Result<Url, Fault> {
    let named = options
        .endpoint
        .clone()
        .or_else(|| set(variable, &["AZURE_STORAGE_ENDPOINT"]));
    match named {
        Some(endpoint) => Url::parse(&endpoint),
        None => Url::parse(&format!("https://{account}.blob.core.windows.net")),
    }
}

/// What lets a caller in: the signed query, or what goes with a request that has none.
fn entry(
    account: String,
    options: &RemoteOptions,
    variable: &dyn Fn(&str) -> Option<String>,
) -> Result<(Option<String>, Option<Credential>), Fault> {
    let secret = |given: &Option<Secret>, names: &[&str]| match given {
        _ if options.anonymous => Ok(None),
        Some(secret) => Ok(Some(secret.clone())),
        None => credential(variable, names),
    };
    let query = secret(
        &options.sas_token,
        &["AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_SAS_KEY"],
    )?;
    let key = secret(
        &options.account_key,
        &["AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_KEY"],
    )?;
    match (query, key, &options.token) {
        (Some(query), ..) => Ok((Some(signed_query(&query)?), None)),
        (None, _, Token::Given(token)) => Ok((None, Some(Credential::Token(token.clone())))),
        (None, Some(key), _) => Ok((None, Some(Credential::Key(AzureAccess::of(account, &key)?)))),
        _ => Ok((None, None)),
    }
}

fn signed_query(query: &Secret) -> Result<String, Fault> {
    let query = query.reveal().trim().trim_start_matches('?');
    match query.bytes().all(|byte| byte.is_ascii_graphic()) {
        true => Ok(query.to_owned()),
        false => Err(option("the signed query has characters that no query has")),
    }
}

fn option(why: &str) -> Fault {
    FaultKind::Option(why.to_owned()).into()
}

impl AzureAccess {
    fn of(account: String, key: &Secret) -> Result<AzureAccess, Fault> {
        let key = STANDARD.decode(key.reveal().trim());
        let key = key.map_err(|_| option("the key of the account is not base64"))?;
        let key = hmac::Key::new(hmac::HMAC_SHA256, &key);
        Ok(AzureAccess { account, key })
    }

    /// Signs a request with the key of the account.
    pub(crate) fn sign(&self, request: &mut HttpRequest<'_>) {
        let date = http_date(Timestamp::now());
        for (name, value) in [("x-ms-date", date.as_str()), ("x-ms-version", VERSION)] {
            request.headers.push((name.to_owned(), value.to_owned()));
        }
        let signature = hmac::sign(&self.key, self.text(request).as_bytes());
        let value = format!("SharedKey {}:{}", self.account, STANDARD.encode(signature));
        request.headers.push(("Authorization".to_owned(), value));
    }

    /// What is signed: the headers that the service names, its own, and the path.
    fn text(&self, request: &HttpRequest<'_>) -> String {
        let header = |name: &str| {
            let found = request
                .headers
                .iter()
                .find(|header| header.0.eq_ignore_ascii_case(name));
            found.map_or("", |header| header.1.as_str())
        };
        let named: Vec<&str> = [
            "Content-Encoding",
            "Content-Language",
            "Content-Length",
            "Content-MD5",
            "Content-Type",
            "Date",
            "If-Modified-Since",
            "If-Match",
            "If-None-Match",
            "If-Unmodified-Since",
            "Range",
        ]
        .into_iter()
        .map(header)
        .collect();
        let mut own: Vec<String> = request
            .headers
            .iter()
            .map(|(name, value)| format!("{}:{}\n", name.to_ascii_lowercase(), value.trim()))
            .filter(|line| line.starts_with("x-ms-"))
            .collect();
        own.sort();
        format!(
            "{}\n{}\n{}/{}{}",
            request.method,
            named.join("\n"),
            own.concat(),
            self.account,
            request.url.path
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn located(options: &RemoteOptions) -> (Url, Option<Credential>) {
        locate(Object::parse("models/a b").unwrap(), options, &|_| None).unwrap()
    }

    #[test]
    fn a_blob_has_a_url_and_its_signed_query_is_not_shown() {
        let mut options = RemoteOptions {
            account: Some("me".to_owned()),
            ..RemoteOptions::default()
        };
        let (url, credential) = located(&options);
        assert_eq!(url.to_string(), "https://me.blob.core.windows.net/models/a%20b");
        assert!(credential.is_none());
        options.sas_token = Some(Secret::new("?sv=1&sig=hunter2"));
        let (url, _) = located(&options);
        assert_eq!(url.target(), "/models/a%20b?sv=1&sig=hunter2");
        assert!(!url.to_string().contains("hunter2"));
    }

    #[test]
    fn what_is_signed_is_what_the_service_names() {
        let options = RemoteOptions {
            account: Some("me".to_owned()),
            account_key: Some(Secret::new(STANDARD.encode("hunter2"))),
            ..RemoteOptions::default()
        };
        let (url, Some(Credential::Key(access))) = located(&options) else {
            panic!("a key signs");
        };
        let header = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        let request = HttpRequest {
            method: "GET",
            url: &url,
            headers: vec![
                header("Range", "bytes=0-9"),
                header("If-Match", "\"x\""),
                header("x-ms-version", VERSION),
                header("x-ms-date", "D"),
            ],
            body: &[],
        };
        let text =
            "GET\n\n\n\n\n\n\n\n\"x\"\n\n\nbytes=0-9\nx-ms-date:D\nx-ms-version:2021-12-02\n/me/models/a%20b";
        assert_eq!(access.text(&request), text);
    }

    #[test]
    fn an_account_is_needed() {
        let fault = locate(Object::parse("c/b").unwrap(), &RemoteOptions::default(), &|_| {
            None
        })
        .unwrap_err();
        assert_eq!(fault.code(), "storage-option");
    }
}
