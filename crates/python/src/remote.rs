//! The options for remote files.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use ingot_io::{RemoteOptions, Secret, Token};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict};

use crate::credentials::{Answered, Callable, SDKS, answered};
use crate::errors::{class_of, exception};
use crate::paths::file_path;
use crate::watch::Signals;

/// Parse `storage_options`. `python/ingot/_base/checks.py` documents the names.
pub(crate) fn remote_options(given: Option<&Bound<'_, PyDict>>) -> PyResult<RemoteOptions> {
    let Some(given) = given else {
        return Ok(usual());
    };
    let py = given.py();
    let mut reading = Reading {
        names: py.import("ingot._base.checks")?.getattr("NAMES")?,
        options: usual(),
        id: None,
        secret: None,
        is_http_allowed: None,
        seen: Vec::new(),
    };
    reading.read_all(given)?;
    let refuse = |why: &str| Err(misfit(py, why));
    let mut options = reading.options;
    options.access_key = match (reading.id, reading.secret) {
        (Some(id), Some(secret)) => Some((id, secret)),
        (None, None) => None,
        _ => {
            return refuse(
                "storage_options: expected both of access_key_id and secret_access_key, found one",
            );
        }
    };
    let is_http = |endpoint: &String| endpoint.starts_with("http:");
    if reading.is_http_allowed == Some(false) && options.endpoint.as_ref().is_some_and(is_http) {
        return refuse("storage_options: allow_http is False, and the endpoint is one of http://");
    }
    Ok(options)
}

fn usual() -> RemoteOptions {
    let mut options = RemoteOptions::default();
    options.sdks = Some(Arc::clone(&SDKS));
    options
}

/// Raise if `storage_options` are invalid. See `_native.pyi`.
#[pyfunction]
pub(crate) fn check_storage_options(given: &Bound<'_, PyDict>) -> PyResult<()> {
    remote_options(Some(given)).map(drop)
}

/// The result of `identity`: the setting that contains the identity, and the identity.
type Found = (String, Option<Answered>);

/// Return why the cache was not used in this process, the last time that it was not.
#[pyfunction]
pub(crate) fn why_uncached() -> Option<String> {
    ingot_io::binding::why_uncached()
}

/// Return the identity of requests for `url`. See `_native.pyi`.
#[pyfunction]
#[pyo3(signature = (url, storage_options = None))]
pub(crate) fn identity(
    py: Python<'_>,
    url: &str,
    storage_options: Option<&Bound<'_, PyDict>>,
) -> PyResult<Option<Found>> {
    let options = remote_options(storage_options)?;
    let find = |signals: &Signals| ingot_io::binding::identity(url, &options, signals);
    let found = Signals::detach(py, find)?;
    Ok(found.map(|(source, identity)| (source, identity.map(|identity| answered(&identity)))))
}

/// Return an error about `storage_options`.
fn misfit(py: Python<'_>, message: &str) -> PyErr {
    let make = || -> PyResult<PyErr> {
        let facts = PyDict::new(py);
        facts.set_item("code", "storage-option")?;
        exception(py, "OptionError", message, Some(&facts))
    };
    make().unwrap_or_else(|failure| failure)
}

/// The options parsed so far.
struct Reading<'py> {
    names: Bound<'py, PyAny>,
    options: RemoteOptions,
    id: Option<String>,
    secret: Option<Secret>,
    is_http_allowed: Option<bool>,
    /// The options that were given, under the given names.
    seen: Vec<(String, String)>,
}

impl Reading<'_> {
    fn read_all(&mut self, given: &Bound<'_, PyDict>) -> PyResult<()> {
        for (given, value) in given.iter() {
            let Ok(given) = given.extract::<String>() else {
                let class = class_of(&given);
                let message = format!("storage_options: expected str as keys, found {class}");
                return Err(PyTypeError::new_err(message));
            };
            if value.is_none() {
                continue;
            }
            let name = self.names.call_method1("get", (given.to_ascii_lowercase(),))?;
            let Ok(name) = name.extract::<String>() else {
                return Err(unknown(value.py(), &given));
            };
            // Never with the value: it may be a secret.
            self.read(&name, &value).map_err(|fault| {
                if name == "client_kwargs" && value.is_instance_of::<PyDict>() {
                    fault
                } else {
                    mistyped(&value, &given, expected(&name), &fault)
                }
            })?;
            if let Some((_, other)) = self.seen.iter().find(|seen| seen.0 == name) {
                let why = format!("storage_options: {other} and {given} are the same option");
                return Err(misfit(value.py(), &why));
            }
            if name != "client_kwargs" {
                self.seen.push((name, given));
            }
        }
        Ok(())
    }

    fn read(&mut self, name: &str, value: &Bound<'_, PyAny>) -> PyResult<()> {
        let options = &mut self.options;
        match name {
            "token" => return self.read_token(value),
            "credentials" if value.is_callable() => {
                options.credentials = Some(Arc::new(Callable(value.clone().unbind())));
            }
            "credentials" => return Err(PyTypeError::new_err("not callable")),
            "headers" => options.headers = headers(value)?,
            "connect_timeout" => options.connect_timeout = seconds(value)?,
            "stall_timeout" => options.stall_timeout = seconds(value)?,
            "timeout" => options.timeout = seconds(value)?,
            "min_rate" => options.min_rate = value.extract()?,
            "retries" => options.retries = value.extract()?,
            "ca_file" => options.ca_file = Some(file_path(value)?),
            "verify" if flag(value).is_ok_and(|flag| flag) => {}
            "verify" if value.is_instance_of::<PyBool>() => {
                return Err(PyValueError::new_err("certificates are always verified"));
            }
            "verify" => options.ca_file = Some(file_path(value)?),
            "cache_dir" if value.is_instance_of::<PyBool>() && !flag(value)? => {
                options.cache_dir = Some(PathBuf::new());
            }
            "cache_dir" => options.cache_dir = Some(file_path(value)?),
            "cache_size" => options.cache_size = Some(size(value)?),
            "offline" => options.offline = Some(flag(value)?),
            "allow_private_redirects" => options.allow_private_redirects = value.extract()?,
            "endpoint" => options.endpoint = Some(value.extract()?),
            "account_host" => options.endpoint = Some(format!("https://{}", value.extract::<String>()?)),
            "region" => options.region = Some(value.extract()?),
            "path_style" => options.path_style = Some(flag(value)?),
            "virtual_hosted_style_request" => options.path_style = Some(!flag(value)?),
            "addressing_style" => options.path_style = addressing_style(value)?,
            "allow_http" => self.is_http_allowed = Some(flag(value)?),
            "anonymous" => options.anonymous = flag(value)?,
            "profile" => options.profile = Some(value.extract()?),
            "request_payer" => options.request_payer = Some(payer(value)?),
            "access_key_id" => self.id = Some(value.extract()?),
            "secret_access_key" => self.secret = Some(hidden(value)?),
            "session_token" => options.session_token = Some(hidden(value)?),
            "credentials_file" => options.credentials_file = Some(file_path(value)?),
            "account" => options.account = Some(value.extract()?),
            "account_key" => options.account_key = Some(hidden(value)?),
            "sas_token" => options.sas_token = Some(hidden(value)?),
            "connection_string" => options.connection_string = Some(hidden(value)?),
            "client_id" => options.client_id = Some(value.extract()?),
            "tenant_id" => options.tenant_id = Some(value.extract()?),
            "client_secret" => options.client_secret = Some(hidden(value)?),
            _ => return self.read_all(value.cast::<PyDict>()?),
        }
        Ok(())
    }

    /// `False` sends no token, as in the Hub's clients. gcsfs has words for ways to find a token, and accepts files.
    fn read_token(&mut self, value: &Bound<'_, PyAny>) -> PyResult<()> {
        if let Ok(flag) = value.cast::<PyBool>() {
            self.options.token = if flag.is_true() {
                Token::Environment
            } else {
                Token::Withheld
            };
            return Ok(());
        }
        let text = value.extract::<String>()?;
        match text.as_str() {
            "anon" => self.options.anonymous = true,
            "google_default" => self.options.token = Token::Environment,
            "cache" | "cloud" | "browser" => {
                return Err(PyValueError::new_err("not a token, and not a way to find one"));
            }
            path if path.ends_with(".json") => self.options.credentials_file = Some(path.into()),
            _ => self.options.token = Token::Given(Secret::new(text)),
        }
        Ok(())
    }
}

fn unknown(py: Python<'_>, name: &str) -> PyErr {
    let known = py
        .import("ingot._base.checks")
        .and_then(|module| module.getattr("OPTIONS")?.extract::<Vec<String>>())
        .unwrap_or_default();
    let message = format!(
        "storage_options: {} is unknown: expected one of {}, or a name of s3fs, gcsfs, adlfs or object_store",
        ingot_format::Quoted(name),
        known.join(", ")
    );
    misfit(py, &message)
}

/// The types of values that options accept.
fn expected(option: &str) -> &'static str {
    match option {
        "connect_timeout" | "stall_timeout" | "timeout" => "a number of seconds above 0",
        "min_rate" | "retries" => "an int of 0 or more",
        "cache_dir" => "a path or False",
        "cache_size" => "an int above 0 for bytes, or a str such as '500GB'",
        "headers" => "a dict of str to str",
        "client_kwargs" => "a dict",
        "credentials" => "a callable",
        "ca_file" | "credentials_file" => "a path",
        "token" => "a str or a bool",
        "verify" => "True or a path",
        "addressing_style" => "'path', 'virtual' or 'auto'",
        "request_payer" => "True, False or 'requester'",
        "allow_private_redirects"
        | "path_style"
        | "virtual_hosted_style_request"
        | "allow_http"
        | "offline"
        | "anonymous" => "True or False",
        _ => "a str",
    }
}

fn mistyped(value: &Bound<'_, PyAny>, name: &str, expected: &str, fault: &PyErr) -> PyErr {
    let py = value.py();
    let class = class_of(value);
    let message = format!("storage_options: {name}: cannot be this {class}: expected {expected}");
    if fault.is_instance_of::<PyTypeError>(py) {
        return PyTypeError::new_err(message);
    }
    misfit(py, &message)
}

/// Configurations of object_store have text values throughout.
fn flag(value: &Bound<'_, PyAny>) -> PyResult<bool> {
    match value.extract::<&str>() {
        Ok(text) if text.eq_ignore_ascii_case("true") => Ok(true),
        Ok(text) if text.eq_ignore_ascii_case("false") => Ok(false),
        Ok(_) => Err(PyValueError::new_err("true or false")),
        Err(_) => value.extract(),
    }
}

/// Parse a number of bytes above 0, or a text with a unit.
fn size(value: &Bound<'_, PyAny>) -> PyResult<u64> {
    let nbytes = match value.extract::<&str>() {
        Ok(text) => ingot_io::binding::parse_size(text),
        Err(_) => Some(value.extract()?),
    };
    let nbytes = nbytes.filter(|&nbytes| nbytes > 0);
    nbytes.ok_or_else(|| PyValueError::new_err("a size"))
}

fn payer(value: &Bound<'_, PyAny>) -> PyResult<bool> {
    match value.extract::<&str>() {
        Ok("requester") => Ok(true),
        _ => flag(value),
    }
}

/// Return whether the bucket is in the path, for botocore's words.
fn addressing_style(value: &Bound<'_, PyAny>) -> PyResult<Option<bool>> {
    match value.extract::<&str>()? {
        "path" => Ok(Some(true)),
        "virtual" => Ok(Some(false)),
        "auto" => Ok(None),
        _ => Err(PyValueError::new_err("path, virtual or auto")),
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
