// Positions of the tensors: each file as a strip of its bytes, wrapped into lines.

import { escapeName } from "../src/errors.js";
import { button, h } from "./dom.js";
import { isMisaligned } from "./overview.js";
import { DTYPE_NAMES } from "./table.js";
import { nbytes, shortName, whole } from "./wording.js";

const LINES = 12;
const LINE = 20;
const MOST_FILES = 200;

export function fileMap(table, { openTensor }) {
  let first = 0;
  const files = table.files.slice(0, MOST_FILES).map((file) => {
    const strip = stripOf(table, file, first, openTensor);
    first += file.header.tensors.length;
    return strip;
  });
  const dtypes = [...new Set(table.tensors.map(({ dtype }) => dtype))];
  return h(
    "article",
    {},
    h("h2", {}, "File map"),
    h(
      "p",
      { class: "legend" },
      h("span", { class: "swatch header" }, "header"),
      dtypes.map((dtype) => h("span", { class: `swatch dtype-${DTYPE_NAMES.indexOf(dtype) % 8}` }, dtype)),
      table.tensors.some((_, number) => isMisaligned(table, number))
        ? h("span", { class: "swatch odd" }, "misaligned")
        : null,
    ),
    files,
    table.files.length > MOST_FILES ? h("p", {}, `… and ${whole(table.files.length - MOST_FILES)} more files`) : null,
  );
}

function stripOf(table, { name, header }, first, openTensor) {
  const view = { begin: 0, end: header.fileSize };
  const canvas = h("canvas", {
    role: "img",
    class: "strip",
    "aria-label": `${escapeName(name)}: ${nbytes(header.dataStart)} of header, then ${whole(header.size)} tensors`,
  });
  const status = h("p", { class: "status", "aria-live": "polite" }, "Point at a tensor, or click it to open it.");
  const draw = () => drawStrip(canvas, table, header, first, view);
  new ResizeObserver(draw).observe(canvas);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  const at = (event) => {
    const box = canvas.getBoundingClientRect();
    const line = Math.max(0, Math.min(LINES - 1, Math.floor((event.clientY - box.top) / LINE)));
    const position = view.begin + ((line + (event.clientX - box.left) / box.width) / LINES) * (view.end - view.begin);
    const number = tensorAt(header, position - header.dataStart);
    return { position, number };
  };
  canvas.addEventListener("pointermove", (event) => {
    const { position, number } = at(event);
    const tensor = header.tensors[number];
    status.textContent = tensor
      ? `${shortName(tensor.name)}: ${tensor.dtype} [${tensor.shape.join(", ")}], byte ${
        whole(header.dataStart + tensor.begin)
      } on, ${nbytes(tensor.nbytes)}`
      : position < header.dataStart
      ? `header: ${whole(header.dataStart)} bytes`
      : "";
  });
  canvas.addEventListener("click", (event) => {
    const { number } = at(event);
    if (number >= 0) openTensor(first + number);
  });
  const zoom = (factor, move = 0) => () => {
    const length = Math.max(64, Math.min(header.fileSize, (view.end - view.begin) * factor));
    const middle = (view.begin + view.end) / 2 + move * (view.end - view.begin);
    view.begin = Math.max(0, Math.min(header.fileSize - length, middle - length / 2));
    view.end = view.begin + length;
    draw();
  };
  return h(
    "section",
    {},
    h("h3", {}, `${escapeName(name)} (${nbytes(header.fileSize)})`),
    h(
      "div",
      { class: "controls" },
      button("Closer", zoom(0.5)),
      button("Farther", zoom(2)),
      button("←", zoom(1, -0.5), { "aria-label": "Towards the start" }),
      button("→", zoom(1, 0.5), { "aria-label": "Towards the end" }),
      button("All", zoom(Infinity)),
    ),
    canvas,
    status,
  );
}

/** The number of the tensor that holds a byte of the data; -1 if it is in no tensor. */
function tensorAt({ tensors }, byte) {
  let [low, high] = [0, tensors.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (tensors[middle].end <= byte) low = middle + 1;
    else high = middle;
  }
  return low < tensors.length && byte >= tensors[low].begin ? low : -1;
}

function drawStrip(canvas, table, header, first, view) {
  const width = canvas.clientWidth;
  if (width === 0) return;
  const ratio = devicePixelRatio || 1;
  [canvas.width, canvas.height] = [width * ratio, LINES * LINE * ratio];
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  const style = getComputedStyle(canvas);
  const colour = (name) => style.getPropertyValue(name).trim();
  const place = (position) => ((position - view.begin) / (view.end - view.begin)) * LINES;
  // A tensor narrower than a pixel is drawn if the pixel is still free.
  let drawn = -1;
  const fill = (begin, end, name, isOdd) => {
    let [from, upto] = [Math.max(0, place(begin)), Math.min(LINES, place(end))];
    if (upto <= from || Math.floor(upto * width) <= drawn) return;
    drawn = Math.floor(upto * width);
    for (context.fillStyle = colour(name); from < upto;) {
      const line = Math.floor(from);
      const until = Math.min(line + 1, upto);
      const [x, long] = [(from - line) * width, Math.max(1, (until - from) * width - 0.5)];
      context.fillRect(x, line * LINE, long, LINE - 2);
      if (isOdd) {
        context.fillStyle = colour("--odd");
        context.fillRect(x, line * LINE + LINE - 6, long, 4);
        context.fillStyle = colour(name);
      }
      from = until === line + 1 ? line + 1 : upto;
    }
  };
  fill(0, header.dataStart, "--header", false);
  const start = Math.max(0, tensorAt(header, view.begin - header.dataStart));
  for (let number = start; number < header.tensors.length; number++) {
    const { begin, end, dtype } = header.tensors[number];
    if (header.dataStart + begin > view.end) break;
    fill(
      header.dataStart + begin,
      header.dataStart + end,
      `--dtype-${DTYPE_NAMES.indexOf(dtype) % 8}`,
      isMisaligned(table, first + number),
    );
  }
}
