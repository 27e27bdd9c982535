// What is looked at, in the fragment of the address, so that every look is a link.
//
//     a, b   the models: addresses, where they were opened by address
//     go     the screen: overview, map, tensor, compare
//     t      the tensor                    view   what of it: statistics, picture, values, code
//     s      axes and fixed numbers: `0,:,:` — the first `:` runs down, the second across
//     w      the window of the picture or of the values: first row, rows, first column, columns
//     q      raw, where quantised weights are wanted as they are stored
//     find   the filter of the tree       sort   its order

const KEYS = ["a", "b", "go", "t", "view", "s", "w", "q", "find", "sort"];

export class State extends EventTarget {
  constructor() {
    super();
    this.#read();
    addEventListener("hashchange", () => {
      this.#read();
      this.dispatchEvent(new Event("change"));
    });
  }

  #read() {
    const given = new URLSearchParams(location.hash.slice(1));
    this.token = given.get("token");
    for (const key of KEYS) this[key] = given.get(key);
  }

  /** Goes there. What is not named stays; null takes away. `quiet` makes no step that Back goes to. */
  set(changes, quiet = false) {
    Object.assign(this, changes);
    history[quiet ? "replaceState" : "pushState"](null, "", this.link());
    this.dispatchEvent(new Event("change"));
  }

  /** The address of this look with `changes`. */
  link(changes = {}) {
    const pairs = KEYS.map((key) => [key, { ...this, ...changes }[key]]).filter(([, value]) => value !== null && value !== undefined);
    return `#${new URLSearchParams(pairs)}`;
  }

  /** Takes the token out of the address; it stays with this tab. */
  takeToken() {
    if (this.token !== null) {
      sessionStorage.setItem("ingot-token", this.token);
      history.replaceState(null, "", this.link());
    }
    return sessionStorage.getItem("ingot-token");
  }
}
