//! Requests to the services that issue keys.

use std::net::IpAddr;
use std::time::Duration;

use crate::fault::{Fault, Result};
use crate::http::client::Client;
use crate::http::message::{Head, HttpRequest};
use crate::http::pace::{Deadline, Pace};
use crate::http::retry::Tries;
use crate::options::RemoteOptions;
use crate::secrets::Secrets;
use crate::url::Url;

/// Most bytes of an answer.
const ANSWER_NBYTES: usize = 64 << 10;

/// A service of this machine accepts a connection within milliseconds, or does not exist.
const NEAR_TIMEOUT: Duration = Duration::from_secs(1);

/// A client of one service.
pub(super) struct Asker<'f> {
    client: Client,
    deadline: Deadline<'f>,
}

impl<'f> Asker<'f> {
    /// Return a client of the service at `url`. A service of this machine is asked without a proxy, which could not reach
    /// it and must not see the request.
    pub(super) fn of(url: &Url, options: &RemoteOptions, deadline: Deadline<'f>) -> Asker<'f> {
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

    /// Send a request and return the body of the answer.
    pub(super) fn ask(&self, request: &HttpRequest<'_>) -> Result<String> {
        if self.client.is_overheard(request.url)? {
            let why = format!("a proxy would read the request to {} over http://", request.url);
            return Err(Fault::option(why));
        }
        let about = |fault: Fault| {
            let fault = fault.at(request.url.to_string());
            fault.without(&Secrets::of_request(request))
        };
        let mut tries = Tries::until(self.deadline, &self.client.options);
        tries.run(|deadline| self.ask_once(request, deadline).map_err(about))
    }

    fn ask_once(&self, request: &HttpRequest<'_>, deadline: Deadline<'_>) -> Result<String> {
        let mut response = self.client.send(request, false, deadline)?;
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

/// Whether a service belongs to this machine or its cloud, so that no proxy reaches it.
fn is_near(url: &Url) -> bool {
    const NAMES: &[&str] = &["localhost", "fd00:ec2::23", "fd00:ec2::254"];
    let is_near = |address| match address {
        IpAddr::V4(v4) => v4.is_loopback() || v4.is_link_local(),
        IpAddr::V6(v6) => v6.is_loopback() || v6.is_unicast_link_local(),
    };
    NAMES.contains(&url.host.as_str()) || url.address().is_some_and(is_near)
}

/// Return the fault of a service that refuses, with its explanation: the code in Amazon's XML, or the message in JSON.
fn refusal(head: &Head, body: &str) -> Fault {
    let answer: serde_json::Value = serde_json::from_str(body).unwrap_or_default();
    let text = |name: &str| answer.get(name).and_then(serde_json::Value::as_str);
    let description = text("error_description").unwrap_or_default();
    let error = text("error").map(|error| format!("{error} {description}"));
    let said = element(body, "Code").or(error.as_deref()).or(text("message"));
    head.refusal(said)
}

/// Return the text of the first XML element of this name.
pub(crate) fn element<'b>(body: &'b str, name: &str) -> Option<&'b str> {
    let (_, rest) = body.split_once(&format!("<{name}>"))?;
    Some(rest.split_once(&format!("</{name}>"))?.0.trim())
}
