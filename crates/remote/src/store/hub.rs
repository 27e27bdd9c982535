//! Files of the Hugging Face Hub: their URLs, the token for them, and the cache of the Hub's clients.

use std::fs;
use std::path::PathBuf;

use ingot_format::Escaped;

use super::credentials::source::Source;
use crate::credentials::{Credential, Secret};
use crate::environment::Environment;
use crate::fault::{Fault, Result};
use crate::options::{RemoteOptions, Token};
use crate::url::{Url, decode, encode_path, encode_segment};

const ENDPOINT: &str = "https://huggingface.co";

/// The hosts of the Hub, besides the endpoint in the environment.
const HOSTS: &[&str] = &["huggingface.co", "www.huggingface.co", "hf.co"];

/// The kinds of repositories, in URLs and in the folders of the cache.
const KINDS: &[&str] = &["models", "datasets", "spaces", "kernels"];

const MAIN: &str = "main";

/// The file of a repository with one model.
pub const MODEL_FILE: &str = "model.safetensors";

/// The index of a repository with a sharded model.
pub const INDEX_FILE: &str = "model.safetensors.index.json";

/// The ending of the names of all indexes.
const INDEX_ENDING: &str = ".safetensors.index.json";

/// A file of a repository at a revision, or a folder, which means the model in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HubFile {
    /// One of [`KINDS`].
    kind: &'static str,
    owner: String,
    repo: String,
    revision: String,
    /// Empty for the root folder of the repository.
    path: String,
    is_folder: bool,
}

impl HubFile {
    /// Parse the part of a URL after `hf://`: `[datasets/|spaces/|kernels/]owner/repo[@revision][/path]`.
    pub(crate) fn parse(rest: &str) -> Result<HubFile> {
        let mut segments: Vec<&str> = rest.split('/').collect();
        let kind = take_kind(&mut segments);
        let [owner, named, path @ ..] = &segments[..] else {
            return Err(Fault::address("expected hf://owner/repo[@revision][/path]"));
        };
        let (repo, revision, path) = match (named.split_once('@'), path) {
            (None, path) => (*named, MAIN.to_owned(), path),
            // Revisions such as refs/pr/1 take two more segments, unless their slashes are written as %2F.
            (Some((repo, "refs")), [a, b, path @ ..]) => (repo, format!("refs/{a}/{b}"), path),
            (Some((repo, revision)), path) => (repo, decode(revision), path),
        };
        HubFile::new(kind, [owner, repo], revision, &path.join("/"), false)
    }

    /// Parse a URL that was copied from a browser, or return `None` if it is not one of a file of the Hub.
    pub(crate) fn of_url(url: &Url, environment: Environment<'_>) -> Option<Result<HubFile>> {
        let is_hub = HOSTS.contains(&url.host.as_str())
            || endpoint(None, environment).is_ok_and(|endpoint| endpoint.origin() == url.origin());
        if !is_hub {
            return None;
        }
        let mut segments: Vec<&str> = url.path.trim_matches('/').split('/').collect();
        let kind = take_kind(&mut segments);
        let [owner, repo, rest @ ..] = &segments[..] else {
            return None;
        };
        let (page, revision, path) = match rest {
            [] => ("tree", MAIN, &[][..]),
            [page @ ("blob" | "resolve" | "raw" | "tree"), revision, path @ ..] => (*page, *revision, path),
            _ => return None,
        };
        let path: Vec<String> = path.iter().map(|segment| decode(segment)).collect();
        let (revision, path) = (decode(revision), path.join("/"));
        Some(HubFile::new(kind, [owner, repo], revision, &path, page == "tree"))
    }

    fn new(
        kind: &'static str,
        [owner, repo]: [&str; 2],
        revision: String,
        path: &str,
        is_folder: bool,
    ) -> Result<HubFile> {
        let is_name = |name: &str| {
            let may = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
            !name.is_empty() && !matches!(name, "." | "..") && name.bytes().all(may)
        };
        if !is_name(owner) || !is_name(repo) {
            return Err(Fault::address(
                "invalid name of a repository: expected owner/repo",
            ));
        }
        let path = path.trim_end_matches('/');
        // Revisions and paths become paths in the cache.
        let is_bad = |segment: &str| {
            matches!(segment, "" | "." | "..") || segment.contains(|c: char| c == '\\' || c.is_control())
        };
        for (what, text) in [("revision", revision.as_str()), ("path", path)] {
            let may_be_empty = what == "path" && text.is_empty();
            if !may_be_empty && text.split('/').any(is_bad) {
                let why = format!(
                    "invalid {what}: it has an empty segment, `.`, `..`, a backslash or a control character"
                );
                return Err(Fault::address(why));
            }
        }
        Ok(HubFile {
            kind,
            owner: owner.to_owned(),
            repo: repo.to_owned(),
            revision,
            path: path.to_owned(),
            is_folder: is_folder || path.is_empty(),
        })
    }

    pub(crate) fn is_folder(&self) -> bool {
        self.is_folder
    }

    /// Return the last segment of the path.
    pub(crate) fn name(&self) -> &str {
        self.path.rsplit('/').next().unwrap_or_default()
    }

    /// Return the file `name` in this folder, or in the folder of this file.
    pub(crate) fn beside(&self, name: &str) -> HubFile {
        let folder = if self.is_folder {
            self.path.as_str()
        } else {
            self.path.rsplit_once('/').map_or("", |(folder, _)| folder)
        };
        HubFile {
            path: [folder, name].join("/").trim_start_matches('/').to_owned(),
            is_folder: false,
            ..self.clone()
        }
    }

    /// Return the file at a commit, if it is one.
    pub(crate) fn at(self, commit: Option<String>) -> HubFile {
        let revision = commit.filter(|commit| is_commit(commit));
        HubFile {
            revision: revision.unwrap_or(self.revision),
            ..self
        }
    }

    /// Return the URL that `parse` accepts.
    pub(crate) fn shown(&self) -> String {
        let (owner, repo) = (&self.owner, &self.repo);
        let unless =
            |text: &str, usual: &str, written: String| if text == usual { String::new() } else { written };
        let kind = unless(self.kind, "models", format!("{}/", self.kind));
        let revision = unless(&self.revision, MAIN, format!("@{}", self.revision));
        let path = unless(&self.path, "", format!("/{}", self.path));
        format!("hf://{kind}{owner}/{repo}{revision}{path}")
    }

    /// Return the URL of requests for the file.
    pub(crate) fn url(&self, options: &RemoteOptions, environment: Environment<'_>) -> Result<Url> {
        let endpoint = endpoint(options.endpoint.as_deref(), environment)?;
        let kind = if self.kind == "models" { "" } else { self.kind };
        let (revision, path) = (encode_segment(&self.revision), encode_path(&self.path));
        let repo = [kind, &self.owner, &self.repo].join("/");
        Ok(endpoint.below(&format!(
            "/{}/resolve/{revision}/{path}",
            repo.trim_start_matches('/')
        )))
    }

    /// Return the file, or for a folder the files that its model may be in, the likeliest first.
    pub(crate) fn meant(&self) -> Vec<HubFile> {
        if self.is_folder {
            vec![self.beside(MODEL_FILE), self.beside(INDEX_FILE)]
        } else {
            vec![self.clone()]
        }
    }

    /// Return the URL of the document with the headers of all shards of this index. The Hub has one for models, on their
    /// main branch.
    pub(crate) fn headers_url(
        &self,
        options: &RemoteOptions,
        environment: Environment<'_>,
    ) -> Option<Result<Url>> {
        let index = if self.is_folder {
            &self.beside(INDEX_FILE)
        } else {
            self
        };
        if self.kind != "models" || self.revision != MAIN || !index.path.ends_with(INDEX_ENDING) {
            return None;
        }
        let (owner, repo, path) = (&self.owner, &self.repo, encode_path(&index.path));
        let path = format!("/api/models/{owner}/{repo}/safetensors-metadata/{path}");
        let endpoint = endpoint(options.endpoint.as_deref(), environment);
        Some(endpoint.map(|endpoint| endpoint.below(&path)))
    }

    /// Return the file in the cache if the revision is a commit. It has the bytes that the Hub would send.
    pub(crate) fn cached(&self, environment: Environment<'_>) -> Option<PathBuf> {
        self.cached_at(&self.revision, environment)
    }

    /// Return the file in the cache at a commit.
    pub(crate) fn cached_at(&self, commit: &str, environment: Environment<'_>) -> Option<PathBuf> {
        let folder = self.folder(environment)?.join("snapshots").join(commit);
        let path = folder.join(&self.path);
        (is_commit(commit) && path.is_file()).then_some(path)
    }

    /// Return the file in the cache, at the commit of the revision when it was last resolved.
    pub(crate) fn cached_offline(&self, environment: Environment<'_>) -> Option<PathBuf> {
        let resolved = || {
            let file = self.folder(environment)?.join("refs").join(&self.revision);
            let commit = fs::read_to_string(file).ok()?;
            self.cached_at(commit.trim(), environment)
        };
        self.cached(environment).or_else(resolved)
    }

    fn folder(&self, environment: Environment<'_>) -> Option<PathBuf> {
        let named = environment.get(&["HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"]);
        let cache = named.map(PathBuf::from);
        let cache = cache.or_else(|| Some(home(environment)?.join("hub")))?;
        Some(cache.join(format!("{}--{}--{}", self.kind, self.owner, self.repo)))
    }
}

/// Remove the kind of a repository from the front of a path.
fn take_kind(segments: &mut Vec<&str>) -> &'static str {
    let kind = KINDS.iter().find(|kind| segments.first() == Some(kind));
    if kind.is_some() {
        segments.remove(0);
    }
    kind.copied().unwrap_or("models")
}

fn is_commit(revision: &str) -> bool {
    revision.len() == 40 && revision.bytes().all(|byte| byte.is_ascii_hexdigit())
}

fn endpoint(given: Option<&str>, environment: Environment<'_>) -> Result<Url> {
    let named = given.map(ToOwned::to_owned);
    let named = named.or_else(|| environment.get(&["HF_ENDPOINT"]));
    Url::parse(named.as_deref().unwrap_or(ENDPOINT))
}

/// Whether the environment forbids requests to the Hub.
pub(crate) fn is_offline(environment: Environment<'_>) -> bool {
    is_true(environment, "HF_HUB_OFFLINE") || is_true(environment, "TRANSFORMERS_OFFLINE")
}

/// Return the token for the Hub.
pub(crate) fn token(options: &RemoteOptions, environment: Environment<'_>) -> Result<Option<Source>> {
    let is_off = || options.anonymous || is_true(environment, "HF_HUB_DISABLE_IMPLICIT_TOKEN");
    let known = |setting: &str, token| Source::known(setting, Credential::Token(token));
    match &options.token {
        Token::Given(token) => return Ok(Some(known("storage_options", token.clone()))),
        Token::Withheld => return Ok(None),
        Token::Environment if is_off() => return Ok(None),
        Token::Environment => {}
    }
    let variable = |name: &str| Some((name.to_owned(), environment.get(&[name])?));
    let file = || {
        let path = environment.get(&["HF_TOKEN_PATH"]).map(PathBuf::from);
        let path = path.or_else(|| Some(home(environment)?.join("token")))?;
        let setting = format!("the token in {}", Escaped(&path.to_string_lossy()));
        Some((setting, fs::read_to_string(path).ok()?))
    };
    let found = variable("HF_TOKEN").or_else(|| variable("HUGGING_FACE_HUB_TOKEN"));
    // The Hub's clients remove all white space around it.
    let found = found.or_else(file).filter(|(_, token)| !token.trim().is_empty());
    let checked = |(setting, token): (String, String)| {
        let token = Secret::new(token.trim()).checked(&setting)?;
        Ok(known(&setting, token))
    };
    found.map(checked).transpose()
}

/// Return the folder of the Hub's clients.
fn home(environment: Environment<'_>) -> Option<PathBuf> {
    let below = |name: &str, rest: &str| Some(PathBuf::from(environment.get(&[name])?).join(rest));
    let usual = || Some(environment.home()?.join(".cache/huggingface"));
    below("HF_HOME", "")
        .or_else(|| below("XDG_CACHE_HOME", "huggingface"))
        .or_else(usual)
}

/// Whether a variable is set, as the Hub's clients read it.
fn is_true(environment: Environment<'_>, name: &str) -> bool {
    environment.is(name, &["1", "on", "yes", "true"])
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOTHING: Environment<'static> = Environment(&|_| None);

    fn of(pairs: &[(&str, &str)]) -> impl Fn(&str) -> Option<String> + use<> {
        let own = |&(name, value): &(&str, &str)| (name.to_owned(), value.to_owned());
        let pairs: Vec<(String, String)> = pairs.iter().map(own).collect();
        move |name| {
            let pair = pairs.iter().find(|pair| pair.0 == name)?;
            Some(pair.1.clone())
        }
    }

    #[test]
    fn hub_urls_are_parsed() {
        let options = RemoteOptions::default();
        for (text, url) in [
            ("me/gpt/x.bt", "/me/gpt/resolve/main/x.bt"),
            ("models/me/gpt/a/b c.bt", "/me/gpt/resolve/main/a/b%20c.bt"),
            (
                "datasets/me/d@v1/x.safetensors",
                "/datasets/me/d/resolve/v1/x.safetensors",
            ),
            (
                "me/gpt@refs/pr/7/x.safetensors",
                "/me/gpt/resolve/refs%2Fpr%2F7/x.safetensors",
            ),
            (
                "me/gpt@refs%2Fpr%2F7/x.safetensors",
                "/me/gpt/resolve/refs%2Fpr%2F7/x.safetensors",
            ),
        ] {
            let file = HubFile::parse(text).unwrap();
            assert_eq!(file.url(&options, NOTHING).unwrap().path, url, "{text}");
            let again = HubFile::parse(&file.shown()[5..]).unwrap();
            assert_eq!(again.shown(), file.shown(), "{text}");
        }
        for text in [
            "",
            "gpt2",
            "me/",
            "/gpt",
            "me/gpt/../../etc",
            "me/gpt/a//b",
            "me/gpt@../x/f",
            "me/gpt@a%2F..%2F../f",
            "../gpt",
            "me/g pt",
            "me/gpt/a\\b",
        ] {
            assert!(HubFile::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn browser_urls_of_the_hub_are_parsed() {
        let read = |text: &str, environment: Environment<'_>| {
            HubFile::of_url(&Url::parse(text).unwrap(), environment).map(|file| file.unwrap().shown())
        };
        for (text, shown) in [
            (
                "https://huggingface.co/me/gpt/blob/main/a/x.safetensors",
                "hf://me/gpt/a/x.safetensors",
            ),
            (
                "https://huggingface.co/datasets/me/d/resolve/refs%2Fpr%2F1/x.bt?download=true",
                "hf://datasets/me/d@refs/pr/1/x.bt",
            ),
            ("https://hf.co/me/gpt/tree/v2", "hf://me/gpt@v2"),
            ("https://huggingface.co/me/gpt", "hf://me/gpt"),
        ] {
            assert_eq!(read(text, NOTHING).as_deref(), Some(shown), "{text}");
        }
        assert_eq!(read("https://other.example/me/gpt/blob/main/x", NOTHING), None);
        assert_eq!(read("https://huggingface.co/api/models/me/gpt", NOTHING), None);
        let mirror = of(&[("HF_ENDPOINT", "http://mirror:8080")]);
        let mirror = Environment(&mirror);
        assert!(read("http://mirror:8080/me/gpt/blob/main/x", mirror).is_some());
        assert!(read("http://mirror:8081/me/gpt/blob/main/x", mirror).is_none());
    }

    #[test]
    fn folders_mean_their_model_and_files_have_neighbours() {
        let meant = |text: &str| -> Vec<String> {
            let file = HubFile::of_url(&Url::parse(text).unwrap(), NOTHING).unwrap();
            let meant = file.unwrap().meant();
            meant.iter().map(HubFile::shown).collect()
        };
        assert_eq!(
            meant("https://huggingface.co/me/gpt"),
            [
                "hf://me/gpt/model.safetensors",
                "hf://me/gpt/model.safetensors.index.json"
            ]
        );
        assert_eq!(
            meant("https://huggingface.co/me/gpt/tree/v2/unet/")[0],
            "hf://me/gpt@v2/unet/model.safetensors"
        );
        let index = HubFile::parse("me/gpt/unet/model.safetensors.index.json").unwrap();
        assert_eq!(index.meant(), std::slice::from_ref(&index));
        let commit = "0123456789abcdef0123456789abcdef01234567";
        assert_eq!(
            index.clone().at(Some(commit.to_owned())).beside("a b/1").shown(),
            format!("hf://me/gpt@{commit}/unet/a b/1")
        );
        assert_eq!(index.clone().at(Some("main/../x".to_owned())), index);
        assert_eq!(index.clone().at(None), index);
    }

    #[test]
    fn the_hub_has_headers_of_indexes_on_the_main_branch() {
        let options = RemoteOptions::default();
        let path = |text: &str| {
            let url = HubFile::parse(text).unwrap().headers_url(&options, NOTHING)?;
            Some(url.unwrap().path)
        };
        for (text, expected) in [
            ("me/gpt", "model.safetensors.index.json"),
            (
                "me/gpt/model.safetensors.index.json",
                "model.safetensors.index.json",
            ),
            (
                "me/gpt/a b/x.safetensors.index.json",
                "a%20b/x.safetensors.index.json",
            ),
        ] {
            let expected = format!("/api/models/me/gpt/safetensors-metadata/{expected}");
            assert_eq!(path(text), Some(expected), "{text}");
        }
        for text in [
            "me/gpt/model.safetensors",
            "me/gpt/config.json",
            "me/gpt@v1",
            "datasets/me/d/model.safetensors.index.json",
        ] {
            assert_eq!(path(text), None, "{text}");
        }
    }

    #[test]
    fn tokens_are_found_in_the_order_of_the_hubs_clients() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("token"), "hf_file\n").unwrap();
        let home = folder.path().to_str().unwrap();
        let found =
            |pairs: &[(&str, &str)], options: &RemoteOptions| match token(options, Environment(&of(pairs)))
                .unwrap()?
            {
                Source::Known(_, Credential::Token(token)) => Some(token.reveal().to_owned()),
                other => panic!("{other:?}"),
            };
        let mut options = RemoteOptions::default();
        assert_eq!(found(&[("HF_HOME", home)], &options).as_deref(), Some("hf_file"));
        let older = [("HF_HOME", home), ("HUGGING_FACE_HUB_TOKEN", "hf_old")];
        assert_eq!(found(&older, &options).as_deref(), Some("hf_old"));
        let both = [("HUGGING_FACE_HUB_TOKEN", "hf_old"), ("HF_TOKEN", " hf_new ")];
        assert_eq!(found(&both, &options).as_deref(), Some("hf_new"));
        let disabled = [("HF_TOKEN", "hf_new"), ("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")];
        assert_eq!(found(&disabled, &options), None);
        options.token = Token::Given(Secret::new("mine"));
        assert_eq!(found(&disabled, &options).as_deref(), Some("mine"));
        options.token = Token::Withheld;
        assert_eq!(found(&both, &options), None);
        // An invalid token is an error, and not an anonymous request.
        let invalid = of(&[("HF_TOKEN", "hf_a\r\nX: b")]);
        let fault = token(&RemoteOptions::default(), Environment(&invalid)).unwrap_err();
        assert_eq!(fault.to_string(), "HF_TOKEN has control characters");
    }

    #[test]
    fn the_cache_is_used_for_commits_only() {
        let folder = tempfile::tempdir().unwrap();
        let commit = "0123456789abcdef0123456789abcdef01234567";
        let repo = folder.path().join("models--me--gpt");
        let snapshot = repo.join("snapshots").join(commit);
        fs::create_dir_all(&snapshot).unwrap();
        fs::create_dir_all(repo.join("refs")).unwrap();
        fs::write(repo.join("refs/main"), commit).unwrap();
        fs::write(snapshot.join("model.safetensors"), "x").unwrap();
        let variable = of(&[("HF_HUB_CACHE", folder.path().to_str().unwrap())]);
        let variable = Environment(&variable);
        let branch = HubFile::parse("me/gpt/model.safetensors").unwrap();
        let pinned = HubFile::parse(&format!("me/gpt@{commit}/model.safetensors")).unwrap();
        let expected = snapshot.join("model.safetensors");
        assert_eq!(branch.cached(variable), None, "the branch may have moved");
        assert_eq!(pinned.cached(variable).as_ref(), Some(&expected));
        assert_eq!(branch.cached_at(commit, variable).as_ref(), Some(&expected));
        assert_eq!(branch.cached_at("../..", variable), None);
        assert_eq!(branch.cached_offline(variable).as_ref(), Some(&expected));
        let other = HubFile::parse("me/gpt/other.safetensors").unwrap();
        assert_eq!(other.cached_offline(variable), None);
    }
}
