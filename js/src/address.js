// Addresses: their validation, `hf://` addresses, and the hosts that belong to the public internet.

import { escapeName, quoteName, SafetensorError } from "./errors.js";

/** An address without the parts that may be secret: user, password, query and fragment. */
export function showUrl(url) {
  return url.origin === "null" ? url.protocol : `${url.origin}${url.pathname}`;
}

/** Parses the address in `text`, which may be relative to the page. */
export function parseUrl(text) {
  const base = globalThis.document?.baseURI ?? globalThis.location?.href;
  let url;
  try {
    url = new URL(text, base);
  } catch {
    throw new SafetensorError(`not a URL: ${quoteName(String(text))}`, { code: "invalid-url" });
  }
  const reason = urlFault(url, String(text));
  if (reason !== null) {
    throw new SafetensorError(`${escapeName(showUrl(url))}: ${reason}`, { code: "invalid-url", path: showUrl(url) });
  }
  return url;
}

function urlFault(url, text) {
  if (url.protocol !== "http:" && url.protocol !== "https:") return "expected a URL of HTTP";
  if (url.username !== "" || url.password !== "") return "a URL must hold no password — give `headers`";
  // The parser drops line breaks silently.
  if (/[\0-\x20\x7f]/.test(text)) return "a URL must hold no spaces and no control characters";
  return null;
}

// --- Addresses of the Hub ---

export const HUB = "https://huggingface.co";

/** `hf://[models/|datasets/|spaces/]owner/name[@revision][/path]`; without a path, the address of the repository. */
const HUB_ADDRESS = new RegExp(
  "^hf://(?:(models|datasets|spaces)/)?([^/@]+/[^/@]+|[^/@]+(?=$|@[^/]+$))" +
    "(?:@(refs/(?:pr|convert)/[^/]+|[^/]+))?(?:/(.*))?$",
);

/** Returns the URL of a Hub address; the URL of a repository ends with a slash. */
export function hubUrl(address, options = {}) {
  const [, kind = "models", repo, revision = "main", path = ""] = HUB_ADDRESS.exec(address) ?? refuseAddress(address);
  // A revision may be given raw or encoded; it is one part of the URL, including its slashes.
  const version = unescaped(revision) ?? refuseAddress(address);
  const parts = [...repo.split("/"), version, ...path.split("/")];
  // A URL cannot spell these: they would lead elsewhere.
  if (parts.some((part) => part === "." || part === "..")) refuseAddress(address);
  const [type, hub] = [kind === "models" ? "" : `${kind}/`, options.hub ?? HUB];
  const [owned, file] = [repo, path].map((text) => text.split("/").map(encodeURIComponent).join("/"));
  return new URL(`${hub.replace(/\/+$/, "")}/${type}${owned}/resolve/${encodeURIComponent(version)}/${file}`);
}

/** Percent-decodes `text`; null if the result is not UTF-8. */
export function unescaped(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return null;
  }
}

/** @returns {never} */
function refuseAddress(address) {
  const reason = `expected hf://owner/name[@revision][/path], found ${quoteName(address)}`;
  throw new SafetensorError(reason, { code: "invalid-url" });
}

export function urlOf(source, settings) {
  if (typeof source === "string" && source.startsWith("hf://")) return hubUrl(source, settings);
  return parseUrl(source);
}

// --- Networks ---

/**
 * Networks that no server may redirect a client to, with the reason. Of IPv6, only `2000::/3` is assigned to the public
 * internet: all other addresses are rejected. ingot has the same table in Rust, and tests compare both with each other
 * and with Python's `ipaddress`.
 */
const SPECIAL = [
  ["0.0.0.0/8", "this machine"],
  ["10.0.0.0/8", "private"],
  ["100.64.0.0/10", "private, behind the NAT of a provider"],
  ["127.0.0.0/8", "loopback"],
  ["168.63.129.16/32", "the services of a machine of Azure"],
  ["169.254.0.0/16", "link-local, with the services of a machine of most clouds"],
  ["172.16.0.0/12", "private"],
  ["192.0.0.0/24", "protocols"],
  ["192.0.2.0/24", "documentation"],
  ["192.88.99.0/24", "relays of 6to4, given up"],
  ["192.168.0.0/16", "private"],
  ["198.18.0.0/15", "benchmarks of networks"],
  ["198.51.100.0/24", "documentation"],
  ["203.0.113.0/24", "documentation"],
  ["224.0.0.0/3", "multicast and reserved"],
  ["::/3", "loopback, embedded IPv4, local NAT64, discarded, SRv6"],
  ["2001::/23", "protocols, with the tunnels of Teredo"],
  ["2001:db8::/32", "documentation"],
  ["2002::/16", "tunnels of 6to4"],
  ["3fff::/20", "documentation"],
  ["4000::/2", "reserved, and SRv6"],
  ["8000::/1", "reserved, unique local, link-local, site-local, multicast"],
];

/** Prefixes of IPv6 addresses with an IPv4 address in the last 32 bits: mapped, and behind NAT64. */
const EMBEDDING = ["::ffff:0:0/96", "64:ff9b::/96"];

/** Whether a host, as the URL parser spells it, has a public name or address. */
export function isPublic(hostname) {
  if (/(?:^|\.)localhost\.?$/.test(hostname)) return false;
  const address = addressOf(hostname.replace(/^\[|\]$/g, ""));
  if (address === null) return true;
  const embeds = EMBEDDING.some((network) => isWithin(network, address));
  const meant = embeds ? { size: 32n, bits: address.bits & 0xffffffffn } : address;
  return !SPECIAL.some(([network]) => isWithin(network, meant));
}

function isWithin(network, { size, bits }) {
  const [first, count] = network.split("/");
  const of = addressOf(first);
  return of.size === size && (of.bits ^ bits) >> (size - BigInt(count)) === 0n;
}

/** Returns an address as a number, and its length in bits; null if the text is a name. */
function addressOf(text) {
  /** @type {(parts: string[], size: bigint) => bigint} */
  const number = (parts, size) => parts.reduce((bits, part) => (bits << size) | BigInt(part || 0), 0n);
  if (/^\d+\.\d+\.\d+\.\d+$/.test(text)) return { size: 32n, bits: number(text.split("."), 8n) };
  if (!text.includes(":")) return null;
  const [front, back] = text.split("::").map((side) => (side === "" ? [] : side.split(":")));
  const zeros = back === undefined ? [] : Array(8 - front.length - back.length).fill("0");
  const parts = [...front, ...zeros, ...(back ?? [])].map((part) => `0x${part}`);
  return { size: 128n, bits: number(parts, 16n) };
}
