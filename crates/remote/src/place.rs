//! The location of a file: in a cache of this machine, or behind requests.

use std::path::PathBuf;
use std::sync::Arc;

use ingot_format::StopFlag;

use crate::credentials::{Credential, Found};
use crate::environment::{Environment, PROCESS};
use crate::fault::{Fault, FaultKind, Result};
use crate::http::pace::Deadline;
use crate::options::RemoteOptions;
use crate::secrets::{path_nbytes, redacted};
use crate::store::credentials::source::{Source, given};
use crate::store::hub::{self, HubFile, MODEL_FILE};
use crate::store::{Access, Object, azure, gcs, s3};
use crate::system::path_of_url;
use crate::url::{SCHEMES, Url, decode, decoded, encode_path, split_collapsed, split_scheme};

/// The schemes of ingot, and the names of other libraries for the same store.
const OTHER_NAMES: &[(&str, &[&str])] = &[
    ("s3", &["s3a", "s3n"]),
    ("gs", &["gcs"]),
    ("az", &["abfs", "abfss", "adl", "azure", "wasb", "wasbs"]),
    ("hf", &["huggingface"]),
];

/// The schemes of stores that files are written to.
const WRITTEN: &[&str] = &["s3", "az"];

/// Whether `text` begins as a URL does, of any scheme. Such a text is never used as a path.
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

/// Whether `text` is a URL of a store that files are written to.
///
/// ```
/// use ingot_remote::is_written;
///
/// assert!(is_written("s3://bucket/model.safetensors"));
/// assert!(!is_written("https://host/model.safetensors"));
/// ```
#[must_use]
pub fn is_written(text: &str) -> bool {
    scheme_of(text).is_some_and(|(scheme, _)| WRITTEN.contains(&scheme))
}

/// Whether `path` is a URL that a library for paths has shortened from `://` to `:/`.
#[must_use]
pub fn was_url(path: &str) -> bool {
    split_collapsed(path).is_some()
}

fn scheme_of(text: &str) -> Option<(&'static str, &str)> {
    let (scheme, rest) = split_scheme(text)?;
    let known = SCHEMES.iter().find(|known| known.eq_ignore_ascii_case(scheme))?;
    Some((known, rest))
}

/// Return the fault of a URL with an unknown scheme, which lists the known ones.
fn unknown_scheme(text: &str) -> Fault {
    let known = SCHEMES.join("://, ");
    let Some((scheme, _)) = split_scheme(text) else {
        let why = format!("expected a URL that begins with one of {known}:// or file://");
        return Fault::address(why);
    };
    let is_other = |other: &&str| other.eq_ignore_ascii_case(scheme);
    let meant = OTHER_NAMES.iter().find(|row| row.1.iter().any(is_other));
    let hint = meant.map_or(String::new(), |row| format!(" — did you mean {}://?", row.0));
    Fault::address(format!(
        "the scheme {scheme}:// is unknown: expected one of {known}://, file://{hint}"
    ))
}

/// The location of a file.
///
/// ```
/// use ingot_remote::{Location, RemoteOptions, StopFlag};
///
/// let Location::Remote(remote) = Location::find("https://host/model.safetensors", &RemoteOptions::default(), StopFlag::never())? else {
///     panic!("not a file of this machine");
/// };
/// assert_eq!((remote.backend, remote.path()), ("http", "/model.safetensors"));
/// # Ok::<(), ingot_remote::Fault>(())
/// ```
#[derive(Debug)]
pub enum Location {
    /// A path of this machine: of a `file:` URL, or in a cache of the Hub. Files that the cache lacks are at the second
    /// location, unless requests to the Hub are forbidden.
    Cached(PathBuf, Option<Box<Remote>>),
    /// Behind requests.
    Remote(Box<Remote>),
}

/// A file, or a folder of the Hub, behind requests, and the credentials for it.
#[derive(Clone, Debug)]
pub struct Remote {
    /// `http`, `hf`, `s3`, `gs` or `az`.
    pub backend: &'static str,
    pub(crate) home: Url,
    pub(crate) access: Arc<Access>,
    /// The URL that the caller gave, without secrets.
    pub shown: String,
    /// The key of an object of a store.
    pub(crate) key: Option<String>,
    /// The file or folder of the Hub.
    pub(crate) hub: Option<HubFile>,
}

impl Location {
    /// Parse a URL. This is the only place that parses URLs of callers. A provider of credentials is called if it may
    /// name the region or the endpoint, within [`RemoteOptions::timeout`].
    ///
    /// # Errors
    /// [`Fault`], if the URL is invalid or an option does not fit it.
    pub fn find(text: &str, options: &RemoteOptions, stop: StopFlag<'_>) -> Result<Location> {
        Location::find_with(text, options, PROCESS, stop)
    }

    fn find_with(
        text: &str,
        options: &RemoteOptions,
        environment: Environment<'_>,
        stop: StopFlag<'_>,
    ) -> Result<Location> {
        options.check()?;
        let options = &options.without_empty();
        let Some((scheme, rest)) = scheme_of(text) else {
            let path = local_path(text).ok_or_else(|| unknown_scheme(text))??;
            return Ok(Location::Cached(path, None));
        };
        let (backend, (home, access)) = match scheme {
            "hf" => return Location::of_hub(text, &HubFile::parse(rest)?, options, environment),
            "s3" => {
                let deadline = Deadline::within(options.timeout, stop);
                ("s3", s3::locate(rest, options, environment, deadline)?)
            }
            "gs" => ("gs", gcs::locate(Object::parse(rest)?, options, environment)?),
            "az" => ("az", azure::locate(Object::parse(rest)?, options, environment)?),
            _ => {
                let url = Url::parse(text)?;
                if let Some(file) = HubFile::of_url(&url, environment) {
                    return Location::of_hub(text, &file?, options, environment);
                }
                let token = options.given_token().cloned().map(Credential::Token);
                let token = token.map(|token| Source::known("storage_options", token));
                let access = Access::http(given(options, "http").or(token), &url);
                ("http", (url, access))
            }
        };
        let mut remote = Remote::new(backend, text, home, access, None);
        if backend != "http" {
            let object = Object::parse(s3::without_version(rest))?;
            remote.key = Some(object.key.to_owned());
        }
        Ok(Location::Remote(remote))
    }

    fn of_hub(
        text: &str,
        file: &HubFile,
        options: &RemoteOptions,
        environment: Environment<'_>,
    ) -> Result<Location> {
        let meant = file.meant();
        if hub::is_offline(environment) || options.is_offline() {
            if let Some(path) = meant.iter().find_map(|file| file.cached_offline(environment)) {
                return Ok(Location::Cached(path, None));
            }
            // A cache of blocks may have what the Hub's cache lacks.
            if !options.is_offline() {
                let why = "HF_HUB_OFFLINE is set, and the file is not in the Hub's local cache";
                return Err(FaultKind::Offline(why.to_owned()).into());
            }
        }
        let token = hub::token(options, environment)?;
        let cached = meant
            .iter()
            .find_map(|file| Some((file, file.cached(environment)?)));
        let (file, path) = cached.map_or((file, None), |(file, path)| (file, Some(path)));
        let home = file.url(options, environment)?;
        let access = Access::http(given(options, "hf").or(token), &home);
        let remote = Remote::new("hf", text, home, access, Some(file.clone()));
        Ok(match path {
            Some(path) => Location::Cached(path, Some(remote)),
            None => Location::Remote(remote),
        })
    }
}

impl Remote {
    fn new(
        backend: &'static str,
        text: &str,
        home: Url,
        access: Access,
        hub: Option<HubFile>,
    ) -> Box<Remote> {
        Box::new(Remote {
            backend,
            home,
            access: Arc::new(access),
            shown: redacted(text),
            key: None,
            hub,
        })
    }

    /// Return the setting that contains the identity of requests, and the identity if it is keys or a token. `None` for
    /// requests without credentials.
    ///
    /// # Errors
    /// [`Fault`], if a service or a provider fails.
    pub fn identity(&self, options: &RemoteOptions, stop: StopFlag<'_>) -> Result<Option<Found>> {
        let deadline = Deadline::within(options.timeout, stop);
        self.access.identity(&self.home, options, deadline)
    }

    /// Whether its name is the name of an index.
    pub fn is_index(&self) -> bool {
        self.home.path.ends_with(".json")
    }

    /// Whether the caller gave the URL of the requests.
    pub(crate) fn is_shown(&self) -> bool {
        self.backend == "http"
    }

    /// Return the file at a commit of the Hub.
    pub fn at(self, commit: Option<String>) -> Remote {
        Remote {
            hub: self.hub.map(|file| file.at(commit)),
            ..self
        }
    }

    /// Whether it is a folder of the Hub or of a store, which means the model in it.
    #[must_use]
    pub fn is_folder(&self) -> bool {
        match &self.hub {
            Some(file) => file.is_folder(),
            None => !self.is_shown() && self.home.path.ends_with('/'),
        }
    }

    /// Whether it is a file or a folder of the Hub.
    #[must_use]
    pub fn is_of_hub(&self) -> bool {
        self.hub.is_some()
    }

    /// Return the path in the URL of requests.
    #[must_use]
    pub fn path(&self) -> &str {
        &self.home.path
    }

    /// Return the file in the Hub's cache if its revision is a commit.
    #[must_use]
    pub fn cached(&self) -> Option<PathBuf> {
        self.hub.as_ref()?.cached(PROCESS)
    }

    /// Return the file in the Hub's cache at the commit that a server named.
    #[must_use]
    pub fn cached_at(&self, commit: Option<&str>) -> Option<PathBuf> {
        self.hub.as_ref()?.cached_at(commit?, PROCESS)
    }

    /// Return the file `name` beside this one, or in this folder, with the same host and credentials.
    ///
    /// # Errors
    /// [`Fault`], if an option does not fit.
    pub fn beside(&self, name: &str, options: &RemoteOptions) -> Result<Remote> {
        let mut beside = self.clone();
        if let Some(file) = self.hub.as_ref().map(|file| file.beside(name)) {
            beside.home = file.url(options, PROCESS)?;
            beside.shown = file.shown();
            beside.hub = Some(file);
            return Ok(beside);
        }
        beside.home.path = format!("{}{}", folder_of(&self.home.path), encode_path(name));
        beside.key = self.key.as_ref().map(|key| format!("{}{name}", folder_of(key)));
        // A query of S3 selects a version of one object. Other queries are signatures, often for a whole folder.
        beside.home.query.take_if(|_| self.backend == "s3");
        beside.shown = if self.is_shown() {
            beside.home.to_string()
        } else {
            format!("{}{name}", folder_of(s3::without_version(&self.shown)))
        };
        Ok(beside)
    }
}

/// Return the file name in `url`, which may be empty.
///
/// ```
/// use ingot_remote::url_file_name;
///
/// assert_eq!(url_file_name("https://host/models/a%20b.safetensors?download=true"), "a b.safetensors");
/// ```
#[must_use]
pub fn url_file_name(url: &str) -> String {
    match hub_file(url) {
        Some(Ok(file)) if file.is_folder() => return MODEL_FILE.to_owned(),
        Some(Ok(file)) => return file.name().to_owned(),
        _ if is_folder_of_store(url) => return MODEL_FILE.to_owned(),
        _ => {}
    }
    let (scheme, rest) = url.split_once("://").unwrap_or(("", url));
    let is_http = scheme.to_ascii_lowercase().starts_with("http");
    let path = &rest[..path_nbytes(scheme, rest)];
    let name = path.split_once('/').map_or("", |(_, path)| path);
    let name = name.rsplit('/').next().unwrap_or_default();
    if is_http { decode(name) } else { name.to_owned() }
}

/// Whether `url` names a repository of the Hub, a folder of one, or a folder of a store, which means the model in it.
///
/// ```
/// use ingot_remote::is_folder;
///
/// assert!(is_folder("hf://openai-community/gpt2"));
/// assert!(is_folder("s3://bucket/gpt2/"));
/// assert!(!is_folder("hf://openai-community/gpt2/model.safetensors"));
/// ```
#[must_use]
pub fn is_folder(url: &str) -> bool {
    matches!(hub_file(url), Some(Ok(file)) if file.is_folder()) || is_folder_of_store(url)
}

fn is_folder_of_store(url: &str) -> bool {
    matches!(scheme_of(url), Some(("s3" | "gs" | "az", rest)) if rest.ends_with('/'))
}

/// Return the file of the Hub that a URL names, or `None` for other URLs.
pub(crate) fn hub_file(url: &str) -> Option<Result<HubFile>> {
    match scheme_of(url)? {
        ("hf", rest) => Some(HubFile::parse(rest)),
        ("http" | "https", _) => match Url::parse(url) {
            Ok(url) => HubFile::of_url(&url, PROCESS),
            Err(fault) => Some(Err(fault)),
        },
        _ => None,
    }
}

/// Return the part of a path up to its last slash.
fn folder_of(path: &str) -> &str {
    path.rfind('/').map_or("", |end| &path[..=end])
}

/// Return the path of a `file:` URL (RFC 8089), or `None` for other texts.
///
/// # Errors
/// [`Fault`], if the URL names another machine, has no path from the root, has a query, or is not properly encoded.
#[must_use]
pub fn local_path(text: &str) -> Option<Result<PathBuf>> {
    let (scheme, rest) = text.split_once(':')?;
    let is_file = scheme.eq_ignore_ascii_case("file") && rest.starts_with('/');
    is_file.then(|| path_of(rest).map_err(Fault::address))
}

fn path_of(rest: &str) -> Result<PathBuf, &'static str> {
    let path = match rest.strip_prefix("//") {
        Some(rest) => {
            let (host, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
            if !host.is_empty() && !host.eq_ignore_ascii_case("localhost") {
                return Err("a file: URL names a file of this machine: expected file:///…, found a host");
            }
            path
        }
        None => rest,
    };
    if !path.starts_with('/') {
        return Err("expected file:/// and a path from the root");
    }
    if path.contains(['?', '#']) {
        return Err("in a file: URL, write ? as %3F and # as %23");
    }
    let bytes = decoded(path).ok_or("the path has a % without two hexadecimal digits")?;
    if bytes.contains(&0) {
        return Err("the path has a null byte");
    }
    path_of_url(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_have_file_names() {
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
    fn is_url_distinguishes_urls_from_paths() {
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
    fn local_path_decodes_file_urls() {
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
    fn unknown_schemes_are_rejected_with_the_known_ones() {
        let find = |text: &str| {
            let found = Location::find_with(
                text,
                &RemoteOptions::default(),
                Environment(&|_| None),
                StopFlag::never(),
            );
            found.unwrap_err().to_string()
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
