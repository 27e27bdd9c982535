//! What a person gets who has logged in with `aws sso login`.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use jiff::Timestamp;
use ring::digest;
use serde_json::{Value, json};

use super::asker::{Asker, posted, useless};
use super::{read_json, refused, shown, until};
use crate::fault::Fault;
use crate::http::pace::Deadline;
use crate::options::{RemoteOptions, Secret};
use crate::store::sigv4::hex;
use crate::system::for_nobody_else;
use crate::url::Url;

/// The token of a session is renewed that is good for less than this, as Amazon's tools do it.
const LEAST_VALIDITY: Duration = Duration::from_secs(900);

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Sso {
    /// Who gives keys for the token.
    pub(super) portal: Url,
    /// Who renews the token.
    pub(super) login: Url,
    /// Which keys.
    pub(super) query: String,
    /// Whether the token is one of a session, which can be renewed.
    pub(super) is_renewed: bool,
    /// Where Amazon's tools keep the token.
    pub(super) file: PathBuf,
}

impl Sso {
    /// The file for the token of a session, or of a start URL.
    pub(super) fn file(home: &Path, of: &str) -> PathBuf {
        let name = digest::digest(&digest::SHA1_FOR_LEGACY_USE_ONLY, of.as_bytes());
        let folder = home.join(".aws").join("sso").join("cache");
        folder.join(format!("{}.json", hex(name.as_ref())))
    }

    /// The answer with the keys.
    pub(super) fn ask(&self, options: &RemoteOptions, deadline: Deadline<'_>) -> Result<String, Fault> {
        let token = self.token(options, deadline)?;
        let folder = self.portal.path.trim_end_matches('/');
        let url = Url {
            path: format!("{folder}/federation/credentials"),
            query: Some(self.query.clone()),
            ..self.portal.clone()
        };
        Asker::of(&url, options, deadline).get(&url, &[("x-amz-sso_bearer_token", &token)])
    }

    fn token(&self, options: &RemoteOptions, deadline: Deadline<'_>) -> Result<Secret, Fault> {
        let log_in = |why: &str| refused(format!("{why}: log in with `aws sso login`"));
        if !self.file.exists() {
            return Err(log_in(&format!("there is no {}", shown(&self.file))));
        }
        let kept = read_json(&self.file)?;
        let text = |name: &str| kept.get(name).and_then(Value::as_str);
        let (now, over) = (SystemTime::now(), until(text("expiresAt")));
        let present = text("accessToken")
            .filter(|token| over > now && !token.trim().is_empty())
            .map(Secret::new);
        let present = present
            .map(|token| token.checked(&format!("the token in {}", shown(&self.file))))
            .transpose()?;
        let parts = ["clientId", "clientSecret", "refreshToken"].map(text);
        let renewed = match parts {
            _ if over > now + LEAST_VALIDITY || !self.is_renewed => None,
            [Some(client), Some(secret), Some(refresh)] if until(text("registrationExpiresAt")) > now => {
                Some(self.renew(&kept, [client, secret, refresh], options, deadline))
            }
            _ => None,
        };
        match (renewed, present) {
            (Some(Ok(token)), _) => Ok(token),
            (Some(Err(fault)), _) if deadline.stop.is_set() => Err(fault),
            (_, Some(token)) => Ok(token),
            (Some(Err(fault)), None) => Err(fault),
            (None, None) => Err(log_in("the login is over")),
        }
    }

    /// A new token for the one that is nearly over. It is kept where the old one was: that cannot be renewed again.
    fn renew(
        &self,
        kept: &Value,
        [client, secret, refresh]: [&str; 3],
        options: &RemoteOptions,
        deadline: Deadline<'_>,
    ) -> Result<Secret, Fault> {
        let url = Url {
            path: format!("{}/token", self.login.path.trim_end_matches('/')),
            ..self.login.clone()
        };
        let body = json!({
            "clientId": client,
            "clientSecret": secret,
            "grantType": "refresh_token",
            "refreshToken": refresh,
        });
        let body = body.to_string();
        let answer = Asker::of(&url, options, deadline).ask(&posted(&url, "application/json", &body))?;
        let answer: Value = serde_json::from_str(&answer).unwrap_or_default();
        let text = |name: &str| answer.get(name).and_then(Value::as_str);
        let token = text("accessToken").ok_or_else(|| useless(&url.to_string()))?;
        let token = Secret::new(token).checked(&format!("the token of {url}"))?;
        let seconds = answer.get("expiresIn").and_then(Value::as_i64).unwrap_or(0);
        let mut new = kept.clone();
        new["accessToken"] = token.reveal().into();
        new["expiresAt"] = time_after(seconds).into();
        new["refreshToken"] = text("refreshToken").unwrap_or(refresh).into();
        // The token is good, whether it can be kept or not.
        let _ = self.keep(&new.to_string());
        Ok(token)
    }

    /// Puts another file into the place of the old one, for nobody else to read.
    fn keep(&self, text: &str) -> std::io::Result<()> {
        let new = self.file.with_extension(format!("{}.new", process::id()));
        let mut options = fs::OpenOptions::new();
        let mut file = for_nobody_else(&mut options)
            .write(true)
            .create_new(true)
            .open(&new)?;
        let written = file
            .write_all(text.as_bytes())
            .and_then(|()| fs::rename(&new, &self.file));
        if written.is_err() {
            let _ = fs::remove_file(&new);
        }
        written
    }
}

fn time_after(seconds: i64) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let then = i64::try_from(now.as_secs())
        .ok()
        .and_then(|now| now.checked_add(seconds));
    let then = then
        .and_then(|then| Timestamp::from_second(then).ok())
        .unwrap_or_default();
    then.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}
