//! Identities that Python finds: from a provider of the caller, or from the vendors' SDKs through
//! `ingot._read.identity`.

use std::io;
use std::path::PathBuf;
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ingot_io::Secret;
use ingot_io::credentials::{Credential, Credentials, Identity, Keys, Wanted};
use pyo3::prelude::*;
use pyo3::types::{PyCFunction, PyDict, PyTuple};

use crate::object_fault::Raised;

/// The vendors' SDKs. One object for all calls, which share the identities.
pub(crate) static SDKS: LazyLock<Arc<dyn Credentials>> = LazyLock::new(|| Arc::new(Sdks));

/// The callable in `storage_options={"credentials": …}`.
#[derive(Debug)]
pub(crate) struct Callable(pub(crate) Py<PyAny>);

#[derive(Debug)]
struct Sdks;

/// The answer of a provider: keys and session, or a token; the expiry in seconds since 1970, the region, the endpoint.
pub(crate) type Answered = (
    Option<String>,
    Option<String>,
    Option<String>,
    Option<String>,
    Option<f64>,
    Option<String>,
    Option<String>,
);

/// A question to the SDKs.
type Asked = (
    &'static str,
    Option<String>,
    Option<PathBuf>,
    Option<String>,
    Option<String>,
    Option<String>,
);

impl Credentials for Callable {
    fn identity(&self, _: &Wanted) -> io::Result<Identity> {
        ask(|py| ("given", (&self.0,).into_pyobject(py)))
    }
}

impl Credentials for Sdks {
    fn identity(&self, wanted: &Wanted) -> io::Result<Identity> {
        let asked: Asked = (
            wanted.store,
            wanted.profile.clone(),
            wanted.credentials_file.clone(),
            wanted.client_id.clone(),
            wanted.tenant_id.clone(),
            wanted
                .client_secret
                .as_ref()
                .map(|secret| secret.reveal().to_owned()),
        );
        ask(|py| ("found", asked.into_pyobject(py)))
    }
}

/// Call a function of `ingot._read.identity` on a Python thread, and wait with the interpreter released. At exit,
/// Python stops its threads at once, and unwinding through a Rust frame on their stack would abort the process.
fn ask(
    call: impl for<'py> FnOnce(Python<'py>) -> (&'static str, PyResult<Bound<'py, PyTuple>>),
) -> io::Result<Identity> {
    let (sender, receiver) = mpsc::channel();
    let start = |py: Python<'_>| -> PyResult<()> {
        let module = py.import("ingot._read.identity")?;
        let (function, arguments) = call(py);
        module.call_method1("start", (function, arguments?, done(py, sender)?))?;
        Ok(())
    };
    let ended = || io::Error::other("the interpreter is shutting down");
    Python::try_attach(start).ok_or_else(ended)?.map_err(refusal)?;
    receiver.recv().map_err(|_| ended())?
}

/// Receives the result of the call, or its exception.
fn done(py: Python<'_>, sender: Sender<io::Result<Identity>>) -> PyResult<Bound<'_, PyCFunction>> {
    let take = move |arguments: &Bound<'_, PyTuple>, _: Option<&Bound<'_, PyDict>>| -> PyResult<()> {
        let (answer, raised) = arguments.extract::<(Option<Answered>, Bound<'_, PyAny>)>()?;
        let answer = answer.map(identity_of);
        let answer = answer.ok_or_else(|| refusal(PyErr::from_value(raised)));
        // The caller may have been interrupted.
        let _ = sender.send(answer);
        Ok(())
    };
    PyCFunction::new_closure(py, None, None, take)
}

fn identity_of((id, secret, session, token, expiry, region, endpoint): Answered) -> Identity {
    let credential = match (id, secret, token) {
        (Some(id), Some(secret), _) => Credential::Keys(Keys {
            id: Secret::new(id),
            secret: Secret::new(secret),
            session: session.map(Secret::new),
        }),
        (.., Some(token)) => Credential::Token(Secret::new(token)),
        _ => Credential::Anonymous,
    };
    let mut identity = Identity::new(credential);
    identity.expiry = expiry.map(time_of);
    (identity.region, identity.endpoint) = (region, endpoint);
    identity
}

/// Return the time at this many seconds after 1970. A time that the clock cannot represent counts as past.
fn time_of(seconds: f64) -> SystemTime {
    let since = Duration::try_from_secs_f64(seconds).unwrap_or_default();
    UNIX_EPOCH.checked_add(since).unwrap_or(UNIX_EPOCH)
}

/// Convert an exception. An error of `ingot._read.identity` keeps its message, which contains no secret. Any other is
/// named by its class only, with the exception as cause.
fn refusal(raised: PyErr) -> io::Error {
    let ours = Python::try_attach(|py| {
        let class = py.import("ingot._read.identity")?.getattr("RefusedError")?;
        let raised = raised.value(py);
        if !raised.is_instance(&class)? {
            return Ok(None);
        }
        let kind = match raised.getattr("kind")?.extract::<String>()?.as_str() {
            "refused" => io::ErrorKind::PermissionDenied,
            "missing" => io::ErrorKind::Unsupported,
            "setting" => io::ErrorKind::InvalidInput,
            _ => io::ErrorKind::Other,
        };
        PyResult::Ok(Some(io::Error::new(
            kind,
            ingot_format::Escaped(&raised.str()?.to_string()).to_string(),
        )))
    });
    match ours {
        Some(Ok(Some(error))) => error,
        _ => io::Error::other(Raised(raised)),
    }
}

pub(crate) fn answered(identity: &Identity) -> Answered {
    let text = |secret: &Secret| Some(secret.reveal().to_owned());
    let (id, secret, session, token) = match &identity.credential {
        Credential::Keys(keys) => {
            let session = keys.session.as_ref().and_then(text);
            (text(&keys.id), text(&keys.secret), session, None)
        }
        Credential::Token(token) => (None, None, None, text(token)),
        Credential::Anonymous => (None, None, None, None),
    };
    let since = identity
        .expiry
        .and_then(|expiry| expiry.duration_since(UNIX_EPOCH).ok());
    let expiry = since.map(|since| since.as_secs_f64());
    (
        id,
        secret,
        session,
        token,
        expiry,
        identity.region.clone(),
        identity.endpoint.clone(),
    )
}
