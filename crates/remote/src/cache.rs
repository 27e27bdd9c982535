//! The settings of the cache of blocks, and the name of a file in it. `ingot-io` keeps the blocks.

use std::path::PathBuf;

use crate::environment::{Environment, PROCESS};
use crate::fault::{Fault, Result};
use crate::fetch::Resource;
use crate::options::RemoteOptions;
use crate::url::Url;

/// Units of sizes, as in the options of Python.
const UNITS: &[(&str, u64)] = &[
    ("KB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("TB", 1_000_000_000_000),
];

/// The hosts of Amazon's stores. Their bucket names are unique across regions.
const AMAZON: &str = ".amazonaws.com";

/// Where the cache is, and its size.
///
/// ```
/// use ingot_remote::RemoteOptions;
///
/// let mut options = RemoteOptions::default();
/// options.cache_dir = Some("/nvme/ingot".into());
/// options.cache_size = Some(500_000_000_000);
/// let cache = options.cache()?.unwrap();
/// assert_eq!((cache.directory.to_str(), cache.most_nbytes), (Some("/nvme/ingot"), Some(500_000_000_000)));
/// # Ok::<(), ingot_remote::Fault>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CacheOptions {
    /// The directory of the cache.
    pub directory: PathBuf,
    /// The most bytes of all its files. `None`: as many as the disk has.
    pub most_nbytes: Option<u64>,
}

impl RemoteOptions {
    /// Return the cache of the options or of the environment, if there is one.
    ///
    /// # Errors
    /// [`Fault`], if `INGOT_CACHE_SIZE` is not a size.
    pub fn cache(&self) -> Result<Option<CacheOptions>> {
        self.cache_in(PROCESS)
    }

    fn cache_in(&self, environment: Environment<'_>) -> Result<Option<CacheOptions>> {
        let directory = self.cache_dir.clone();
        let directory = directory.or_else(|| environment.get(&["INGOT_CACHE"]).map(PathBuf::from));
        let Some(directory) = directory.filter(|path| !path.as_os_str().is_empty()) else {
            return Ok(None);
        };
        let text = environment.get(&["INGOT_CACHE_SIZE"]);
        let most_nbytes = match (self.cache_size, text) {
            (None, Some(text)) => Some(parse_size(&text).ok_or_else(|| {
                let why = format!("INGOT_CACHE_SIZE: expected a size such as 500GB, found {text:?}");
                Fault::option(why)
            })?),
            (given, _) => given,
        };
        Ok(Some(CacheOptions {
            directory,
            most_nbytes,
        }))
    }

    /// Whether requests for files are forbidden, by the options or by the environment.
    #[must_use]
    pub fn is_offline(&self) -> bool {
        self.offline
            .unwrap_or_else(|| PROCESS.is("INGOT_OFFLINE", &["1", "on", "yes", "true"]))
    }
}

/// Parse a size in bytes: a number, and a unit such as `GB`.
///
/// ```
/// use ingot_remote::parse_size;
///
/// assert_eq!(parse_size("500 GB"), Some(500_000_000_000));
/// assert_eq!(parse_size("1.5tb"), Some(1_500_000_000_000));
/// assert_eq!(parse_size("4096"), Some(4096));
/// assert_eq!(parse_size("5 apples"), None);
/// ```
#[must_use]
pub fn parse_size(text: &str) -> Option<u64> {
    let text = text.trim();
    let is_unit = |c: char| !c.is_ascii_digit() && c != '.';
    let (digits, unit) = text.split_at(text.find(is_unit).unwrap_or(text.len()));
    let is_meant = |row: &&(&str, u64)| row.0.eq_ignore_ascii_case(unit.trim());
    let factor = if unit.is_empty() {
        1
    } else {
        UNITS.iter().find(is_meant)?.1
    };
    let (whole, part) = digits.split_once('.').unwrap_or((digits, "0"));
    let tenths = 10_u64.checked_pow(u32::try_from(part.len()).ok()?)?;
    let part = part.parse::<u64>().ok()?.checked_mul(factor)? / tenths;
    whole.parse::<u64>().ok()?.checked_mul(factor)?.checked_add(part)
}

impl Resource {
    /// Return the name of the file in the cache: its URL without user and signature, which differ each time, and without
    /// the region of Amazon's stores, which a request may have to find out.
    #[must_use]
    pub fn cache_name(&self) -> String {
        let mut url = self.home().clone();
        remove_region(&mut url);
        url.unsigned()
    }
}

fn remove_region(url: &mut Url) {
    let host = url.host.strip_suffix(AMAZON);
    let Some((service, _region)) = host.and_then(|host| host.rsplit_once('.')) else {
        return;
    };
    if service == "s3" || service.ends_with(".s3") {
        url.host = format!("{service}{AMAZON}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn environment(name: &str) -> Option<String> {
        let pairs = [("INGOT_CACHE", "/c"), ("INGOT_CACHE_SIZE", "2GB")];
        let found = pairs.iter().find(|pair| pair.0 == name);
        found.map(|pair| pair.1.to_owned())
    }

    #[test]
    fn options_take_precedence_over_the_environment() {
        let found = |options: &RemoteOptions| {
            let found = options.cache_in(Environment(&environment)).unwrap();
            found.map(|found| (found.directory.to_str().unwrap().to_owned(), found.most_nbytes))
        };
        let mut options = RemoteOptions::default();
        assert_eq!(found(&options), Some(("/c".to_owned(), Some(2_000_000_000))));
        options.cache_size = Some(5);
        options.cache_dir = Some("/d".into());
        assert_eq!(found(&options), Some(("/d".to_owned(), Some(5))));
        options.cache_dir = Some(PathBuf::new());
        assert_eq!(found(&options), None);
    }

    #[test]
    fn an_invalid_size_in_the_environment_is_an_error() {
        let pairs = |name: &str| (name.starts_with("INGOT_CACHE")).then(|| "much".to_owned());
        let fault = RemoteOptions::default()
            .cache_in(Environment(&pairs))
            .unwrap_err();
        assert_eq!(fault.code(), "storage-option");
        for text in ["", "GB", "-1", "1.5.1GB", ".GB", "99999999999TB", "1 G B"] {
            assert_eq!(parse_size(text), None, "{text}");
        }
    }

    #[test]
    fn the_region_of_a_bucket_is_not_part_of_the_name() {
        for (text, host) in [
            ("https://b.s3.eu-west-3.amazonaws.com/k", "b.s3.amazonaws.com"),
            ("https://s3.us-east-1.amazonaws.com/b.c/k", "s3.amazonaws.com"),
            (
                "https://minio.s3.eu-west-3.example.com/k",
                "minio.s3.eu-west-3.example.com",
            ),
            (
                "https://sts.eu-west-3.amazonaws.com/",
                "sts.eu-west-3.amazonaws.com",
            ),
        ] {
            let mut url = Url::parse(text).unwrap();
            remove_region(&mut url);
            assert_eq!(url.host, host);
        }
    }
}
