//! What a URL names: a file of this machine's caches, or one behind a request.

use std::path::PathBuf;
use std::sync::Arc;

use super::access::Access;
use super::azure;
use super::bucket::Object;
use super::fault::{Fault, FaultKind};
use super::gcs;
use super::hub::{self, HubFile};
use super::options::{RemoteOptions, Token};
use super::s3;
use super::url::{Url, encode_path};

/// The schemes that are known. A path that begins with anything else is a path.
const SCHEMES: &[&str] = &["http", "https", "hf", "s3", "gs", "az"];

/// Whether `text` begins as a URL does that can be opened.
#[must_use]
pub fn is_url(text: &str) -> bool {
    scheme_of(text).is_some()
}

fn scheme_of(text: &str) -> Option<(&'static str, &str)> {
    let (scheme, rest) = text.split_once("://")?;
    let known = SCHEMES.iter().find(|known| known.eq_ignore_ascii_case(scheme))?;
    Some((known, rest))
}

/// Where a file is.
#[derive(Debug)]
pub(crate) enum Place {
    /// On this machine, in a cache of the Hub. What is missing there can be had from the Hub, if it may be asked.
    Cached(PathBuf, Option<Box<Remote>>),
    /// Behind requests.
    Remote(Box<Remote>),
}

#[derive(Clone, Debug)]
pub(crate) struct Remote {
    /// What it is asked with: `http`, `hf`, `s3`, `gs` or `az`.
    pub(crate) backend: &'static str,
    pub(crate) home: Url,
    pub(crate) access: Arc<Access>,
    /// What the caller knows it by, without secrets.
    pub(crate) shown: String,
    /// The file of the Hub that it is, or the folder that has it.
    pub(crate) hub: Option<HubFile>,
}

impl Place {
    /// Reads a URL, once: nothing after this takes it apart again.
    pub(crate) fn find(
        text: &str,
        options: &RemoteOptions,
        variable: &dyn Fn(&str) -> Option<String>,
    ) -> Result<Place, Fault> {
        options.check()?;
        match scheme_of(text) {
            Some(("hf", rest)) => Place::of_hub(text, HubFile::parse(rest)?, options, variable),
            Some(("s3", rest)) => {
                let (home, access) = s3::locate(rest, options, variable)?;
                Ok(Place::remote("s3", text, home, Access::S3(access)))
            }
            Some(("gs", rest)) => {
                let (home, access) = gcs::locate(Object::parse(rest)?, options, variable)?;
                Ok(Place::remote("gs", text, home, access))
            }
            Some(("az", rest)) => {
                let (home, access) = azure::locate(Object::parse(rest)?, options, variable)?;
                Ok(Place::remote("az", text, home, access))
            }
            Some(_) => {
                let url = Url::parse(text)?;
                if let Some(file) = HubFile::of_url(&url, variable) {
                    return Place::of_hub(text, file?, options, variable);
                }
                let token = match &options.token {
                    Token::Given(token) => Some(token.clone()),
                    _ => None,
                };
                Ok(Place::remote("http", text, url, Access::bearer(token)))
            }
            None => {
                let known = SCHEMES.join("://, ");
                Err(FaultKind::Address(format!("expected a URL that begins with one of {known}://")).into())
            }
        }
    }

    fn of_hub(
        text: &str,
        file: HubFile,
        options: &RemoteOptions,
        variable: &dyn Fn(&str) -> Option<String>,
    ) -> Result<Place, Fault> {
        let meant = file.meant();
        if hub::is_offline(variable) {
            let cached = meant.iter().find_map(|file| file.cached_offline(variable));
            return cached.map(|path| Place::Cached(path, None)).ok_or_else(|| {
                let why = "HF_HUB_OFFLINE is set, and the file is not in the Hub's local cache";
                FaultKind::Offline(why.to_owned()).into()
            });
        }
        let access = Access::bearer(hub::token(options, variable)?);
        let remote = |file: &HubFile| -> Result<Box<Remote>, Fault> {
            Ok(Box::new(Remote {
                backend: "hf",
                home: file.url(options, variable)?,
                access: Arc::new(access),
                shown: redacted(text),
                hub: Some(file.clone()),
            }))
        };
        let cached = |file: &HubFile| Some((file.cached(variable)?, file.clone()));
        match meant.iter().find_map(cached) {
            Some((path, file)) => Ok(Place::Cached(path, Some(remote(&file)?))),
            None => Ok(Place::Remote(remote(&file)?)),
        }
    }

    fn remote(backend: &'static str, text: &str, home: Url, access: Access) -> Place {
        Place::Remote(Box::new(Remote {
            backend,
            home,
            access: Arc::new(access),
            shown: redacted(text),
            hub: None,
        }))
    }
}

impl Remote {
    /// Whether its name is that of an index.
    pub(crate) fn is_index(&self) -> bool {
        self.home.path.ends_with(".json")
    }

    /// Whether the caller knows it by the URL that is asked.
    pub(crate) fn is_shown(&self) -> bool {
        self.backend == "http"
    }

    /// The same as of a commit of the Hub, if it is one.
    pub(crate) fn at(self, commit: Option<String>) -> Remote {
        Remote {
            hub: self.hub.map(|file| file.at(commit)),
            ..self
        }
    }

    /// The file `name` beside this one, or in this folder: asked of the same host, in the same way.
    pub(crate) fn beside(
        &self,
        name: &str,
        options: &RemoteOptions,
        variable: &dyn Fn(&str) -> Option<String>,
    ) -> Result<Remote, Fault> {
        if let Some(file) = self.hub.as_ref().map(|file| file.beside(name)) {
            return Ok(Remote {
                home: file.url(options, variable)?,
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
        let shown = match self.is_shown() {
            true => home.to_string(),
            false => format!("{}{name}", folder_of(s3::without_version(&self.shown))),
        };
        Ok(Remote {
            home,
            shown,
            ..self.clone()
        })
    }
}

/// What ends with the last slash.
fn folder_of(path: &str) -> &str {
    path.rfind('/').map_or("", |end| &path[..=end])
}

/// `text` without what may be secret in it, whether it is a proper URL or not.
#[must_use]
pub fn redacted(text: &str) -> String {
    let Some((scheme, rest)) = text.split_once("://") else {
        return text.to_owned();
    };
    // Keys may hold any character, and no secrets.
    if ["s3", "gs", "az"]
        .iter()
        .any(|store| scheme.eq_ignore_ascii_case(store))
    {
        return text.to_owned();
    }
    let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
    let (authority, rest) = rest.split_at(end);
    let host = authority.rsplit_once('@').map_or(authority, |(_, host)| host);
    let host = if scheme.eq_ignore_ascii_case("hf") {
        authority
    } else {
        host
    };
    let (path, query) = match rest.find(['?', '#']) {
        Some(end) => (&rest[..end], "?…"),
        None => (rest, ""),
    };
    format!("{scheme}://{host}{path}{query}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_never_taken_for_a_url() {
        for text in [
            "model.safetensors",
            "/http/x",
            "http:/x",
            "https:x",
            "C://x",
            "file:///x",
            "ftp://h/x",
            "./s3://b/k",
            " http://h/x",
            "xhttp://h/x",
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
        ] {
            assert!(is_url(text), "{text}");
        }
    }

    #[test]
    fn what_is_shown_holds_no_secret() {
        for (text, shown) in [
            ("https://u:p@h/x?sig=1#y", "https://h/x?…"),
            ("https://u:p@h", "https://h"),
            ("https://h:1/a@b", "https://h:1/a@b"),
            ("http://u:p@ss@h/x", "http://h/x"),
            ("s3://b/k?x", "s3://b/k?x"),
            ("hf://a/b@rev/x", "hf://a/b@rev/x"),
        ] {
            assert_eq!(redacted(text), shown);
        }
    }
}
