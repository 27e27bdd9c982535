//! What a URL names: a file of this machine's caches, or one behind a request.

use std::path::PathBuf;

use super::access::Access;
use super::azure;
use super::bucket::Object;
use super::fault::{Fault, FaultKind};
use super::gcs;
use super::hub::{self, HubFile};
use super::options::{RemoteOptions, Token};
use super::s3;
use super::url::Url;

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
    /// On this machine, in a cache of the Hub.
    Cached(PathBuf),
    /// Behind requests.
    Remote(Box<Remote>),
}

#[derive(Debug)]
pub(crate) struct Remote {
    /// What it is asked with: `http`, `hf`, `s3`, `gs` or `az`.
    pub(crate) backend: &'static str,
    pub(crate) home: Url,
    pub(crate) access: Access,
    /// Whether the caller knows it by the URL that is asked.
    pub(crate) is_shown: bool,
    /// The file of the Hub that it is.
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
            Some(("hf", rest)) => Place::of_hub(HubFile::parse(rest)?, options, variable),
            Some(("s3", rest)) => {
                let (home, access) = s3::locate(rest, options, variable)?;
                Ok(Place::remote("s3", home, Access::S3(access)))
            }
            Some(("gs", rest)) => {
                let (home, access) = gcs::locate(Object::parse(rest)?, options, variable)?;
                Ok(Place::remote("gs", home, access))
            }
            Some(("az", rest)) => {
                let (home, access) = azure::locate(Object::parse(rest)?, options, variable)?;
                Ok(Place::remote("az", home, access))
            }
            Some(_) => {
                let url = Url::parse(text)?;
                if let Some(file) = HubFile::of_url(&url, variable) {
                    return Place::of_hub(file?, options, variable);
                }
                let token = match &options.token {
                    Token::Given(token) => Some(token.clone()),
                    _ => None,
                };
                Ok(Place::Remote(Box::new(Remote {
                    backend: "http",
                    home: url,
                    access: Access::bearer(token),
                    is_shown: true,
                    hub: None,
                })))
            }
            None => {
                let known = SCHEMES.join("://, ");
                Err(FaultKind::Address(format!("expected a URL that begins with one of {known}://")).into())
            }
        }
    }

    fn of_hub(
        file: HubFile,
        options: &RemoteOptions,
        variable: &dyn Fn(&str) -> Option<String>,
    ) -> Result<Place, Fault> {
        if hub::is_offline(variable) {
            return file.cached_offline(variable).map(Place::Cached);
        }
        if let Some(path) = file.cached(variable) {
            return Ok(Place::Cached(path));
        }
        Ok(Place::Remote(Box::new(Remote {
            hub: Some(file.clone()),
            ..Remote::new(
                "hf",
                file.url(options, variable)?,
                Access::bearer(hub::token(options, variable)),
            )
        })))
    }

    fn remote(backend: &'static str, home: Url, access: Access) -> Place {
        Place::Remote(Box::new(Remote::new(backend, home, access)))
    }
}

impl Remote {
    fn new(backend: &'static str, home: Url, access: Access) -> Remote {
        Remote {
            backend,
            home,
            access,
            is_shown: false,
            hub: None,
        }
    }
}

/// `text` without what may be secret in it, whether it is a proper URL or not.
#[must_use]
pub(crate) fn redacted(text: &str) -> String {
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
