//! The proxies in the environment.

use std::fmt;
use std::net::Ipv6Addr;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

use crate::environment::Environment;
use crate::fault::{Fault, Result};
use crate::network::Network;
use crate::url::{Scheme, Url, decode};

/// The variables that name proxies, as curl reads them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Proxies {
    http: Option<String>,
    https: Option<String>,
    all: Option<String>,
    /// Hosts that are connected to directly.
    except: Vec<Except>,
}

/// A word of `no_proxy`.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Except {
    All,
    /// The URLs with an address in this network. Names are not resolved for this.
    Network(Network),
    /// A host, or a domain with its subdomains; at every port, or at one.
    Host(String, Option<u16>),
}

/// A proxy. `Display` omits its user and password.
#[derive(Clone, Debug)]
pub(crate) struct Proxy {
    /// With the scheme `https` if the connection to the proxy uses TLS.
    pub(crate) url: Url,
}

impl Proxies {
    pub(crate) fn of(environment: Environment<'_>) -> Proxies {
        // The first that is set counts, even if it is empty.
        let either = |small: &str, large: &str| {
            let value = (environment.0)(small).or_else(|| (environment.0)(large))?;
            Some(value).filter(|value| !value.is_empty())
        };
        let except = either("no_proxy", "NO_PROXY").unwrap_or_default();
        let words = except.split([',', ' ', '\t']).filter(|word| !word.is_empty());
        Proxies {
            // Not `HTTP_PROXY`, which web servers set to the header `Proxy` of a request.
            http: environment.get(&["http_proxy"]),
            https: either("https_proxy", "HTTPS_PROXY"),
            all: either("all_proxy", "ALL_PROXY"),
            except: words.map(Except::parse).collect(),
        }
    }

    /// Return the proxy for `url`, if there is one.
    pub(crate) fn find(&self, url: &Url) -> Result<Option<Proxy>> {
        let named = match url.scheme {
            Scheme::Http => &self.http,
            Scheme::Https => &self.https,
        };
        let named = named.as_ref().or(self.all.as_ref());
        let Some(named) = named.filter(|_| !self.except.iter().any(|except| except.matches(url))) else {
            return Ok(None);
        };
        // Without the value, which may contain a password.
        let why = "the environment names a proxy that is not http:// or https://, such as one of SOCKS: name \
                   another one, or add the host to no_proxy";
        Proxy::parse(named).map(Some).ok_or_else(|| Fault::option(why))
    }
}

impl Proxy {
    fn parse(text: &str) -> Option<Proxy> {
        let (scheme, rest) = text.split_once("://").unwrap_or(("http", text));
        let url = Url::parse(&format!("{scheme}://{rest}")).ok()?;
        Some(Proxy { url })
    }

    /// Return the header with the user and the password of the proxy.
    pub(crate) fn authorization(&self) -> Option<(String, String)> {
        let user = self.url.user.as_deref()?;
        Some(("Proxy-Authorization".to_owned(), basic(user)))
    }
}

impl fmt::Display for Proxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}", self.url.scheme.name(), self.url.host_and_port())
    }
}

/// Return the value of a header with the user and the password of a URL.
pub(crate) fn basic(user: &str) -> String {
    let (name, password) = user.split_once(':').unwrap_or((user, ""));
    let decoded = format!("{}:{}", decode(name), decode(password));
    format!("Basic {}", STANDARD.encode(decoded))
}

impl Except {
    /// Parse a word in all forms that curl, requests or Go accept: `host`, `.domain`, `host:port`, `[::1]:port`,
    /// `10.0.0.0/8`, `*`.
    fn parse(word: &str) -> Except {
        if word == "*" {
            return Except::All;
        }
        if let Some(network) = Network::parse(word) {
            return Except::Network(network);
        }
        let is_bare_v6 = word.parse::<Ipv6Addr>().is_ok();
        let at_port = || {
            let (name, port) = word.rsplit_once(':').filter(|_| !is_bare_v6)?;
            Some((name, Some(port.parse().ok()?)))
        };
        let (name, port) = at_port().unwrap_or((word, None));
        let name = name.trim_start_matches(['[', '.']).trim_end_matches([']', '.']);
        Except::Host(name.to_ascii_lowercase(), port)
    }

    fn matches(&self, url: &Url) -> bool {
        match (self, url.address()) {
            (Except::All, _) => true,
            (Except::Network(network), address) => address.is_some_and(|address| network.contains(address)),
            (Except::Host(_, Some(port)), _) if *port != url.port => false,
            // An address has no subdomains.
            (Except::Host(name, _), Some(address)) => name.parse() == Ok(address),
            (Except::Host(name, _), None) => {
                let host = url.host.trim_end_matches('.');
                let rest = host.strip_suffix(name.as_str()).filter(|_| !name.is_empty());
                rest.is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn proxies(pairs: &[(&str, &str)]) -> Proxies {
        Proxies::of(Environment(&|name| {
            let pair = pairs.iter().find(|pair| pair.0 == name)?;
            Some(pair.1.to_owned())
        }))
    }

    fn found(proxies: &Proxies, url: &str) -> Option<String> {
        let proxy = proxies.find(&Url::parse(url).unwrap()).unwrap();
        proxy.map(|proxy| proxy.url.authority())
    }

    #[test]
    fn the_variables_have_the_same_meaning_as_for_curl() {
        let all = proxies(&[
            ("http_proxy", "http://plain:1"),
            ("HTTPS_PROXY", "safe:2"),
            ("no_proxy", "internal, .corp.example,10.0.0.1"),
        ]);
        assert_eq!(found(&all, "http://h/").as_deref(), Some("plain:1"));
        assert_eq!(found(&all, "https://h/").as_deref(), Some("safe:2"));
        for host in [
            "internal",
            "a.internal",
            "corp.example",
            "x.corp.example",
            "10.0.0.1",
        ] {
            assert_eq!(found(&all, &format!("https://{host}/")), None, "{host}");
        }
        assert!(found(&all, "https://notcorp.example/").is_some());
        assert_eq!(found(&all, "https://corp.example./"), None);
        for (except, without, with) in [
            ("h:8080", &["h:8080", "a.h:8080"][..], &["h", "h:80"][..]),
            (
                "127.0.0.0/8",
                &["127.0.0.1", "127.255.0.1:9"],
                &["128.0.0.1", "127.example"],
            ),
            ("fd00::/8", &["[fd00::1]"], &["[fe80::1]", "10.0.0.1"]),
            ("::1", &["[::1]", "[::1]:9"], &["[::2]"]),
            ("[::1]", &["[::1]", "[::1]:9"], &["[::2]"]),
            ("[::1]:9", &["[::1]:9"], &["[::1]"]),
            ("0:0:0:0:0:0:0:1", &["[::1]"], &[]),
            ("10.0.0.1:81", &["10.0.0.1:81"], &["10.0.0.1"]),
            ("0.0.1", &[], &["10.0.0.1"]),
            ("a b,\tc", &["a", "b", "c"], &["d"]),
            ("10.0.0.0/33,:80,h:99999999,/8,.", &[], &["10.0.0.0", "x:80", "h"]),
        ] {
            let proxies = proxies(&[("http_proxy", "p:1"), ("no_proxy", except)]);
            for host in without {
                assert_eq!(
                    found(&proxies, &format!("http://{host}/")),
                    None,
                    "{except} {host}"
                );
            }
            for host in with {
                assert!(
                    found(&proxies, &format!("http://{host}/")).is_some(),
                    "{except} {host}"
                );
            }
        }
        assert_eq!(found(&proxies(&[("HTTP_PROXY", "evil:1")]), "http://h/"), None);
        assert_eq!(
            found(&proxies(&[("all_proxy", "p:1")]), "http://h/").as_deref(),
            Some("p:1")
        );
        assert_eq!(
            found(&proxies(&[("all_proxy", "p:1"), ("no_proxy", "*")]), "http://h/"),
            None
        );
    }

    #[test]
    fn unsupported_proxies_are_rejected_without_their_password() {
        for named in [
            "socks4://me:hunter2@p:1",
            "socks5://me:hunter2@p",
            "SOCKS5h://me:hunter2@p",
            "https://me:hunter2@p:99999",
            "ftp://hunter2",
        ] {
            let all = proxies(&[("https_proxy", named)]);
            let fault = all.find(&Url::parse("https://h/").unwrap()).unwrap_err();
            assert_eq!(fault.code(), "storage-option");
            assert!(!fault.to_string().contains("hunter2"));
        }
    }

    #[test]
    fn proxies_have_the_default_port_of_their_scheme() {
        for (named, shown) in [
            ("p", "http://p:80"),
            ("p:1", "http://p:1"),
            ("https://me:hunter2@p", "https://p:443"),
            ("HTTP://me@[::1]:9", "http://[::1]:9"),
        ] {
            assert_eq!(Proxy::parse(named).unwrap().to_string(), shown);
        }
    }

    #[test]
    fn passwords_are_decoded_before_they_are_encoded() {
        assert_eq!(
            basic("me:p%40ss"),
            format!("Basic {}", STANDARD.encode("me:p@ss"))
        );
    }
}
