//! Files of the Hugging Face Hub: their names, the token for them, and the cache that others have filled.

use std::fs;
use std::path::PathBuf;

use ingot_format::Escaped;

use crate::credentials::Secret;
use crate::fault::{Fault, FaultKind};
use crate::options::{RemoteOptions, Token};
use crate::url::{Url, decode, encode_path, encode_segment};

const ENDPOINT: &str = "https://huggingface.co";

/// Where the Hub is, besides where the environment says.
const HOSTS: &[&str] = &["huggingface.co", "www.huggingface.co", "hf.co"];

/// The kinds of repositories, as addresses name them, and as the folders of the cache do.
const KINDS: &[(&str, &str)] = &[
    ("models", "models"),
    ("datasets", "datasets"),
    ("spaces", "spaces"),
    ("kernels", "kernels"),
];

const MAIN: &str = "main";

/// The file of a repository that holds one model.
pub const MODEL_FILE: &str = "model.safetensors";

/// The index of a repository whose model is in shards.
pub const INDEX_FILE: &str = "model.safetensors.index.json";

/// What the names of all indexes end in.
const INDEX_ENDING: &str = ".safetensors.index.json";

/// What environment variables hold.
type Variable<'v> = &'v dyn Fn(&str) -> Option<String>;

/// A file of a repository, at a revision; or a folder, whose model is meant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HubFile {
    /// One of [`KINDS`].
    kind: &'static str,
    owner: String,
    repo: String,
    revision: String,
    /// Empty for the folder that is all of the repository.
    path: String,
    is_folder: bool,
}

impl HubFile {
    /// Reads what follows `hf://`: `[datasets/|spaces/|kernels/]owner/repo[@revision][/path]`.
    pub(crate) fn parse(rest: &str) -> Result<HubFile, Fault> {
        let mut segments: Vec<&str> = rest.split('/').collect();
        let kind = take_kind(&mut segments);
        if segments.len() < 2 {
            return Err(refuse("expected hf://owner/repo[@revision][/path]"));
        }
        let (owner, named) = (segments[0], segments[1]);
        let mut path = &segments[2..];
        let (repo, revision) = match named.split_once('@') {
            None => (named, MAIN.to_owned()),
            // Revisions such as refs/pr/1 take two segments more, unless their slashes are written as %2F.
            Some((repo, "refs")) if path.len() >= 2 => {
                let revision = format!("refs/{}/{}", path[0], path[1]);
                path = &path[2..];
                (repo, revision)
            }
            Some((repo, revision)) => (repo, decode(revision)),
        };
        HubFile::new(kind, owner, repo, revision, path.join("/"), false)
    }

    /// Reads a URL that was copied from a browser, or `None` where it is not one of a file of the Hub.
    pub(crate) fn of_url(url: &Url, variable: Variable<'_>) -> Option<Result<HubFile, Fault>> {
        let is_hub = HOSTS.contains(&url.host.as_str())
            || endpoint(None, variable).is_ok_and(|endpoint| endpoint.origin() == url.origin());
        if !is_hub {
            return None;
        }
        let path = url.path.trim_matches('/');
        let mut segments: Vec<&str> = path.split('/').collect();
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
        Some(HubFile::new(kind, owner, repo, revision, path, page == "tree"))
    }

    fn new(
        kind: &'static str,
        owner: &str,
        repo: &str,
        revision: String,
        path: String,
        is_folder: bool,
    ) -> Result<HubFile, Fault> {
        let is_name = |name: &str| {
            let may = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
            !name.is_empty() && !matches!(name, "." | "..") && name.bytes().all(may)
        };
        if !is_name(owner) || !is_name(repo) {
            return Err(refuse("the repository has a name that none has"));
        }
        let path = path.trim_end_matches('/');
        let is_folder = is_folder || path.is_empty();
        // They become names of files in the cache too.
        for (what, text) in [("revision", revision.as_str()), ("path", path)] {
            let is_bad = |segment: &str| matches!(segment, "" | "." | "..");
            if what == "path" && text.is_empty() {
                continue;
            }
            if text.split('/').any(is_bad) || text.contains('\\') || text.chars().any(char::is_control) {
                return Err(refuse(&format!(
                    "the {what} leads out of the repository, or nowhere"
                )));
            }
        }
        Ok(HubFile {
            kind,
            owner: owner.to_owned(),
            repo: repo.to_owned(),
            revision,
            path: path.to_owned(),
            is_folder,
        })
    }

    /// Whether it is a folder, whose model is meant.
    pub(crate) fn is_folder(&self) -> bool {
        self.is_folder
    }

    /// The last part of its path.
    pub(crate) fn name(&self) -> &str {
        self.path.rsplit('/').next().unwrap_or_default()
    }

    /// The file `name` in this folder, or in that of this file.
    pub(crate) fn beside(&self, name: &str) -> HubFile {
        let folder = if self.is_folder {
            self.path.as_str()
        } else {
            self.path.rsplit_once('/').map_or("", |(folder, _)| folder)
        };
        let path = match folder {
            "" => name.to_owned(),
            folder => format!("{folder}/{name}"),
        };
        HubFile {
            path,
            is_folder: false,
            ..self.clone()
        }
    }

    /// The same as of a commit, if it is one.
    pub(crate) fn at(self, commit: Option<String>) -> HubFile {
        let revision = commit.filter(|commit| is_commit(commit));
        HubFile {
            revision: revision.unwrap_or(self.revision),
            ..self
        }
    }

    /// The address of this file that `parse` reads.
    pub(crate) fn shown(&self) -> String {
        let kind = match self.kind {
            "models" => String::new(),
            kind => format!("{kind}/"),
        };
        let revision = match self.revision.as_str() {
            MAIN => String::new(),
            revision => format!("@{revision}"),
        };
        let path = match self.path.as_str() {
            "" => String::new(),
            path => format!("/{path}"),
        };
        format!("hf://{kind}{}/{}{revision}{path}", self.owner, self.repo)
    }

    /// Where the file can be asked for.
    pub(crate) fn url(&self, options: &RemoteOptions, variable: Variable<'_>) -> Result<Url, Fault> {
        let endpoint = endpoint(options.endpoint.as_deref(), variable)?;
        let kind = match self.kind {
            "models" => String::new(),
            kind => format!("/{kind}"),
        };
        Ok(Url {
            path: format!(
                "{}{kind}/{}/{}/resolve/{}/{}",
                endpoint.path.trim_end_matches('/'),
                self.owner,
                self.repo,
                encode_segment(&self.revision),
                encode_path(&self.path)
            ),
            ..endpoint
        })
    }

    /// What this stands for: itself, or of a folder what a model is looked for in, the likeliest first.
    pub(crate) fn meant(&self) -> Vec<HubFile> {
        if self.is_folder {
            vec![self.beside(MODEL_FILE), self.beside(INDEX_FILE)]
        } else {
            vec![self.clone()]
        }
    }

    /// Where the Hub gives the headers of all shards of this index in one document. It does so for models, as they are on
    /// their main branch.
    pub(crate) fn headers_url(
        &self,
        options: &RemoteOptions,
        variable: Variable<'_>,
    ) -> Option<Result<Url, Fault>> {
        let index = if self.is_folder {
            self.beside(INDEX_FILE).path
        } else {
            self.path.clone()
        };
        if self.kind != "models" || self.revision != MAIN || !index.ends_with(INDEX_ENDING) {
            return None;
        }
        let url = |endpoint: Url| Url {
            path: format!(
                "{}/api/models/{}/{}/safetensors-metadata/{}",
                endpoint.path.trim_end_matches('/'),
                self.owner,
                self.repo,
                encode_path(&index)
            ),
            ..endpoint
        };
        Some(endpoint(options.endpoint.as_deref(), variable).map(url))
    }

    /// The file in the cache, where the revision is a commit that lies there: it is what the Hub would give.
    pub(crate) fn cached(&self, variable: Variable<'_>) -> Option<PathBuf> {
        self.cached_at(&self.revision, variable)
    }

    /// The file in the cache, as of a commit.
    pub(crate) fn cached_at(&self, commit: &str, variable: Variable<'_>) -> Option<PathBuf> {
        let path = self
            .folder(variable)?
            .join("snapshots")
            .join(commit)
            .join(&self.path);
        (is_commit(commit) && path.is_file()).then_some(path)
    }

    /// The file in the cache, as of the commit that the revision was when it was last looked up.
    pub(crate) fn cached_offline(&self, variable: Variable<'_>) -> Option<PathBuf> {
        let look_up = || {
            let file = self.folder(variable)?.join("refs").join(&self.revision);
            let commit = fs::read_to_string(file).ok()?;
            self.cached_at(commit.trim(), variable)
        };
        self.cached(variable).or_else(look_up)
    }

    fn folder(&self, variable: Variable<'_>) -> Option<PathBuf> {
        let kind = KINDS.iter().find(|row| row.0 == self.kind)?.1;
        let name = format!("{kind}--{}--{}", self.owner, self.repo);
        Some(cache(variable)?.join(name))
    }
}

fn refuse(why: &str) -> Fault {
    FaultKind::Address(why.to_owned()).into()
}

fn take_kind(segments: &mut Vec<&str>) -> &'static str {
    let named = segments
        .first()
        .and_then(|first| KINDS.iter().find(|row| row.0 == *first));
    match named {
        Some(row) => {
            segments.remove(0);
            row.0
        }
        None => "models",
    }
}

fn is_commit(revision: &str) -> bool {
    revision.len() == 40 && revision.bytes().all(|byte| byte.is_ascii_hexdigit())
}

fn endpoint(given: Option<&str>, variable: Variable<'_>) -> Result<Url, Fault> {
    let named = given
        .map(ToOwned::to_owned)
        .or_else(|| set(variable, "HF_ENDPOINT"));
    Url::parse(named.as_deref().unwrap_or(ENDPOINT))
}

/// Whether the environment forbids to ask the Hub.
pub(crate) fn is_offline(variable: Variable<'_>) -> bool {
    is_true(variable, "HF_HUB_OFFLINE") || is_true(variable, "TRANSFORMERS_OFFLINE")
}

/// The token for the Hub.
pub(crate) fn token(options: &RemoteOptions, variable: Variable<'_>) -> Result<Option<Secret>, Fault> {
    match &options.token {
        Token::Given(token) => Ok(Some(token.clone())),
        Token::Withheld => Ok(None),
        Token::Environment if options.anonymous || is_true(variable, "HF_HUB_DISABLE_IMPLICIT_TOKEN") => {
            Ok(None)
        }
        Token::Environment => {
            let held = |name: &str| Some((name.to_owned(), set(variable, name)?));
            let file = || {
                let path = set(variable, "HF_TOKEN_PATH").map(PathBuf::from);
                let path = path.or_else(|| Some(home(variable)?.join("token")))?;
                let source = format!("the token in {}", Escaped(&path.to_string_lossy()));
                Some((source, fs::read_to_string(path).ok()?))
            };
            let found = held("HF_TOKEN")
                .or_else(|| held("HUGGING_FACE_HUB_TOKEN"))
                .or_else(file);
            // The Hub's clients take all white space around it away.
            let found = found.filter(|(_, token)| !token.trim().is_empty());
            found
                .map(|(source, token)| Secret::new(token.trim()).checked(&source))
                .transpose()
        }
    }
}

/// Where the Hub's clients keep what they know.
fn home(variable: Variable<'_>) -> Option<PathBuf> {
    let below = |name: &str, rest: &str| set(variable, name).map(|folder| PathBuf::from(folder).join(rest));
    below("HF_HOME", "")
        .or_else(|| below("XDG_CACHE_HOME", "huggingface"))
        .or_else(|| below("HOME", ".cache/huggingface"))
        .or_else(|| below("USERPROFILE", ".cache/huggingface"))
}

fn cache(variable: Variable<'_>) -> Option<PathBuf> {
    let named = set(variable, "HF_HUB_CACHE").or_else(|| set(variable, "HUGGINGFACE_HUB_CACHE"));
    named
        .map(PathBuf::from)
        .or_else(|| Some(home(variable)?.join("hub")))
}

fn set(variable: Variable<'_>, name: &str) -> Option<String> {
    variable(name).filter(|value| !value.trim().is_empty())
}

/// As the Hub's own clients read it.
fn is_true(variable: Variable<'_>, name: &str) -> bool {
    variable(name)
        .is_some_and(|value| matches!(value.to_ascii_uppercase().as_str(), "1" | "ON" | "YES" | "TRUE"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nothing(_: &str) -> Option<String> {
        None
    }

    fn of(pairs: &[(&str, &str)]) -> impl Fn(&str) -> Option<String> + use<> {
        let pairs: Vec<(String, String)> = pairs
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect();
        move |name| {
            pairs
                .iter()
                .find(|pair| pair.0 == name)
                .map(|pair| pair.1.clone())
        }
    }

    #[test]
    fn addresses_of_the_hub_are_taken_apart() {
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
            assert_eq!(file.url(&options, &nothing).unwrap().path, url, "{text}");
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
    fn urls_from_a_browser_are_understood_where_they_are_the_hubs() {
        let read = |text: &str, variable: Variable<'_>| {
            HubFile::of_url(&Url::parse(text).unwrap(), variable).map(|file| file.unwrap().shown())
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
            assert_eq!(read(text, &nothing).as_deref(), Some(shown), "{text}");
        }
        assert_eq!(read("https://other.example/me/gpt/blob/main/x", &nothing), None);
        assert_eq!(read("https://huggingface.co/api/models/me/gpt", &nothing), None);
        let mirror = of(&[("HF_ENDPOINT", "http://mirror:8080")]);
        assert!(read("http://mirror:8080/me/gpt/blob/main/x", &mirror).is_some());
        assert!(read("http://mirror:8081/me/gpt/blob/main/x", &mirror).is_none());
    }

    #[test]
    fn a_folder_stands_for_its_model_and_a_file_has_neighbours() {
        let meant = |text: &str| -> Vec<String> {
            let file = HubFile::of_url(&Url::parse(text).unwrap(), &nothing).unwrap();
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
    fn headers_of_all_shards_are_asked_for_where_the_hub_gives_them() {
        let options = RemoteOptions::default();
        let path = |text: &str| {
            let url = HubFile::parse(text).unwrap().headers_url(&options, &nothing)?;
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
    fn tokens_come_in_the_order_of_the_hubs_clients() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("token"), "hf_file\n").unwrap();
        let home = folder.path().to_str().unwrap();
        let found = |pairs: &[(&str, &str)], options: &RemoteOptions| {
            let token = token(options, &of(pairs)).unwrap();
            token.map(|token| token.reveal().to_owned())
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
        // Not as anybody: whoever set it wants to be known.
        let fault = token(&RemoteOptions::default(), &of(&[("HF_TOKEN", "hf_a\r\nX: b")])).unwrap_err();
        assert_eq!(fault.to_string(), "HF_TOKEN has control characters");
    }

    #[test]
    fn the_cache_gives_only_what_the_hub_would() {
        let folder = tempfile::tempdir().unwrap();
        let commit = "0123456789abcdef0123456789abcdef01234567";
        let repo = folder.path().join("models--me--gpt");
        let snapshot = repo.join("snapshots").join(commit);
        fs::create_dir_all(&snapshot).unwrap();
        fs::create_dir_all(repo.join("refs")).unwrap();
        fs::write(repo.join("refs/main"), commit).unwrap();
        fs::write(snapshot.join("model.safetensors"), "x").unwrap();
        let variable = of(&[("HF_HUB_CACHE", folder.path().to_str().unwrap())]);
        let branch = HubFile::parse("me/gpt/model.safetensors").unwrap();
        let pinned = HubFile::parse(&format!("me/gpt@{commit}/model.safetensors")).unwrap();
        let expected = snapshot.join("model.safetensors");
        assert_eq!(branch.cached(&variable), None, "the branch may have gone on");
        assert_eq!(pinned.cached(&variable).as_ref(), Some(&expected));
        assert_eq!(branch.cached_at(commit, &variable).as_ref(), Some(&expected));
        assert_eq!(branch.cached_at("../..", &variable), None);
        assert_eq!(branch.cached_offline(&variable).as_ref(), Some(&expected));
        let other = HubFile::parse("me/gpt/other.safetensors").unwrap();
        assert_eq!(other.cached_offline(&variable), None);
    }
}
