//! Short questions to services that issue keys and tokens.

use std::time::Duration;

use ingot_format::Escaped;

use super::is_near;
use crate::credentials::Secret;
use crate::fault::{Fault, FaultKind};
use crate::http::client::Client;
use crate::http::dial::AddressScope;
use crate::http::message::{Head, HttpRequest};
use crate::http::pace::{Deadline, Pace};
use crate::http::retry::Tries;
use crate::options::RemoteOptions;
use crate::secrets::Secrets;
use crate::url::{Url, encode_segment};

/// Bytes of an answer that are looked at.
const ANSWER_NBYTES: usize = 64 << 10;

/// A machine's own service is connected to in a few milliseconds, or is not there.
const NEAR_TIMEOUT: Duration = Duration::from_secs(1);

/// What asks one of them.
pub(crate) struct Asker<'f> {
    client: Client,
    deadline: Deadline<'f>,
}

impl<'f> Asker<'f> {
    /// One that asks the service at `url`. No proxy leads to one that is next to this machine, and none shall see what
    /// that is told.
    pub(crate) fn of(url: &Url, options: &RemoteOptions, deadline: Deadline<'f>) -> Asker<'f> {
        let client = if is_near(url) {
            Client::direct(RemoteOptions {
                connect_timeout: NEAR_TIMEOUT.min(options.connect_timeout),
                retries: options.retries.min(2),
                ..options.clone()
            })
        } else {
            Client::new(options.clone())
        };
        Asker { client, deadline }
    }

    /// The body of the answer.
    pub(crate) fn ask(&self, request: &HttpRequest<'_>) -> Result<String, Fault> {
        if self.client.is_overheard(request.url)? {
            let why = format!("a proxy would read what {} is told over http://", request.url);
            return Err(FaultKind::Option(why).into());
        }
        let mut tries = Tries::until(self.deadline, &self.client.options);
        loop {
            match self.ask_once(request, tries.deadline) {
                Ok(answer) => return Ok(answer),
                Err(fault) => {
                    let fault = fault.from(request.url.to_string());
                    tries.after(fault.without(&Secrets::of_request(request)))?;
                }
            }
        }
    }

    /// Asks for what is at `url`, with these headers.
    pub(crate) fn get(&self, url: &Url, headers: &[(&str, &Secret)]) -> Result<String, Fault> {
        let pair = |(name, value): &(&str, &Secret)| ((*name).to_owned(), value.reveal().to_owned());
        self.ask(&HttpRequest {
            method: "GET",
            url,
            headers: headers.iter().map(pair).collect(),
            body: &[],
        })
    }

    /// Sends a form.
    pub(crate) fn post(&self, url: &Url, form: &str) -> Result<String, Fault> {
        self.ask(&posted(url, "application/x-www-form-urlencoded", form))
    }

    fn ask_once(&self, request: &HttpRequest<'_>, deadline: Deadline<'_>) -> Result<String, Fault> {
        let mut response = self.client.send(request, AddressScope::Anywhere, deadline)?;
        let mut pace = Pace::new(&self.client.options, deadline);
        let body = response.read_some(ANSWER_NBYTES, &mut pace)?;
        let body = String::from_utf8_lossy(&body).into_owned();
        if response.head.status != 200 {
            return Err(refusal(&response.head, &body));
        }
        self.client.give_back(response);
        Ok(body)
    }
}

/// A request that sends `body`.
pub(crate) fn posted<'r>(url: &'r Url, kind: &str, body: &'r str) -> HttpRequest<'r> {
    HttpRequest {
        method: "POST",
        url,
        headers: vec![("Content-Type".to_owned(), kind.to_owned())],
        body: body.as_bytes(),
    }
}

/// The pairs of a form or of a query.
pub(crate) fn form<'p>(pairs: impl IntoIterator<Item = (&'p str, &'p str)>) -> String {
    let pair = |(name, value): (&str, &str)| format!("{}={}", encode_segment(name), encode_segment(value));
    let pairs: Vec<String> = pairs.into_iter().map(pair).collect();
    pairs.join("&")
}

/// What a service says that issues nothing: a word of Amazon's XML, or what OAuth and Amazon's newer services say in JSON.
fn refusal(head: &Head, body: &str) -> Fault {
    let answer: serde_json::Value = serde_json::from_str(body).unwrap_or_default();
    let text = |name: &str| answer.get(name).and_then(serde_json::Value::as_str);
    let said = match (element(body, "Code"), text("error")) {
        (Some(word), _) => Some(word.to_owned()),
        (_, Some(word)) => Some([word, text("error_description").unwrap_or_default()].join(" ")),
        _ => text("message").map(ToOwned::to_owned),
    };
    FaultKind::Status {
        status: head.status,
        reason: Escaped(&head.reason).to_string(),
        said: said.map(|said| Escaped(said.trim()).to_string()),
        wait: head.retry_after(),
        region: None,
    }
    .into()
}

/// The text of the first element of this name, as the services of Amazon and Google answer in XML.
pub(crate) fn element<'b>(body: &'b str, name: &str) -> Option<&'b str> {
    let (_, rest) = body.split_once(&format!("<{name}>"))?;
    Some(rest.split_once(&format!("</{name}>"))?.0.trim())
}

/// The answer has not what was asked for.
pub(crate) fn useless(source: &str) -> Fault {
    Fault::new(FaultKind::Malformed("it holds no keys and no token")).from(source.to_owned())
}
