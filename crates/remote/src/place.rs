//! Where a URL leads: to a file of this machine's caches, or one behind a request.

use std::path::PathBuf;
use std::sync::Arc;

use ingot_format::StopFlag;

use crate::access::Access;
use crate::credentials::Identity;
use crate::fault::{Fault, FaultKind};
use crate::http::pace::Deadline;
use crate::options::{RemoteOptions, Token, environment};
use crate::secrets::{path_nbytes, redacted};
use crate::store::Object;
use crate::store::azure;
use crate::store::credentials::source::given;
use crate::store::gcs;
use crate::store::hub::{self, HubFile, MODEL_FILE};
use crate::store::s3;
use crate::system::path_of_url;
use crate::url::{SCHEMES, Url, decode, decoded, encode_path, split_collapsed, split_scheme};

/// What others call the same, with what it is here.
const OTHER_NAMES: &[(&str, &str)] = &[
    ("s3a", "s3"),
    ("s3n", "s3"),
    ("gcs", "gs"),
    ("abfs", "az"),
    ("abfss", "az"),
    ("adl", "az"),
    ("azure", "az"),
    ("wasb", "az"),
    ("wasbs", "az"),
    ("huggingface", "hf"),
];

/// Whether `text` begins as a URL does, of a known scheme or another: such a thing is never taken for a path.
///
/// ```
/// use ingot_remote::is_url;
///
/// assert!(is_url("s3://bucket/model.safetensors"));
/// assert!(is_url("file:///models/model.safetensors"));
/// assert!(!is_url("C:\\models\\model.safetensors"));
/// ```
#[must_use]
pub fn is_url(text: &str) -> bool {
    split_scheme(text).is_some() || local_path(text).is_some()
}

/// Whether `path` begins as one does that was a URL, of which a library for paths leaves one slash of two.
#[must_use]
pub fn was_url(path: &str) -> bool {
    split_collapsed(path).is_some()
}

fn scheme_of(text: &str) -> Option<(&'static str, &str)> {
    let (scheme, rest) = split_scheme(text)?;
    let known = SCHEMES.iter().find(|known| known.eq_ignore_ascii_case(scheme))?;
    Some((known, rest))
}

/// Refuses a URL of no known scheme, and says which there are.
fn unknown_scheme(text: &str) -> Fault {
    let known = SCHEMES.join("://, ");
    let why = match split_scheme(text) {
        None => format!("expected a URL that begins with one of {known}:// or file://"),
        Some((scheme, _)) => {
            let other = OTHER_NAMES.iter().find(|row| row.0.eq_ignore_ascii_case(scheme));
            let hint = other.map_or(String::new(), |row| format!(" — did you mean {}://?", row.1));
            format!("the scheme {scheme}:// is unknown: expected one of {known}://, file://{hint}")
        }
    };
    FaultKind::Address(why).into()
}

/// Where a file is.
///
/// ```
/// use ingot_remote::{Location, RemoteOptions, StopFlag};
///
/// let Location::Remote(remote) = Location::find("https://host/model.safetensors", &RemoteOptions::default(), StopFlag::never())? else {
///     panic!("it is on no disk");
/// };
/// assert_eq!((remote.backend, remote.path()), ("http", "/model.safetensors"));
/// # Ok::<(), ingot_remote::Fault>(())
/// ```
#[derive(Debug)]
pub enum Location {
    /// On this machine: named as a file, or in a cache of the Hub. What is missing there can be had from the Hub, if it may be asked.
    Cached(PathBuf, Option<Box<Remote>>),
    /// Behind requests.
    Remote(Box<Remote>),
}

/// A file, or a folder of the Hub, behind requests, and what lets a caller in there.
#[derive(Clone, Debug)]
pub struct Remote {
    /// What it is asked with: `http`, `hf`, `s3`, `gs` or `az`.
    pub backend: &'static str,
    pub(crate) home: Url,
    pub(crate) access: Arc<Access>,
    /// What the caller knows it by, without secrets.
    pub shown: String,
    /// The file of the Hub that it is, or the folder that has it.
    pub(crate) hub: Option<HubFile>,
}

impl Location {
    /// Reads a URL, once: nothing after this takes it apart again. A provider of credentials is called if it may name
    /// the region or the endpoint, within [`RemoteOptions::timeout`].
    ///
    /// # Errors
    /// [`Fault`], where it is no URL or an option does not fit it.
    pub fn find(text: &str, options: &RemoteOptions, stop: StopFlag<'_>) -> Result<Location, Fault> {
        Location::find_with(text, options, &environment, stop)
    }

    fn find_with(
        text: &str,
        options: &RemoteOptions,
        variable: &dyn Fn(&str) -> Option<String>,
        stop: StopFlag<'_>,
    ) -> Result<Location, Fault> {
        options.check()?;
        let options = &options.without_empty();
        match scheme_of(text) {
            Some(("hf", rest)) => Location::of_hub(text, HubFile::parse(rest)?, options, variable),
            Some(("s3", rest)) => {
                let (home, access) =
                    s3::locate(rest, options, variable, Deadline::within(options.timeout, stop))?;
                Ok(Location::remote("s3", text, home, Access::S3(access)))
            }
            Some(("gs", rest)) => {
                let (home, access) = gcs::locate(Object::parse(rest)?, options, variable)?;
                Ok(Location::remote("gs", text, home, access))
            }
            Some(("az", rest)) => {
                let (home, access) = azure::locate(Object::parse(rest)?, options, variable)?;
                Ok(Location::remote("az", text, home, Access::Azure(access)))
            }
            Some(_) => {
                let url = Url::parse(text)?;
                if let Some(file) = HubFile::of_url(&url, variable) {
                    return Location::of_hub(text, file?, options, variable);
                }
                let access = match (given(options, "http"), &options.token) {
                    (Some(source), _) => Access::Token(source),
                    (None, Token::Given(token)) => Access::bearer(Some(token.clone())),
                    (None, _) => Access::basic(url.user.as_deref()),
                };
                Ok(Location::remote("http", text, url, access))
            }
            None => match local_path(text) {
                Some(path) => Ok(Location::Cached(path?, None)),
                None => Err(unknown_scheme(text)),
            },
        }
    }

    fn of_hub(
        text: &str,
        file: HubFile,
        options: &RemoteOptions,
        variable: &dyn Fn(&str) -> Option<String>,
    ) -> Result<Location, Fault> {
        let meant = file.meant();
        if hub::is_offline(variable) {
            let cached = meant.iter().find_map(|file| file.cached_offline(variable));
            return cached.map(|path| Location::Cached(path, None)).ok_or_else(|| {
                let why = "HF_HUB_OFFLINE is set, and the file is not in the Hub's local cache";
                FaultKind::Offline(why.to_owned()).into()
            });
        }
        let token = hub::token(options, variable)?;
        let remote = |file: &HubFile| -> Result<Box<Remote>, Fault> {
            let home = file.url(options, variable)?;
            let access = match (given(options, "hf"), token) {
                (Some(source), _) => Access::Token(source),
                (None, Some(token)) => Access::bearer(Some(token)),
                (None, None) => Access::basic(home.user.as_deref()),
            };
            Ok(Box::new(Remote {
                backend: "hf",
                home,
                access: Arc::new(access),
                shown: redacted(text),
                hub: Some(file.clone()),
            }))
        };
        let cached = |file: &HubFile| Some((file.cached(variable)?, file.clone()));
        match meant.iter().find_map(cached) {
            Some((path, file)) => Ok(Location::Cached(path, Some(remote(&file)?))),
            None => Ok(Location::Remote(remote(&file)?)),
        }
    }

    fn remote(backend: &'static str, text: &str, home: Url, access: Access) -> Location {
        Location::Remote(Box::new(Remote {
            backend,
            home,
            access: Arc::new(access),
            shown: redacted(text),
            hub: None,
        }))
    }
}

impl Remote {
    /// Return the setting that holds the identity of requests, and the identity if it is keys or a token. `None` for
    /// requests without credentials.
    ///
    /// # Errors
    /// [`Fault`], if a service or a provider fails.
    pub fn identity(
        &self,
        options: &RemoteOptions,
        stop: StopFlag<'_>,
    ) -> Result<Option<(String, Option<Identity>)>, Fault> {
        self.access
            .identity(&self.home, options, Deadline::within(options.timeout, stop))
    }

    /// Whether its name is that of an index.
    pub fn is_index(&self) -> bool {
        self.home.path.ends_with(".json")
    }

    /// Whether the caller knows it by the URL that is asked.
    pub(crate) fn is_shown(&self) -> bool {
        self.backend == "http"
    }

    /// The same as of a commit of the Hub, if it is one.
    pub fn at(self, commit: Option<String>) -> Remote {
        Remote {
            hub: self.hub.map(|file| file.at(commit)),
            ..self
        }
    }

    /// Whether it is a folder of the Hub, whose model is meant.
    #[must_use]
    pub fn is_folder(&self) -> bool {
        self.hub.as_ref().is_some_and(HubFile::is_folder)
    }

    /// The path of the URL that is asked.
    #[must_use]
    pub fn path(&self) -> &str {
        &self.home.path
    }

    /// The file in the Hub's cache, where it names a commit that lies there.
    #[must_use]
    pub fn cached(&self) -> Option<PathBuf> {
        self.hub.as_ref()?.cached(&environment)
    }

    /// The file in the Hub's cache, as of the commit that a server gave it as.
    #[must_use]
    pub fn cached_at(&self, commit: Option<&str>) -> Option<PathBuf> {
        self.hub.as_ref()?.cached_at(commit?, &environment)
    }

    /// The file `name` beside this one, or in this folder: asked of the same host, in the same way.
    ///
    /// # Errors
    /// [`Fault`], where an option does not fit.
    pub fn beside(&self, name: &str, options: &RemoteOptions) -> Result<Remote, Fault> {
        if let Some(file) = self.hub.as_ref().map(|file| file.beside(name)) {
            return Ok(Remote {
                home: file.url(options, &environment)?,
                shown: file.shown(),
                hub: Some(file),
                ..self.clone()
            });
        }
        let folder = folder_of(&self.home.path);
        let home = Url {
            path: format!("{folder}{}", encode_path(name)),
            // That of S3 names a version of one object; others let in, to a whole folder as often as to one file.
            query: self.home.query.clone().filter(|_| self.backend != "s3"),
            ..self.home.clone()
        };
        let shown = if self.is_shown() {
            home.to_string()
        } else {
            format!("{}{name}", folder_of(s3::without_version(&self.shown)))
        };
        Ok(Remote {
            home,
            shown,
            ..self.clone()
        })
    }
}

/// What the file behind `url` is called. Empty where the URL names none.
///
/// ```
/// use ingot_remote::url_file_name;
///
/// assert_eq!(url_file_name("https://host/models/a%20b.safetensors?download=true"), "a b.safetensors");
/// ```
#[must_use]
pub fn url_file_name(url: &str) -> String {
    match hub_file(url, &environment) {
        Some(Ok(file)) if file.is_folder() => return MODEL_FILE.to_owned(),
        Some(Ok(file)) => return file.name().to_owned(),
        _ => {}
    }
    let (scheme, rest) = url.split_once("://").unwrap_or(("", url));
    let is_http = scheme.to_ascii_lowercase().starts_with("http");
    let path = &rest[..path_nbytes(scheme, rest)];
    let name = path.split_once('/').map_or("", |(_, path)| path);
    let name = name.rsplit('/').next().unwrap_or_default();
    if is_http { decode(name) } else { name.to_owned() }
}

/// Whether `url` names a repository of the Hub, or a folder of one, whose model is meant.
///
/// ```
/// use ingot_remote::is_repository;
///
/// assert!(is_repository("hf://openai-community/gpt2"));
/// assert!(!is_repository("hf://openai-community/gpt2/model.safetensors"));
/// ```
#[must_use]
pub fn is_repository(url: &str) -> bool {
    matches!(hub_file(url, &environment), Some(Ok(file)) if file.is_folder())
}

/// The file of the Hub that a URL names, or `None` where it is one of something else.
pub(crate) fn hub_file(
    url: &str,
    variable: &dyn Fn(&str) -> Option<String>,
) -> Option<Result<HubFile, Fault>> {
    let (scheme, rest) = url.split_once("://")?;
    match scheme.to_ascii_lowercase().as_str() {
        "hf" => Some(HubFile::parse(rest)),
        "http" | "https" => match Url::parse(url) {
            Ok(url) => HubFile::of_url(&url, variable),
            Err(fault) => Some(Err(fault)),
        },
        _ => None,
    }
}

/// What ends with the last slash.
fn folder_of(path: &str) -> &str {
    path.rfind('/').map_or("", |end| &path[..=end])
}

/// The path that a URL of `file:` names, or `None` where `text` is none. RFC 8089: of this machine, percent-decoded.
///
/// # Errors
/// [`Fault`]: of another machine, without a path from the root, with a query, or not properly encoded.
#[must_use]
pub fn local_path(text: &str) -> Option<Result<PathBuf, Fault>> {
    let (scheme, rest) = text.split_once(':')?;
    let is_file = scheme.eq_ignore_ascii_case("file") && rest.starts_with('/');
    is_file.then(|| path_of(rest).map_err(|why| FaultKind::Address(why.to_owned()).into()))
}

fn path_of(rest: &str) -> Result<PathBuf, &'static str> {
    let path = match rest.strip_prefix("//") {
        Some(rest) => {
            let (host, _) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
            if !host.is_empty() && !host.eq_ignore_ascii_case("localhost") {
                return Err("a URL of file: names a file of this machine: expected file:///…, found a host");
            }
            &rest[host.len()..]
        }
        None => rest,
    };
    if !path.starts_with('/') {
        return Err("expected file:/// and a path from the root");
    }
    if path.contains(['?', '#']) {
        return Err("a path in a URL of file: has ? as %3F and # as %23");
    }
    let bytes = decoded(path).ok_or("the path has a % that two hexadecimal digits do not follow")?;
    if bytes.contains(&0) {
        return Err("the path has a null byte");
    }
    path_of_url(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_behind_a_url_has_a_name() {
        for (url, name) in [
            ("https://h/a/model.safetensors?sig=/x", "model.safetensors"),
            ("https://huggingface.co/me/gpt", "model.safetensors"),
            ("hf://me/gpt@v1", "model.safetensors"),
            ("hf://me/gpt/a/x.bt", "x.bt"),
            ("s3://b/a/x?.bt", "x?.bt"),
            ("s3://b/a/x.bt?versionId=1", "x.bt"),
            ("az://c/x.bt?sv=1&sig=/x", "x.bt"),
        ] {
            assert_eq!(url_file_name(url), name, "{url}");
        }
    }

    #[test]
    fn a_path_is_never_taken_for_a_url() {
        for text in [
            "model.safetensors",
            "/http/x",
            "http:/x",
            "https:x",
            "C://x",
            "file:x",
            "./s3://b/k",
            " http://h/x",
            "a b://x",
        ] {
            assert!(!is_url(text), "{text}");
        }
        for text in [
            "http://h/x",
            "HTTPS://h/x",
            "hf://a/b",
            "s3://b/k",
            "gs://b/k",
            "az://c/b",
            "ftp://h/x",
            "file:/x",
            "xhttp://h/x",
            "simplecache::s3://b/k",
        ] {
            assert!(is_url(text), "{text}");
        }
    }

    #[test]
    fn a_url_of_a_file_is_a_path() {
        let path = |text: &str| local_path(text).unwrap();
        for (text, expected) in [
            ("file:///a/b%20c%2B", "/a/b c+"),
            ("FILE://LocalHost/a", "/a"),
            ("file:/a", "/a"),
            ("file:///%C3%BC@x", "/ü@x"),
        ] {
            assert_eq!(path(text).unwrap(), PathBuf::from(expected), "{text}");
        }
        for text in [
            "file://host/a",
            "file://",
            "file://u:p@localhost/a",
            "file:///a?b",
            "file:///a%00",
            "file:///a%2",
            "file:///a%+2",
        ] {
            assert_eq!(path(text).unwrap_err().code(), "bad-url", "{text}");
        }
        assert!(local_path("file:a").is_none() && local_path("files:///a").is_none());
    }

    #[test]
    fn an_unknown_scheme_is_named_with_those_that_are_known() {
        let find = |text: &str| {
            Location::find_with(text, &RemoteOptions::default(), &|_| None, StopFlag::never())
                .unwrap_err()
                .to_string()
        };
        for scheme in ["ftp", "memory", "s3a", "simplecache::s3"] {
            let why = find(&format!("{scheme}://u:hunter2@h/x"));
            assert!(
                why.contains(&format!("the scheme {scheme}:// is unknown")) && why.contains("hf://"),
                "{why}"
            );
            assert!(!why.contains("hunter2"), "{why}");
        }
        assert!(find("gcs://b/k").ends_with("did you mean gs://?"));
    }
}
