//! Networks of addresses, and which of them are not of the public internet.

use std::net::IpAddr;

/// The addresses with a common prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Network {
    first: IpAddr,
    bits: u32,
}

/// Networks that no server may redirect a client into, by IANA's registries of special addresses (RFC 6890), and why. In
/// IPv6 only `2000::/3` is assigned to the public internet, so that everything outside is refused. `js/src/address.js`
/// has the same table, and tests compare both with each other and with Python's `ipaddress`.
const SPECIAL: &[(&str, &str)] = &[
    ("0.0.0.0/8", "this machine"),
    ("10.0.0.0/8", "private"),
    ("100.64.0.0/10", "private, behind the NAT of a provider"),
    ("127.0.0.0/8", "loopback"),
    ("168.63.129.16/32", "services of Azure's machines"),
    (
        "169.254.0.0/16",
        "link-local, and services of most clouds' machines",
    ),
    ("172.16.0.0/12", "private"),
    ("192.0.0.0/24", "protocols"),
    ("192.0.2.0/24", "documentation"),
    ("192.88.99.0/24", "relays of 6to4, retired"),
    ("192.168.0.0/16", "private"),
    ("198.18.0.0/15", "benchmarks of networks"),
    ("198.51.100.0/24", "documentation"),
    ("203.0.113.0/24", "documentation"),
    ("224.0.0.0/3", "multicast and reserved"),
    ("::/3", "loopback, embedded IPv4, local NAT64, discarded, SRv6"),
    ("2001::/23", "protocols, with the tunnels of Teredo"),
    ("2001:db8::/32", "documentation"),
    ("2002::/16", "tunnels of 6to4"),
    ("3fff::/20", "documentation"),
    ("4000::/2", "reserved, and SRv6"),
    ("8000::/1", "reserved, unique local, link-local, multicast"),
];

/// Prefixes of IPv6 addresses that contain an IPv4 address in their last 32 bits: mapped addresses, and NAT64, by which
/// networks with IPv6 alone reach hosts with IPv4.
const EMBEDDING: &[&str] = &["::ffff:0:0/96", "64:ff9b::/96"];

/// Whether an address is one of the public internet, and not of this machine, its networks or its cloud.
pub(crate) fn is_public(address: IpAddr) -> bool {
    let embeds = |row: &&str| Network::parse(row).is_some_and(|network| network.contains(address));
    let address = match address {
        IpAddr::V6(v6) if EMBEDDING.iter().any(embeds) => {
            let [.., a, b, c, d] = v6.octets();
            [a, b, c, d].into()
        }
        address => address,
    };
    // A row that could not be parsed counts as containing every address.
    let excludes = |row: &str| Network::parse(row).is_some_and(|network| !network.contains(address));
    SPECIAL.iter().all(|row| excludes(row.0))
}

impl Network {
    /// Parse `10.0.0.0/8` or `fd00::/8`. Bits after the prefix may be set.
    pub(crate) fn parse(text: &str) -> Option<Network> {
        let (first, bits) = text.split_once('/')?;
        let first: IpAddr = first.parse().ok()?;
        let most = if first.is_ipv4() { 32 } else { 128 };
        let bits = bits.parse().ok().filter(|&bits| bits <= most)?;
        Some(Network { first, bits })
    }

    pub(crate) fn contains(&self, address: IpAddr) -> bool {
        let differing = leading_bits(self.first) ^ leading_bits(address);
        self.first.is_ipv4() == address.is_ipv4() && differing.leading_zeros() >= self.bits
    }
}

/// Return the bits of an address. IPv4 addresses fill the upper bits.
fn leading_bits(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(v4) => u128::from(v4.to_bits()) << 96,
        IpAddr::V6(v6) => v6.to_bits(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const VECTORS: &str = include_str!("../../../tests/vectors/addresses.json");

    #[test]
    fn is_public_agrees_with_the_vectors() {
        let vectors: Vec<(String, bool)> = serde_json::from_str(VECTORS).unwrap();
        assert!(vectors.len() > 100);
        for (address, expected) in vectors {
            assert_eq!(is_public(address.parse().unwrap()), expected, "{address}");
        }
    }

    #[test]
    fn a_network_contains_the_addresses_with_its_prefix() {
        let holds = |network: &str, address: &str| {
            Network::parse(network).map(|network| network.contains(address.parse().unwrap()))
        };
        for (network, address, expected) in [
            ("127.0.0.0/8", "127.255.255.255", Some(true)),
            ("127.0.0.0/8", "128.0.0.0", Some(false)),
            ("10.1.2.3/8", "10.9.9.9", Some(true)),
            ("10.1.2.3/32", "10.1.2.3", Some(true)),
            ("10.1.2.3/32", "10.1.2.2", Some(false)),
            ("0.0.0.0/0", "9.9.9.9", Some(true)),
            ("0.0.0.0/0", "::1", Some(false)),
            ("::/0", "::1", Some(true)),
            ("::/0", "1.1.1.1", Some(false)),
            ("fd00::/8", "fdff::1", Some(true)),
            ("::1/128", "::1", Some(true)),
            ("10.0.0.0/33", "10.0.0.0", None),
            ("10.0.0.0/", "10.0.0.0", None),
            ("10.0.0/8", "10.0.0.0", None),
            ("::/129", "::", None),
            ("h/8", "::", None),
        ] {
            assert_eq!(holds(network, address), expected, "{network} {address}");
        }
    }
}
