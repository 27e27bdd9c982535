//! Sending requests over connections, which are kept for the next requests.

use std::process;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use ingot_format::briefly;
use rustls::ClientConfig;

use crate::environment::PROCESS;
use crate::fault::{Fault, FaultKind, Result};
use crate::http::connection::{Connection, trusting};
use crate::http::dial::{dial, inward};
use crate::http::message::{Framing, Head, HttpRequest, render_head};
use crate::http::pace::{Deadline, Pace};
use crate::http::proxy::{Proxies, Proxy};
use crate::options::RemoteOptions;
use crate::secrets::Secrets;
use crate::url::{Scheme, SecurityOrigin, Url};

/// Most idle connections to one host: as many as are in use at once.
const MAX_IDLE: usize = 96;

/// Largest body that is sent together with its head, in one packet if it fits.
const SMALL_NBYTES: usize = 16 << 10;

/// A client that sends requests. It connects, starts and reads nothing before the first request.
#[derive(Debug)]
pub struct Client {
    pub(crate) options: RemoteOptions,
    proxies: Proxies,
    tls: OnceLock<Result<Arc<ClientConfig>, String>>,
    idle: Mutex<Idle>,
}

#[derive(Debug, Default)]
struct Idle {
    /// The process that made the connections. A child of a fork has copies and must not use them.
    process: u32,
    connections: Vec<(SecurityOrigin, Connection)>,
}

/// A response whose body is still to be read.
#[derive(Debug)]
pub(crate) struct Response {
    pub(crate) head: Head,
    pub(crate) framing: Framing,
    origin: SecurityOrigin,
    connection: Connection,
}

impl Client {
    /// Return a client that uses the proxies in the environment.
    pub fn new(options: RemoteOptions) -> Client {
        Client::through(Proxies::of(PROCESS), options)
    }

    /// Return a client that uses no proxy.
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

    /// Return the options.
    #[must_use]
    pub fn options(&self) -> &RemoteOptions {
        &self.options
    }

    /// Send a request and read the head of its response. If `is_public`, the host must have a public address.
    pub(crate) fn send(
        &self,
        request: &HttpRequest<'_>,
        is_public: bool,
        deadline: Deadline<'_>,
    ) -> Result<Response> {
        let mut pace = if request.is_slow {
            Pace::patient(deadline)
        } else {
            Pace::new(&self.options, deadline)
        };
        let origin = request.url.origin();
        let proxy = self.proxies.find(request.url)?;
        if let Some(mut connection) = self.idle_connection(&origin) {
            let before = connection.received();
            match exchange(&mut connection, request, proxy.as_ref(), &mut pace) {
                Ok(head) => return Response::new(head, request.method, origin, connection),
                // The server closed the idle connection while the request was on its way.
                Err(fault)
                    if connection.received() == before && matches!(fault.kind(), FaultKind::Broken(_)) => {}
                Err(fault) => return Err(fault),
            }
        }
        let mut connection = self.connect(request.url, proxy.as_ref(), is_public, deadline)?;
        let head = exchange(&mut connection, request, proxy.as_ref(), &mut pace)?;
        Response::new(head, request.method, origin, connection)
    }

    /// Keep the connection of a response that was read to its end.
    pub(crate) fn give_back(&self, response: Response) {
        self.finish(response);
    }

    /// Keep the connection of a response that was read to its end, and return the head.
    pub(crate) fn finish(&self, response: Response) -> Head {
        let Response {
            head,
            framing,
            origin,
            connection,
        } = response;
        if framing.has_ended() && head.keeps_alive() {
            self.keep(origin, connection);
        }
        head
    }

    fn keep(&self, origin: SecurityOrigin, connection: Connection) {
        let Some(mut idle) = self.lock_idle() else {
            return;
        };
        let of_host = idle.connections.iter().filter(|kept| kept.0 == origin);
        if of_host.count() < MAX_IDLE {
            idle.connections.push((origin, connection));
        }
    }

    /// Close idle connections, except this many to each host.
    pub fn close_idle(&self, kept: usize) {
        let Some(mut idle) = self.lock_idle() else {
            return;
        };
        let mut origins: Vec<SecurityOrigin> = Vec::new();
        idle.connections.retain(|(origin, _)| {
            origins.push(origin.clone());
            origins.iter().filter(|seen| *seen == origin).count() <= kept
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
        let mut idle = briefly(&self.idle)?;
        if idle.process != process::id() {
            *idle = Idle::default();
            idle.process = process::id();
        }
        Some(idle)
    }

    fn connect(
        &self,
        url: &Url,
        proxy: Option<&Proxy>,
        is_public: bool,
        deadline: Deadline<'_>,
    ) -> Result<Connection> {
        let timeout = self.options.connect_timeout;
        // First, so that an unreadable CA file is reported even if the server cannot be reached.
        let tls = match url.scheme {
            Scheme::Http => None,
            Scheme::Https => Some(self.tls()?),
        };
        let soon = deadline.no_longer_than(timeout);
        let connection = match proxy {
            None => Connection::plain(dial(&url.host, url.port, is_public, soon)?),
            // The proxy resolves names, so only addresses can be checked here.
            Some(_) if is_public && !url.may_be_public() => return Err(inward(url.host_and_port())),
            Some(proxy) => {
                let to_proxy = self.connect_to(proxy, soon);
                let to_proxy = to_proxy.map_err(|fault| fault.at(proxy.to_string()))?;
                match url.scheme {
                    Scheme::Http => to_proxy,
                    Scheme::Https => tunnel(to_proxy, proxy, url, &mut Pace::new(&self.options, soon))?,
                }
            }
        };
        match tls {
            None => Ok(connection),
            Some(tls) => connection.secured(&url.host, &tls, deadline.no_longer_than(timeout)),
        }
    }

    /// Connect to the proxy itself. It may have any address, since the environment names it.
    fn connect_to(&self, proxy: &Proxy, deadline: Deadline<'_>) -> Result<Connection> {
        let (host, port) = (&proxy.url.host, proxy.url.port);
        let connection = Connection::plain(dial(host, port, false, deadline)?);
        match proxy.url.scheme {
            Scheme::Http => Ok(connection),
            Scheme::Https => connection.secured(host, &self.tls()?, deadline),
        }
    }

    fn tls(&self) -> Result<Arc<ClientConfig>> {
        let ca_file = self.options.ca_file.as_deref();
        let make = || trusting(ca_file).map_err(|fault| fault.to_string());
        self.tls.get_or_init(make).clone().map_err(Fault::option)
    }

    /// Add the secrets that requests for `url` send to the server and to a proxy.
    pub(crate) fn add_secrets(&self, secrets: &mut Secrets, url: &Url) {
        secrets.add_options(&self.options);
        if let Ok(Some(proxy)) = self.proxies.find(url) {
            secrets.add_url(&proxy.url);
        }
    }

    /// Whether requests for `url` use a proxy that can read them.
    pub(crate) fn is_overheard(&self, url: &Url) -> Result<bool> {
        Ok(url.scheme == Scheme::Http && self.proxies.find(url)?.is_some())
    }
}

/// Let the proxy connect to the host of `url`. The proxy learns nothing else.
fn tunnel(mut connection: Connection, proxy: &Proxy, url: &Url, pace: &mut Pace<'_>) -> Result<Connection> {
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
    let fault = head.refusal(Some("answer of the proxy")).without(&secrets);
    Err(fault.at(proxy.to_string()))
}

/// Send a request and read the head of its response.
fn exchange(
    connection: &mut Connection,
    request: &HttpRequest<'_>,
    proxy: Option<&Proxy>,
    pace: &mut Pace<'_>,
) -> Result<Head> {
    let through = proxy.filter(|_| request.url.scheme == Scheme::Http);
    let more: Vec<_> = through.and_then(Proxy::authorization).into_iter().collect();
    let head = request.render(through.is_some(), &more)?;
    let sent = if request.body.len() <= SMALL_NBYTES {
        connection.send(&[head.as_bytes(), request.body].concat(), pace)
    } else {
        let sent = connection.send(head.as_bytes(), pace);
        sent.and_then(|()| connection.send(request.body, pace))
    };
    match sent {
        Ok(()) => Head::read(connection, pace),
        // A server that refuses a request may answer and close before it has read the body.
        Err(fault) if matches!(fault.kind(), FaultKind::Broken(_)) => match Head::read(connection, pace) {
            Ok(head) if head.status >= 400 => Ok(head),
            _ => Err(fault),
        },
        Err(fault) => Err(fault),
    }
}

impl Response {
    fn new(head: Head, method: &str, origin: SecurityOrigin, connection: Connection) -> Result<Response> {
        let framing = head.framing()?;
        Ok(Response {
            // The length is the length of the body of a GET.
            framing: if method == "HEAD" {
                Framing::Length(0)
            } else {
                framing
            },
            head,
            origin,
            connection,
        })
    }

    /// Read bytes of the body. Zero means that the body or the connection has ended.
    pub(crate) fn read(&mut self, dest: &mut [u8], pace: &mut Pace<'_>) -> Result<usize> {
        self.framing.read(&mut self.connection, dest, pace)
    }

    /// Read the body up to `most` bytes.
    pub(crate) fn read_some(&mut self, most: usize, pace: &mut Pace<'_>) -> Result<Vec<u8>> {
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
