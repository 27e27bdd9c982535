// The two panes: a splitter between the tree and the details, and on narrow screens a button that shows the tree.

import { button, h } from "./dom.js";

const KEY = "ingot-side";
/** Percent of the width that the tree takes. */
const USUAL = 45;
const [LEAST, MOST] = [20, 75];
const STEP = 2;

/** The panes with a splitter that follows the pointer and the arrow keys; a double click puts it back. */
export function panes(side, screen) {
  let share = stored();
  const splitter = h("div", {
    class: "splitter",
    role: "separator",
    tabindex: "0",
    "aria-orientation": "vertical",
    "aria-label": "Width of the tree",
    "aria-controls": side.id,
    "aria-valuemin": String(LEAST),
    "aria-valuemax": String(MOST),
  });
  const place = h("div", { class: "panes" }, side, screen);
  side.append(splitter);
  const put = (percent) => {
    share = Math.max(LEAST, Math.min(MOST, percent));
    place.style.setProperty("--side", `${share}%`);
    splitter.setAttribute("aria-valuenow", String(Math.round(share)));
  };
  const end = (percent) => {
    put(percent);
    store(share);
  };
  put(share);
  splitter.addEventListener("pointerdown", (event) => {
    splitter.setPointerCapture(event.pointerId);
    splitter.classList.add("held");
    event.preventDefault();
  });
  splitter.addEventListener("pointermove", (event) => {
    if (!splitter.hasPointerCapture(event.pointerId)) return;
    const box = place.getBoundingClientRect();
    put((100 * (event.clientX - box.left)) / box.width);
  });
  splitter.addEventListener("lostpointercapture", () => {
    splitter.classList.remove("held");
    store(share);
  });
  splitter.addEventListener("dblclick", () => end(USUAL));
  splitter.addEventListener("keydown", (event) => {
    const to = {
      ArrowLeft: share - STEP,
      ArrowRight: share + STEP,
      Home: LEAST,
      End: MOST,
      Enter: USUAL,
    }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    end(to);
  });
  return place;
}

/** The button of narrow screens, which show either the tree or the details. */
export function toggle(place) {
  const pressed = button(
    "Tensors",
    () => choose(place, pressed, !place.classList.contains("choosing")),
    {
      class: "toggle",
      "aria-expanded": "false",
    },
  );
  return pressed;
}

/** Shows the tree or the details, if there is room for only one. */
export function choose(place, pressed, isChoosing) {
  place.classList.toggle("choosing", isChoosing);
  pressed.setAttribute("aria-expanded", String(isChoosing));
}

function stored() {
  try {
    const share = Number(localStorage.getItem(KEY));
    return share >= LEAST && share <= MOST ? share : USUAL;
  } catch {
    return USUAL;
  }
}

function store(share) {
  try {
    localStorage.setItem(KEY, String(share));
  } catch {
    // A page of one file may have no storage.
  }
}
