// Histograms and pictures, drawn on canvases that also contain their numbers as text.

import { h, select } from "./dom.js";
import { HAS_INFINITY, HAS_NAN } from "./picture.js";
import { many, real, whole } from "./wording.js";

/** Stops of colour scales that colour-blind people can read: diverging around zero, and from low to high. */
const DIVERGING = [[5, 48, 97], [67, 147, 195], [247, 247, 247], [214, 96, 77], [103, 0, 31]];
/** With a dark middle, for dark pages. */
const DIVERGING_DARK = [[158, 176, 255], [58, 128, 163], [17, 17, 20], [162, 72, 46], [255, 173, 173]];
const RISING = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];
const NAN_COLOUR = [255, 0, 200];
const INFINITY_COLOUR = [255, 150, 0];

function at(stops, part) {
  const place = Math.max(0, Math.min(1, part)) * (stops.length - 1);
  const low = Math.min(stops.length - 2, Math.floor(place));
  return stops[low].map((from, channel) => from + (stops[low + 1][channel] - from) * (place - low));
}

function colourOf(element, name) {
  return getComputedStyle(element).getPropertyValue(name).trim();
}

/** A canvas that is redrawn when its width or the colours of the page change. */
function canvas(label, height, draw) {
  const element = h("canvas", { role: "img", "aria-label": label });
  const redraw = () => {
    const width = element.clientWidth;
    if (width === 0) return;
    const ratio = devicePixelRatio || 1;
    [element.width, element.height] = [width * ratio, height * ratio];
    const context = element.getContext("2d");
    context.scale(ratio, ratio);
    draw(context, width, height, element);
  };
  element.style.height = `${height}px`;
  new ResizeObserver(redraw).observe(element);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  return element;
}

/**
 * A histogram, or two with one range. `series` have `bins` of equal parts of it. `scale` is `linear` or `log`.
 */
export function histogram(series, scale = "linear") {
  // A report has statistics of single tensors, without ranges.
  const { min: low, max: high } = series[0].range ?? { min: Number(series[0].min), max: Number(series[0].max) };
  const most = Math.max(1, ...series.flatMap(({ bins }) => [...bins]));
  const height = (
    number,
  ) => (number === 0 ? 0 : scale === "log" ? (1 + Math.log(number)) / (1 + Math.log(most)) : number / most);
  const label = `Histogram from ${real(low)} to ${real(high)}; the fullest of ${series[0].bins.length} bins has ${
    many(most, "value")
  }`;
  const drawn = canvas(label, 180, (context, width, tall, element) => {
    const x = (value) => (high === low ? 0 : ((value - low) / (high - low)) * width);
    const fill = (bins, colour) => {
      const step = width / bins.length;
      context.fillStyle = colourOf(element, colour);
      bins.forEach((value, bin) => {
        // No value at all must look different from few.
        const bar = value === 0 ? 0 : Math.max(1, height(value) * (tall - 4));
        context.fillRect(bin * step, tall - bar, Math.max(1, step - (step > 3 ? 1 : 0)), bar);
      });
    };
    const [one, two] = series.map(({ bins }) => bins);
    fill(one, "--one");
    if (two) {
      fill(two, "--two");
      fill(one.map((value, bin) => Math.min(value, two[bin])), "--both");
    }
    if (low < 0 && high > 0) {
      context.fillStyle = colourOf(element, "--ink");
      context.fillRect(x(0), 0, 1, tall);
    }
  });
  return h(
    "figure",
    {},
    h("div", { class: "axis" }, `highest bar: ${many(most, "value")}`),
    drawn,
    h(
      "figcaption",
      { class: "axis" },
      h("span", {}, real(low)),
      h("span", {}, "value"),
      h("span", {}, real(high)),
    ),
  );
}

/** A histogram with a choice of its scale, which the state keeps. */
export function scaled(series, state) {
  const place = h("div", {});
  const draw = (scale) => place.replaceChildren(histogram(series, scale));
  const scale = state.scale === "log" ? "log" : "linear";
  draw(scale);
  const choose = (value) => {
    state.keep({ scale: value === "log" ? value : null });
    draw(value);
  };
  return h("div", {}, select("Scale", [["linear", "linear"], ["log", "logarithmic"]], scale, choose), place);
}

/** The range of colours: covers the given share of all numbers, the middle ones. */
export function domainOf({ values }, part) {
  const sorted = values.filter(Number.isFinite).sort();
  if (sorted.length === 0) return [0, 0];
  const cut = Math.floor(((1 - part) / 2) * (sorted.length - 1));
  return [sorted[cut], sorted[sorted.length - 1 - cut]];
}

/** A picture as a canvas, with the legend of its colours. `choose(row, rows, column, columns)` is called with a dragged
 * window. */
export function heatmap(picture, { domain, label, choose = null, isSigned = false, unit = "value" }) {
  const { values, marks, rows, columns, seen } = picture;
  let [low, high] = domain;
  // A difference has a zero, even if all are of one sign.
  const isDiverging = isSigned || (low < 0 && high > 0);
  if (isDiverging) [low, high] = [-Math.max(-low, high), Math.max(-low, high)];
  const isDark = matchMedia("(prefers-color-scheme: dark)").matches;
  const stops = isDiverging ? (isDark ? DIVERGING_DARK : DIVERGING) : RISING;
  const isRange = low < high;
  const image = new ImageData(Math.max(1, columns), Math.max(1, rows));
  let [nans, infinities] = [0, 0];
  values.forEach((value, cell) => {
    if (marks[cell] & HAS_NAN) nans++;
    if (marks[cell] & HAS_INFINITY) infinities++;
    const colour = marks[cell] & HAS_NAN
      ? NAN_COLOUR
      : marks[cell] & HAS_INFINITY
      ? INFINITY_COLOUR
      : at(stops, high === low ? 0.5 : (value - low) / (high - low));
    image.data.set([...colour, 255], 4 * cell);
  });
  const element = h("canvas", { role: "img", class: "heat", "aria-label": label });
  [element.width, element.height] = [image.width, image.height];
  element.getContext("2d").putImageData(image, 0, 0);
  const aspect = Math.max(1 / 6, Math.min(1, seen.rows / seen.columns));
  element.style.aspectRatio = `1 / ${aspect}`;
  if (choose) dragging(element, seen, choose);
  const ramp = canvas(`Colours from ${real(low)} to ${real(high)}`, 12, (context, width) => {
    for (let x = 0; x < width; x++) {
      context.fillStyle = `rgb(${at(stops, x / width).map(Math.round)})`;
      context.fillRect(x, 0, 1, 12);
    }
  });
  ramp.classList.add("ramp");
  const swatch = (colour, text) => h("span", { class: `swatch ${colour}` }, text);
  const ends = (name, first, length) =>
    [`${name} ${whole(first)}`, whole(first + length - 1)].map((text) => h("span", {}, text));
  return h(
    "figure",
    { class: "framed" },
    h("div", { class: "axis across" }, ends("column", seen.column, seen.columns)),
    h("div", { class: "axis down" }, ends("row", seen.row, seen.rows)),
    element,
    isRange ? ramp : null,
    h(
      "figcaption",
      { class: "axis ramp" },
      isRange ? h("span", {}, real(low)) : null,
      isRange ? h("span", {}, unit) : values.some(Number.isFinite) ? h("span", {}, `${unit} ${real(high)}`) : null,
      nans > 0 ? swatch("nan", `NaN in ${many(nans, "cell")}`) : null,
      infinities > 0 ? swatch("infinite", `infinite in ${many(infinities, "cell")}`) : null,
      isRange ? h("span", {}, real(high)) : null,
    ),
  );
}

function dragging(element, seen, choose) {
  const place = (event) => {
    const box = element.getBoundingClientRect();
    const part = (value, length) => Math.max(0, Math.min(1, value / length));
    return [part(event.clientY - box.top, box.height), part(event.clientX - box.left, box.width)];
  };
  let start = null;
  element.addEventListener("pointerdown", (event) => {
    start = place(event);
    element.setPointerCapture(event.pointerId);
  });
  element.addEventListener("pointerup", (event) => {
    if (start === null) return;
    const [from, upto] = [start, place(event)];
    start = null;
    const [top, bottom] = [from[0], upto[0]].sort((a, b) => a - b);
    const [left, right] = [from[1], upto[1]].sort((a, b) => a - b);
    // A click is not a window: it selects a quarter around it.
    const isClick = bottom - top < 0.01 && right - left < 0.01;
    const span = isClick
      ? [Math.max(0, top - 0.25), 0.5, Math.max(0, left - 0.25), 0.5]
      : [top, bottom - top, left, right - left];
    choose(
      seen.row + Math.floor(span[0] * seen.rows),
      Math.max(1, Math.ceil(span[1] * seen.rows)),
      seen.column + Math.floor(span[2] * seen.columns),
      Math.max(1, Math.ceil(span[3] * seen.columns)),
    );
  });
}
