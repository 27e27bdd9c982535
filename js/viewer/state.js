// The state of the page, in the fragment of the address, so that every view is a link.
//
//     a, b   the models: addresses, where they were opened by address
//     go     the screen: overview, map, tensor, compare
//     t      the tensor                    view   what of it: statistics, picture, values, code
//     s      axes and fixed numbers: `0,:,:` — the first `:` runs down, the second across
//     w      the window of the picture or of the values: first row, rows, first column, columns
//     at     the first NaN or infinite value, which the values point out: `nan,3,17`
//     q      raw, where quantised weights are wanted as they are stored
//     find   the filter of the tree       sort   its order
//     scale  log, for histograms with a logarithmic scale

const KEYS = ["a", "b", "go", "t", "view", "s", "w", "at", "q", "find", "sort", "scale"];
const TOKEN = "ingot-token";

export class State extends EventTarget {
  a = null;
  b = null;
  go = null;
  t = null;
  view = null;
  s = null;
  w = null;
  at = null;
  q = null;
  find = null;
  sort = null;
  scale = null;

  constructor() {
    super();
    this.#read();
    addEventListener("hashchange", () => {
      this.#read();
      this.dispatchEvent(new Event("change"));
    });
  }

  #read() {
    const parameters = new URLSearchParams(location.hash.slice(1));
    this.token = parameters.get("token");
    for (const key of KEYS) this[key] = parameters.get(key);
  }

  /** Goes to a state. Fields that are not named stay; null removes one. `quiet` adds no entry to the history. */
  set(changes, quiet = false) {
    Object.assign(this, changes);
    this.#write(quiet ? "replaceState" : "pushState");
    this.dispatchEvent(new Event("change"));
  }

  /** Keeps fields in the address that the screen shows already. */
  keep(changes) {
    Object.assign(this, changes);
    this.#write("replaceState");
  }

  #write(how) {
    const pairs = KEYS.map((key) => [key, this[key]]).filter(([, value]) => value !== null && value !== undefined);
    try {
      history[how](null, "", `#${new URLSearchParams(pairs)}`);
    } catch {
      // A page in a frame of a notebook may have no address.
    }
  }

  /** The token of the address, or the one that this tab keeps. */
  findToken() {
    if (this.token !== null) return this.token;
    try {
      return sessionStorage.getItem(TOKEN);
    } catch {
      // In a frame of another site, browsers may forbid storage.
      return null;
    }
  }

  /** Removes the token from the address, and keeps it in this tab. */
  hideToken() {
    if (this.token === null) return;
    this.#write("replaceState");
    try {
      sessionStorage.setItem(TOKEN, this.token);
    } catch {
      // As above.
    }
  }
}
