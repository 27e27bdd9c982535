//! Sending requests: connections are made when they are needed and kept for the next.

use std::path::PathBuf;
use std::process;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use ingot_format::Escaped;
use rustls::ClientConfig;

use crate::fault::{Fault, FaultKind};
use crate::http::connection::{Connection, trusting};
use crate::http::dial::{AddressScope, dial, inward};
use crate::http::message::{Framing, Head, HttpRequest, render_head};
use crate::http::pace::{Deadline, Pace};
use crate::http::proxy::{Proxies, Proxy};
use crate::options::{RemoteOptions, environment};
use crate::secrets::Secrets;
use crate::url::{Scheme, SecurityOrigin, Url};
use ingot_format::briefly;

/// Connections to one host that are kept while nobody uses them: as many as are used at once.
const MAX_IDLE: usize = 64;

/// What sends requests. Nothing is connected, started or read before the first.
#[derive(Debug)]
pub struct Client {
    pub(crate) options: RemoteOptions,
    proxies: Proxies,
    tls: OnceLock<Result<Arc<ClientConfig>, String>>,
    idle: Mutex<Idle>,
}

#[derive(Debug, Default)]
struct Idle {
    /// Whose connections they are: a forked process has copies of them and must not speak on those.
    process: u32,
    connections: Vec<(SecurityOrigin, Connection)>,
}

/// An answer, with its body still to be read.
#[derive(Debug)]
pub(crate) struct Response {
    pub(crate) head: Head,
    pub(crate) framing: Framing,
    origin: SecurityOrigin,
    connection: Connection,
}

impl Client {
    /// One that goes through the proxies that the environment names.
    pub fn new(options: RemoteOptions) -> Client {
        Client::through(Proxies::of(&environment), options)
    }

    /// One that goes through none.
    pub(crate) fn direct(options: RemoteOptions) -> Client {
        Client::through(Proxies::default(), options)
    }

    fn through(proxies: Proxies, options: RemoteOptions) -> Client {
        Client {
            options,
            proxies,
            tls: OnceLock::new(),
            idle: Mutex::default(),
        }
    }

    /// How it reaches what it is asked for.
    #[must_use]
    pub fn options(&self) -> &RemoteOptions {
        &self.options
    }

    /// Sends a request and reads the head of its answer.
    pub(crate) fn send(
        &self,
        request: &HttpRequest<'_>,
        scope: AddressScope,
        deadline: Deadline<'_>,
    ) -> Result<Response, Fault> {
        let mut pace = Pace::new(&self.options, deadline);
        let origin = request.url.origin();
        let proxy = self.proxies.find(request.url)?;
        if let Some(mut connection) = self.idle_connection(&origin) {
            let came = connection.came();
            match exchange(&mut connection, request, proxy.as_ref(), &mut pace) {
                Ok(head) => return Response::new(head, origin, connection),
                // The server closed it while the request was on its way: that says nothing about the request.
                Err(fault) if connection.came() == came && matches!(fault.kind(), FaultKind::Broken(_)) => {}
                Err(fault) => return Err(fault),
            }
        }
        let mut connection = self.connect(request.url, proxy.as_ref(), scope, deadline)?;
        let head = exchange(&mut connection, request, proxy.as_ref(), &mut pace)?;
        Response::new(head, origin, connection)
    }

    /// Keeps the connection of an answer that was read to its end.
    pub(crate) fn give_back(&self, response: Response) {
        if !response.framing.has_ended() || !response.head.keeps_alive() {
            return;
        }
        let Some(mut idle) = self.lock_idle() else {
            return;
        };
        let of_host = idle.connections.iter().filter(|kept| kept.0 == response.origin);
        if of_host.count() < MAX_IDLE {
            idle.connections.push((response.origin, response.connection));
        }
    }

    /// Closes those that nobody uses, but for so many to each host.
    pub fn close_idle(&self, kept: usize) {
        let Some(mut idle) = self.lock_idle() else {
            return;
        };
        let mut of_host: Vec<(SecurityOrigin, usize)> = Vec::new();
        idle.connections.retain(|(origin, _)| {
            let at = of_host.iter().position(|known| known.0 == *origin);
            let at = at.unwrap_or_else(|| {
                of_host.push((origin.clone(), 0));
                of_host.len() - 1
            });
            of_host[at].1 += 1;
            of_host[at].1 <= kept
        });
    }

    fn idle_connection(&self, origin: &SecurityOrigin) -> Option<Connection> {
        loop {
            let connection = {
                let mut idle = self.lock_idle()?;
                let at = idle.connections.iter().rposition(|kept| kept.0 == *origin)?;
                idle.connections.swap_remove(at).1
            };
            if connection.is_quiet() {
                return Some(connection);
            }
        }
    }

    fn lock_idle(&self) -> Option<MutexGuard<'_, Idle>> {
        let process = process::id();
        let mut idle = briefly(&self.idle)?;
        if idle.process != process {
            *idle = Idle {
                process,
                connections: Vec::new(),
            };
        }
        Some(idle)
    }

    fn connect(
        &self,
        url: &Url,
        proxy: Option<&Proxy>,
        scope: AddressScope,
        deadline: Deadline<'_>,
    ) -> Result<Connection, Fault> {
        let timeout = self.options.connect_timeout;
        // First, so that certificates that cannot be read are no matter of the server's.
        let tls = match url.scheme {
            Scheme::Http => None,
            Scheme::Https => Some(self.tls()?),
        };
        let soon = deadline.no_longer_than(timeout);
        let connection = match proxy {
            None => Connection::plain(dial(&url.host, url.port, scope, soon)?),
            Some(proxy) => self.connect_through(proxy, url, scope, soon)?,
        };
        match tls {
            None => Ok(connection),
            Some(tls) => connection.secured(&url.host, &tls, deadline.no_longer_than(timeout)),
        }
    }

    /// A connection on which the host of `url` can be spoken to, or the proxy where that is told of each request.
    fn connect_through(
        &self,
        proxy: &Proxy,
        url: &Url,
        scope: AddressScope,
        deadline: Deadline<'_>,
    ) -> Result<Connection, Fault> {
        // Names that the proxy resolves cannot be checked here, only addresses.
        if scope == AddressScope::Public && !url.may_be_public() {
            return Err(inward(url.host_and_port()));
        }
        let to_proxy = self.connect_to(proxy, deadline);
        let connection = to_proxy.map_err(|fault| fault.from(proxy.to_string()))?;
        match url.scheme {
            Scheme::Http => Ok(connection),
            Scheme::Https => tunnel(connection, proxy, url, &mut Pace::new(&self.options, deadline)),
        }
    }

    /// A connection to the proxy itself, which may lie anywhere: the environment names it.
    fn connect_to(&self, proxy: &Proxy, deadline: Deadline<'_>) -> Result<Connection, Fault> {
        let Url {
            scheme, host, port, ..
        } = &proxy.url;
        let connection = Connection::plain(dial(host, *port, AddressScope::Anywhere, deadline)?);
        match scheme {
            Scheme::Http => Ok(connection),
            Scheme::Https => connection.secured(host, &self.tls()?, deadline),
        }
    }

    fn tls(&self) -> Result<Arc<ClientConfig>, Fault> {
        let ca_file: Option<&PathBuf> = self.options.ca_file.as_ref();
        let made = self
            .tls
            .get_or_init(|| trusting(ca_file.map(PathBuf::as_path)).map_err(|fault| fault.to_string()));
        made.clone().map_err(|why| FaultKind::Option(why).into())
    }

    /// What a server may say again of all that was sent to it, or to a proxy before it.
    pub(crate) fn add_secrets(&self, secrets: &mut Secrets, url: &Url) {
        secrets.add_options(&self.options);
        if let Ok(Some(proxy)) = self.proxies.find(url) {
            secrets.add_url(&proxy.url);
        }
    }

    /// Whether requests for `url` go through a proxy that can read them.
    pub(crate) fn is_overheard(&self, url: &Url) -> Result<bool, Fault> {
        Ok(url.scheme == Scheme::Http && self.proxies.find(url)?.is_some())
    }
}

/// Has the proxy connect us to the host of `url`. It is told nothing else.
fn tunnel(
    mut connection: Connection,
    proxy: &Proxy,
    url: &Url,
    pace: &mut Pace<'_>,
) -> Result<Connection, Fault> {
    let host = url.host_and_port();
    let to_itself = [("Host".to_owned(), host.clone())];
    let head = render_head("CONNECT", &host, to_itself.iter().chain(&proxy.authorization()))?;
    connection.send(head.as_bytes(), pace)?;
    let head = Head::read(&mut connection, pace)?;
    if (200..300).contains(&head.status) && connection.buffered().is_empty() {
        return Ok(connection);
    }
    let mut secrets = Secrets::default();
    secrets.add_url(&proxy.url);
    Err(Fault::new(FaultKind::Status {
        status: head.status,
        reason: secrets.removed(&Escaped(&head.reason).to_string()),
        said: Some("the proxy says so".to_owned()),
        wait: None,
        region: None,
    })
    .from(proxy.to_string()))
}

/// Sends the request and reads the head of the answer.
fn exchange(
    connection: &mut Connection,
    request: &HttpRequest<'_>,
    proxy: Option<&Proxy>,
    pace: &mut Pace<'_>,
) -> Result<Head, Fault> {
    let through = proxy.filter(|_| request.url.scheme == Scheme::Http);
    let more: Vec<_> = through.and_then(Proxy::authorization).into_iter().collect();
    let bytes = request.render(through.is_some(), &more)?;
    connection.send(&bytes, pace)?;
    Head::read(connection, pace)
}

impl Response {
    fn new(head: Head, origin: SecurityOrigin, connection: Connection) -> Result<Response, Fault> {
        Ok(Response {
            framing: head.framing()?,
            head,
            origin,
            connection,
        })
    }

    /// Reads bytes of the body. None means that it has ended, or the connection has.
    pub(crate) fn read(&mut self, dest: &mut [u8], pace: &mut Pace<'_>) -> Result<usize, Fault> {
        self.framing.read(&mut self.connection, dest, pace)
    }

    /// Reads all of the body, if it has at most `most` bytes; else so many of them.
    pub(crate) fn read_some(&mut self, most: usize, pace: &mut Pace<'_>) -> Result<Vec<u8>, Fault> {
        let mut body = Vec::new();
        while body.len() < most {
            let from = body.len();
            body.resize(most.min(from + (64 << 10)), 0);
            let count = self.read(&mut body[from..], pace)?;
            body.truncate(from + count);
            if count == 0 {
                break;
            }
        }
        Ok(body)
    }
}
