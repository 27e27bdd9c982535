//! Azure Blob Storage.

use std::time::Instant;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use jiff::Timestamp;
use ring::hmac;

use crate::credentials::{Credential, Secret, Variable, credential};
use crate::fault::{Fault, FaultKind};
use crate::http::message::{HttpRequest, http_date};
use crate::http::pace::Deadline;
use crate::options::{RemoteOptions, Token};
use crate::store::bucket::Object;
use crate::store::credentials::source::{Source, given};
use crate::store::credentials::{azure, set};
use crate::store::sigv4::collapsed;
use crate::url::{Url, encode_path};

/// The version of the service that requests are written for. Tokens are known to none before that of 2017.
const VERSION: &str = "2021-12-02";

/// How requests for one account are let in.
#[derive(Debug)]
pub(crate) struct AzureAccess {
    account: String,
    entry: Entry,
}

#[derive(Debug)]
enum Entry {
    /// As anybody, or by a signed query.
    Url,
    Token(Source),
    /// By a signature with the key of the account.
    Key(hmac::Key),
}

/// The URL of a blob, and how to be let in there.
pub(crate) fn locate(
    object: Object<'_>,
    options: &RemoteOptions,
    variable: Variable<'_>,
) -> Result<(Url, AzureAccess), Fault> {
    let connection = Connection::parse(options.connection_string.clone());
    let set_up = Connection::parse(credential(variable, &["AZURE_STORAGE_CONNECTION_STRING"])?);
    let account = options
        .account
        .clone()
        .or_else(|| connection.get("AccountName"))
        .or_else(|| set(variable, &["AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT"]))
        .or_else(|| set_up.get("AccountName"));
    let is_name = |name: &str| !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric());
    let account = account.filter(|name| is_name(name)).ok_or_else(|| {
        option("az:// needs the name of an account: give `account`, or set AZURE_STORAGE_ACCOUNT_NAME")
    })?;
    let endpoint = options
        .endpoint
        .clone()
        .or_else(|| connection.endpoint(&account))
        .or_else(|| set(variable, &["AZURE_STORAGE_ENDPOINT"]))
        .or_else(|| set_up.endpoint(&account))
        .unwrap_or_else(|| format!("https://{account}.blob.core.windows.net"));
    let endpoint = Url::parse(&endpoint)?;
    let (query, entry) = if options.anonymous {
        (None, Entry::Url)
    } else {
        entry(options, variable, &connection, &set_up)?
    };
    let folder = endpoint.path.trim_end_matches('/');
    let url = Url {
        path: format!("{folder}/{}/{}", object.bucket, encode_path(object.key)),
        query,
        user: None,
        ..endpoint
    };
    Ok((url, AzureAccess { account, entry }))
}

/// A connection string of Azure: `AccountName=…;AccountKey=…` and the like.
struct Connection(Vec<(String, String)>);

impl Connection {
    fn parse(text: Option<Secret>) -> Connection {
        let text = text.as_ref().map(Secret::reveal).unwrap_or_default();
        let pairs = text.split(';').filter_map(|pair| pair.split_once('='));
        Connection(
            pairs
                .map(|(name, value)| (name.trim().to_owned(), value.trim().to_owned()))
                .collect(),
        )
    }

    fn get(&self, name: &str) -> Option<String> {
        let pair = self.0.iter().find(|pair| pair.0.eq_ignore_ascii_case(name));
        pair.map(|pair| pair.1.clone()).filter(|value| !value.is_empty())
    }

    fn endpoint(&self, account: &str) -> Option<String> {
        let scheme = || {
            self.get("DefaultEndpointsProtocol")
                .unwrap_or_else(|| "https".to_owned())
        };
        let usual = |suffix: String| format!("{}://{account}.blob.{suffix}", scheme());
        self.get("BlobEndpoint")
            .or_else(|| self.get("EndpointSuffix").map(usual))
    }

    /// What it lets in by.
    fn entry(&self) -> Result<Option<(Option<String>, Entry)>, Fault> {
        let get = |name: &str| self.get(name).map(Secret::new);
        by_url_or_key(get("SharedAccessSignature"), get("AccountKey"))
    }
}

/// The first that is configured of what lets a caller in: a signed query, or what goes with a request that has none.
fn entry(
    options: &RemoteOptions,
    variable: Variable<'_>,
    connection: &Connection,
    set_up: &Connection,
) -> Result<(Option<String>, Entry), Fault> {
    let issued = |source: Source| (None, Entry::Token(source));
    if let Some(source) = given(options, "az") {
        return Ok(issued(source));
    }
    if let Some(entry) = by_url_or_key(options.sas_token.clone(), None)? {
        return Ok(entry);
    }
    if let Token::Given(token) = &options.token {
        let token = Credential::Token(token.clone());
        return Ok(issued(Source::Known("storage_options", token)));
    }
    if let Some(entry) = by_url_or_key(None, options.account_key.clone())? {
        return Ok(entry);
    }
    if options.client_secret.is_some() {
        return azure::of_client_secret(options, variable).map(issued);
    }
    if let Some(entry) = connection.entry()? {
        return Ok(entry);
    }
    let query = credential(variable, &["AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_SAS_KEY"])?;
    let key = credential(variable, &["AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_KEY"])?;
    if let Some(entry) = by_url_or_key(query, key)? {
        return Ok(entry);
    }
    if let Some(entry) = set_up.entry()? {
        return Ok(entry);
    }
    match options.token {
        Token::Withheld => Ok((None, Entry::Url)),
        _ => Ok(azure::of_environment(options, variable)?.map_or((None, Entry::Url), issued)),
    }
}

fn by_url_or_key(
    query: Option<Secret>,
    key: Option<Secret>,
) -> Result<Option<(Option<String>, Entry)>, Fault> {
    let is_given = |secret: &Secret| !secret.reveal().trim().trim_start_matches('?').is_empty();
    match (query.filter(is_given), key.filter(is_given)) {
        (Some(query), _) => {
            let query = query.reveal().trim().trim_start_matches('?');
            if query.bytes().all(|byte| byte.is_ascii_graphic()) {
                Ok(Some((Some(query.to_owned()), Entry::Url)))
            } else {
                Err(option("the signed query has characters that no query has"))
            }
        }
        (None, Some(key)) => {
            let key = STANDARD.decode(key.reveal().trim());
            let key = key.map_err(|_| option("the key of the account is not base64"))?;
            Ok(Some((None, Entry::Key(hmac::Key::new(hmac::HMAC_SHA256, &key)))))
        }
        (None, None) => Ok(None),
    }
}

fn option(why: &str) -> Fault {
    FaultKind::Option(why.to_owned()).into()
}

impl AzureAccess {
    /// The source of the token, or the name of what replaces it.
    pub(crate) fn source(&self, is_signed: bool) -> Result<&Source, Option<&'static str>> {
        match &self.entry {
            Entry::Token(source) => Ok(source),
            Entry::Key(_) => Err(Some("the key of the account")),
            Entry::Url => Err(is_signed.then_some("a signed query")),
        }
    }

    /// Forgets a token that was issued by the time `sent` and then refused. Returns whether there may be others.
    pub(crate) fn forget(&self, sent: Instant) -> bool {
        matches!(&self.entry, Entry::Token(source) if source.forget(sent))
    }

    /// Adds to a request what it is let in by; says whether that is secret.
    pub(crate) fn sign(
        &self,
        request: &mut HttpRequest<'_>,
        options: &RemoteOptions,
        deadline: Deadline<'_>,
    ) -> Result<bool, Fault> {
        let mut add = |name: &str, value: String| request.headers.push((name.to_owned(), value));
        add("x-ms-version", VERSION.to_owned());
        let token = match &self.entry {
            Entry::Url => None,
            Entry::Token(source) => source.token(options, deadline)?,
            Entry::Key(key) => {
                add("x-ms-date", http_date(Timestamp::now()));
                let signature = hmac::sign(key, self.text(request).as_bytes());
                let value = format!("SharedKey {}:{}", self.account, STANDARD.encode(signature));
                request.headers.push(("Authorization".to_owned(), value));
                None
            }
        };
        let is_secret = token.is_some();
        let header = |token: Secret| ("Authorization".to_owned(), format!("Bearer {}", token.reveal()));
        request.headers.extend(token.map(header));
        Ok(is_secret)
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
            .map(|(name, value)| format!("{}:{}\n", name.to_ascii_lowercase(), collapsed(value)))
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

    fn located(options: &RemoteOptions) -> (Url, AzureAccess) {
        locate(Object::parse("models/a b").unwrap(), options, &|_| None).unwrap()
    }

    #[test]
    fn a_blob_has_a_url_and_its_signed_query_is_not_shown() {
        let mut options = RemoteOptions {
            account: Some("me".to_owned()),
            ..RemoteOptions::default()
        };
        let (url, access) = located(&options);
        assert_eq!(url.to_string(), "https://me.blob.core.windows.net/models/a%20b");
        assert!(matches!(access.entry, Entry::Url));
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
        let (url, access) = located(&options);
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
