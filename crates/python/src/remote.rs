//! Where a caller says that a file is, and how remote ones are reached.

use std::path::PathBuf;
use std::time::Duration;

use ingot_io::{RemoteOptions, Secret, Token};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict};

use crate::errors::{class_of, exception};
use crate::paths::{file_path, is_remote};

/// What a caller may give where files and URLs are read alike.
pub(crate) enum Location {
    File(PathBuf),
    Url(String, Box<RemoteOptions>),
}

impl Location {
    /// A str may be a URL. What is a path by its type is one.
    pub(crate) fn of(
        given: &Bound<'_, PyAny>,
        storage_options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Location> {
        match given.extract::<&str>() {
            Ok(url) if is_remote(url) => {
                let options = remote_options(storage_options)?;
                Ok(Location::Url(url.to_owned(), Box::new(options)))
            }
            _ => file_path(given).map(Location::File),
        }
    }
}

/// What `storage_options` says. Their names and what they mean stand in `python/ingot/_remote.py`.
pub(crate) fn remote_options(given: Option<&Bound<'_, PyDict>>) -> PyResult<RemoteOptions> {
    let mut options = RemoteOptions::default();
    let Some(given) = given else {
        return Ok(options);
    };
    let (mut id, mut secret) = (None, None);
    for (name, value) in given.iter() {
        let name = name.extract::<String>()?;
        if value.is_none() {
            continue;
        }
        let mut read = || -> PyResult<bool> {
            match name.as_str() {
                "token" => options.token = token(&value)?,
                "headers" => options.headers = headers(&value)?,
                "connect_timeout" => options.connect_timeout = seconds(&value)?,
                "stall_timeout" => options.stall_timeout = seconds(&value)?,
                "timeout" => options.timeout = seconds(&value)?,
                "min_rate" => options.min_rate = value.extract()?,
                "retries" => options.retries = value.extract()?,
                "ca_file" => options.ca_file = Some(file_path(&value)?),
                "allow_private_redirects" => options.allow_private_redirects = value.extract()?,
                "endpoint" => options.endpoint = Some(value.extract()?),
                "region" => options.region = Some(value.extract()?),
                "path_style" => options.path_style = Some(value.extract()?),
                "anonymous" => options.anonymous = value.extract()?,
                "access_key_id" => id = Some(value.extract::<String>()?),
                "secret_access_key" => secret = Some(hidden(&value)?),
                "session_token" => options.session_token = Some(hidden(&value)?),
                "account" => options.account = Some(value.extract()?),
                "account_key" => options.account_key = Some(hidden(&value)?),
                "sas_token" => options.sas_token = Some(hidden(&value)?),
                _ => return Ok(false),
            }
            Ok(true)
        };
        // Never with the value: it may be a secret.
        let is_known = read().map_err(|fault| mistyped(&value, &name, &fault))?;
        if !is_known {
            return Err(unknown(given.py(), &name));
        }
    }
    options.access_key = match (id, secret) {
        (Some(id), Some(secret)) => Some((id, secret)),
        (None, None) => None,
        _ => {
            let why = "storage_options: expected both of access_key_id and secret_access_key, found one";
            return Err(exception(given.py(), "OptionError", why, None)?);
        }
    };
    Ok(options)
}

fn unknown(py: Python<'_>, name: &str) -> PyErr {
    let known = py
        .import("ingot._remote")
        .and_then(|module| module.getattr("OPTIONS")?.extract::<Vec<String>>())
        .unwrap_or_default();
    let message = format!(
        "storage_options: {} is unknown: expected one of {}",
        ingot_format::Quoted(name),
        known.join(", ")
    );
    exception(py, "OptionError", &message, None).unwrap_or_else(|failure| failure)
}

fn mistyped(value: &Bound<'_, PyAny>, name: &str, fault: &PyErr) -> PyErr {
    let py = value.py();
    let class = class_of(value);
    let message = format!("storage_options: {name}: cannot be this {class}");
    if fault.is_instance_of::<PyTypeError>(py) {
        return PyTypeError::new_err(message);
    }
    exception(py, "OptionError", &message, None).unwrap_or_else(|failure| failure)
}

/// `False` sends none, as the Hub's clients have it.
fn token(value: &Bound<'_, PyAny>) -> PyResult<Token> {
    match value.cast::<PyBool>() {
        Ok(flag) if flag.is_true() => Ok(Token::Environment),
        Ok(_) => Ok(Token::Withheld),
        Err(_) => hidden(value).map(Token::Given),
    }
}

fn hidden(value: &Bound<'_, PyAny>) -> PyResult<Secret> {
    Ok(Secret::new(value.extract::<String>()?))
}

fn headers(value: &Bound<'_, PyAny>) -> PyResult<Vec<(String, Secret)>> {
    let pairs = value.cast::<PyDict>()?;
    let pair = |(name, value): (Bound<'_, PyAny>, Bound<'_, PyAny>)| Ok((name.extract()?, hidden(&value)?));
    pairs.iter().map(pair).collect()
}

fn seconds(value: &Bound<'_, PyAny>) -> PyResult<Duration> {
    let seconds = value.extract::<f64>()?;
    let time = Duration::try_from_secs_f64(seconds)
        .ok()
        .filter(|time| !time.is_zero());
    time.ok_or_else(|| PyValueError::new_err("seconds"))
}
