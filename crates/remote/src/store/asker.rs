//! Short questions to services that issue keys.

use crate::fault::{Fault, FaultKind};
use crate::http::client::Client;
use crate::http::dial::AddressScope;
use crate::http::message::HttpRequest;
use crate::http::pace::{Deadline, Pace};
use crate::http::retry::Tries;
use crate::secrets::Secrets;
use crate::stop::StopFlag;
use crate::url::Url;

/// Bytes of an answer that are looked at.
const ANSWER_NBYTES: usize = 64 << 10;

/// What asks them.
pub(crate) struct Asker<'f> {
    pub(crate) client: Client,
    pub(crate) stop: StopFlag<'f>,
}

impl Asker<'_> {
    /// The body of the answer.
    pub(crate) fn ask(
        &self,
        method: &'static str,
        url: &Url,
        headers: Vec<(String, String)>,
        body: &[u8],
    ) -> Result<String, Fault> {
        let request = HttpRequest {
            method,
            url,
            headers,
            body,
        };
        let mut tries = Tries::new(&self.client.options, self.stop);
        loop {
            match self.ask_once(&request, tries.deadline) {
                Ok(answer) => return Ok(answer),
                Err(fault) => {
                    let fault = fault.from(url.to_string());
                    tries.after(fault.without(&Secrets::of_request(&request)))?;
                }
            }
        }
    }

    /// Sends a form.
    pub(crate) fn post(&self, url: &Url, form: &str) -> Result<String, Fault> {
        let kind = (
            "Content-Type".to_owned(),
            "application/x-www-form-urlencoded".to_owned(),
        );
        self.ask("POST", url, vec![kind], form.as_bytes())
    }

    fn ask_once(&self, request: &HttpRequest<'_>, deadline: Deadline<'_>) -> Result<String, Fault> {
        let mut response = self.client.send(request, AddressScope::Anywhere, deadline)?;
        let mut pace = Pace::new(&self.client.options, deadline);
        let body = response.read_some(ANSWER_NBYTES, &mut pace)?;
        let body = String::from_utf8_lossy(&body).into_owned();
        let head = &response.head;
        if head.status != 200 {
            let said = element(&body, "Code").map(|word| ingot_format::Escaped(word).to_string());
            return Err(FaultKind::Status {
                status: head.status,
                reason: ingot_format::Escaped(&head.reason).to_string(),
                said,
                wait: head.retry_after(),
                region: None,
            }
            .into());
        }
        self.client.give_back(response);
        Ok(body)
    }
}

/// The text of the first element of this name, as the services of Amazon and Google answer in XML.
pub(crate) fn element<'b>(body: &'b str, name: &str) -> Option<&'b str> {
    let (_, rest) = body.split_once(&format!("<{name}>"))?;
    Some(rest.split_once(&format!("</{name}>"))?.0.trim())
}

/// The answer has not what was asked for.
pub(crate) fn useless(service: &Url) -> Fault {
    Fault::new(FaultKind::Malformed("it holds no keys")).from(service.to_string())
}
