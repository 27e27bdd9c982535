"""Allowed targets of redirects: the tables in Rust and in JavaScript, compared with Python's `ipaddress`."""

from __future__ import annotations

import json
import re
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from pathlib import Path

ROOT = Path(__file__).parents[2]
VECTORS = ROOT / "tests" / "vectors" / "addresses.json"
TABLES = [ROOT / "crates/remote/src/network.rs", ROOT / "js/src/address.js"]

#: Differences from `ipaddress.is_global`, with reasons. Versions of Python differ here too.
REFUSED = {
    "168.63.129.16/32": "public by the registry, and inside of Azure its services for machines",
    "192.0.0.0/24": "two anycast addresses of protocols are global; no file lies there",
    "192.88.99.0/24": "relays of 6to4, which RFC 7526 gave up",
    "224.0.0.0/4": "ipaddress calls multicast global",
    "2001::/23": "some protocols in it are global since 3.11.10; no file lies there",
    "2002::/16": "6to4: ipaddress refuses it since 3.11.10",
    "3fff::/20": "documentation: ipaddress has it since 3.14",
    **dict.fromkeys(["::/3", "4000::/2", "8000::/1"], "ipaddress calls what is not given out global"),
}
#: IPv6 forms of an IPv4 address are judged as that address: NAT64, which IPv6-only networks need and
#: `ipaddress` always calls global, and mapped addresses, which it inspects since 3.13.
EMBEDDING = [IPv6Network("::ffff:0:0/96"), IPv6Network("64:ff9b::/96")]


def rows(path: Path, name: str) -> list[str]:
    """Return the networks of a table as written in the source."""
    (table,) = re.findall(
        rf"(?ms)^const {name}\b.*?\[$(.*?)^\];|^const {name}\b[^\n]*= &?(\[[^\n]*\]);", path.read_text()
    )
    return re.findall(r'"([0-9a-f.:]+/\d+)"', "".join(table))


def test_address_tables_are_equal() -> None:
    rust, javascript = ([rows(path, "SPECIAL"), rows(path, "EMBEDDING")] for path in TABLES)
    assert rust == javascript
    assert len(rust[0]) > 20
    assert [IPv6Network(row) for row in rust[1]] == EMBEDDING
    for row in rust[0]:
        assert str(ip_network(row)) == row


def meant(address: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    if any(address in network for network in EMBEDDING):
        return IPv4Address(int(address) & 0xFFFF_FFFF)
    return address


def sampled() -> list[IPv4Address | IPv6Address]:
    """Return the ends of every special network, their neighbours, and all addresses that embed them."""
    v4, v6 = set(), {int(IPv6Address(text)) for text in ("2606:4700::1111", "fd00:ec2::254", "100::1")}
    for row in [
        *rows(TABLES[0], "SPECIAL"),
        *rows(TABLES[0], "EMBEDDING"),
        "fc00::/7",
        "fe80::/10",
        "100::/64",
    ]:
        network = ip_network(row)
        first, last = int(network[0]), int(network[-1])
        some = {first - 1, first, first + 1, (first + last) // 2, last, last + 1}
        (v4 if isinstance(network, IPv4Network) else v6).update(some)
    # A grid of all other addresses, so that addresses outside the tables are tested too.
    v4 |= {n << 24 | 0x010101 for n in range(0, 256, 5)}
    v6 |= {n << 112 | 1 for n in range(0, 1 << 16, 0x0FFF)}
    fours = [IPv4Address(n) for n in sorted(v4) if 0 <= n < 1 << 32]
    sixes = [IPv6Address(n) for n in sorted(v6) if 0 <= n < 1 << 128]
    tunnelled = ["2002:{:x}::", "2001:0:{:x}::", "::ffff:0:{:x}:0"]
    dressed = [IPv6Address(int(network[0]) | int(four)) for network in EMBEDDING for four in fours]
    dressed += [IPv6Address(text.format(int(four) >> 16)) for text in tunnelled for four in fours[::7]]
    return [*fours, *sixes, *dressed]


def test_address_vectors_equal_ipaddress_with_listed_exceptions() -> None:
    vectors = {ip_address(text): is_public for text, is_public in json.loads(VECTORS.read_text())}
    assert list(vectors) == list(dict.fromkeys(sampled())), f"run {Path(__file__).name} to write them again"
    used = set()
    for address, is_public in vectors.items():
        four = meant(address)
        if is_public != four.is_global:
            assert not is_public, address
            reasons = [row for row in REFUSED if four in ip_network(row)]
            assert reasons, address
            used |= set(reasons)
        elif is_public != address.is_global:
            assert four != address
    # Differences that depend on the version of Python may be gone.
    assert used >= REFUSED.keys() - {"2001::/23", "2002::/16", "3fff::/20"}


def expected(address: IPv4Address | IPv6Address) -> bool:
    return not any(meant(address) in ip_network(row) for row in rows(TABLES[0], "SPECIAL"))


if __name__ == "__main__":
    lines = [json.dumps([str(address), expected(address)]) for address in dict.fromkeys(sampled())]
    VECTORS.write_text("[\n" + ",\n".join(lines) + "\n]\n")
