//! Environment variables.

use std::path::PathBuf;

use crate::credentials::{Keys, Secret};
use crate::fault::{Fault, Result};

/// The variables of this process, or of a test. Blank variables count as unset.
#[derive(Clone, Copy)]
pub(crate) struct Environment<'e>(pub(crate) &'e dyn Fn(&str) -> Option<String>);

/// The variables of this process.
pub(crate) const PROCESS: Environment<'static> = Environment(&|name| std::env::var(name).ok());

impl Environment<'_> {
    /// Return the first of these variables that is set.
    pub(crate) fn get(self, names: &[&str]) -> Option<String> {
        let get = |name: &&str| (self.0)(name).filter(|value| !value.trim().is_empty());
        names.iter().find_map(get)
    }

    /// Return the credential in the first of these variables that is set.
    pub(crate) fn secret(self, names: &[&str]) -> Result<Option<Secret>> {
        let found = names.iter().find_map(|name| Some((name, self.get(&[name])?)));
        found
            .map(|(name, value)| Secret::new(value).checked(name))
            .transpose()
    }

    /// Return the keys in two variables. The first without the second is an error.
    pub(crate) fn keys(self, id: &str, secret: &str) -> Result<Option<Keys>> {
        let Some(key) = self.secret(&[id])? else {
            return Ok(None);
        };
        let missing = || Fault::option(format!("the environment has {id} without {secret}"));
        let secret = self.secret(&[secret])?.ok_or_else(missing)?;
        Ok(Some(Keys::new(key, secret, None)))
    }

    /// Whether a variable has one of these values, in any case.
    pub(crate) fn is(self, name: &str, values: &[&str]) -> bool {
        let found = self.get(&[name]);
        found.is_some_and(|found| values.iter().any(|value| value.eq_ignore_ascii_case(&found)))
    }

    /// Return the values of these variables, empty for those that are not set.
    pub(crate) fn values(self, names: &[&str]) -> Vec<Secret> {
        names
            .iter()
            .map(|name| Secret::new((self.0)(name).unwrap_or_default()))
            .collect()
    }

    /// Return the home directory of the user.
    pub(crate) fn home(self) -> Option<PathBuf> {
        self.get(&["HOME", "USERPROFILE"]).map(PathBuf::from)
    }
}
