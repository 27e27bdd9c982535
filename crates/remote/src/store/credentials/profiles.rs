//! The files that Amazon's tools keep, `~/.aws/credentials` and `~/.aws/config`.

use std::path::PathBuf;

use super::{Variable, home, read, set};
use crate::fault::Fault;

/// The sections of both, those of the credentials first.
#[derive(Debug, Default)]
pub(crate) struct Profiles(Vec<Section>);

#[derive(Debug)]
struct Section {
    file: File,
    /// `profile work`, `sso-session corp`, `services local`.
    name: String,
    pairs: Vec<(String, String)>,
}

/// Which of the two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum File {
    Credentials,
    Config,
}

impl Profiles {
    /// Reads both. One that is not there has nothing; one that is there and cannot be read might have had the keys that
    /// are meant.
    pub(crate) fn read(variable: Variable<'_>) -> Result<Profiles, Fault> {
        let mut sections = Vec::new();
        for (file, setting, usual) in [
            (File::Credentials, "AWS_SHARED_CREDENTIALS_FILE", "credentials"),
            (File::Config, "AWS_CONFIG_FILE", "config"),
        ] {
            let folder = home(variable).map(|home| home.join(".aws"));
            let named = set(variable, &[setting]).map(PathBuf::from);
            let Some(path) = named.or_else(|| Some(folder?.join(usual))) else {
                continue;
            };
            // The home of somebody else, as containers have it, cannot even be looked into.
            if path.is_file() {
                sections.extend(parse(&read(&path)?, file));
            }
        }
        Ok(Profiles(sections))
    }

    pub(crate) fn has(&self, section: &str) -> bool {
        self.0.iter().any(|other| other.name == section)
    }

    /// What stands under this name in `section`; of what stands below another one, `s3.endpoint_url` and the like.
    pub(crate) fn get(&self, section: &str, name: &str) -> Option<&str> {
        [File::Credentials, File::Config]
            .into_iter()
            .find_map(|file| self.get_of(file, section, name))
    }

    /// The same of one of the files.
    pub(crate) fn get_of(&self, file: File, section: &str, name: &str) -> Option<&str> {
        let sections = self
            .0
            .iter()
            .filter(|other| other.file == file && other.name == section);
        let mut pairs = sections.flat_map(|section| &section.pairs);
        let pair = pairs.find(|pair| pair.0 == name && !pair.1.is_empty())?;
        Some(&pair.1)
    }
}

/// A line that is indented more than the one before belongs to that: it is a pair of its own where that has no value, and
/// else a part of the value.
fn parse(text: &str, file: File) -> Vec<Section> {
    let mut sections: Vec<Section> = Vec::new();
    let (mut outer, mut indent) = (None::<String>, usize::MAX);
    for line in text.lines() {
        let (line, here) = (line.trim(), line.len() - line.trim_start().len());
        if line.is_empty() || line.starts_with(['#', ';']) {
            continue;
        }
        if let Some(name) = line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            let (name, pairs) = (section_name(name, file), Vec::new());
            sections.push(Section { file, name, pairs });
            (outer, indent) = (None, usize::MAX);
            continue;
        }
        let (Some(section), Some((name, value))) = (sections.last_mut(), line.split_once('=')) else {
            continue;
        };
        let (name, value) = (name.trim().to_ascii_lowercase(), value.trim().to_owned());
        match &outer {
            Some(outer) if here > indent => section.pairs.push((format!("{outer}.{name}"), value)),
            None if here > indent => {}
            _ => {
                indent = here;
                outer = value.is_empty().then(|| name.clone());
                section.pairs.push((name, value));
            }
        }
    }
    sections
}

/// Profiles are called otherwise in the two files.
fn section_name(name: &str, file: File) -> String {
    let name = name.trim();
    if file == File::Credentials || name == "default" {
        return format!("profile {name}");
    }
    let (kind, rest) = name.split_once(char::is_whitespace).unwrap_or((name, ""));
    format!("{kind} {}", rest.trim().trim_matches(['"', '\'']))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sections_and_what_stands_below_a_name_are_kept_apart() {
        let credentials = "[default]\n  A = 1\n  b=2=3\n; no\n# c = 4\n[a b]\nx = y\n";
        let config = "a=0\n[default]\nb = 9\nc = 5\ns3 =\n  endpoint_url = nested\n  # no\n  x = 1\nd = 6\n  e = part\nf=\n\
                      [profile \"my own\"]\nx = z\n[work]\nx = no\n[services local]\ns3 =\n    endpoint_url = here\nsts =\n";
        let mut sections = parse(credentials, File::Credentials);
        sections.extend(parse(config, File::Config));
        let profiles = Profiles(sections);
        for (section, name, value) in [
            ("profile default", "a", Some("1")),
            ("profile default", "b", Some("2=3")),
            ("profile default", "c", Some("5")),
            ("profile default", "s3.endpoint_url", Some("nested")),
            ("profile default", "endpoint_url", None),
            ("profile default", "s3.x", Some("1")),
            ("profile default", "d", Some("6")),
            ("profile default", "e", None),
            ("profile default", "f", None),
            ("profile a b", "x", Some("y")),
            ("profile my own", "x", Some("z")),
            ("profile work", "x", None),
            ("services local", "s3.endpoint_url", Some("here")),
        ] {
            assert_eq!(profiles.get(section, name), value, "{section} {name}");
        }
        assert_eq!(profiles.get_of(File::Config, "profile default", "b"), Some("9"));
        assert!(profiles.has("profile my own") && !profiles.has("profile work"));
    }
}
