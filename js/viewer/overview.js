// The summary of a model.

import { escapeName } from "../src/errors.js";
import { afterPaint, button, copying, facts, h, named, rest, table as tableOf } from "./dom.js";
import { kindOfTable } from "./kind.js";
import { health } from "./health.js";
import { changes } from "./lora.js";
import { unitOf } from "./numbers.js";
import { DTYPE_NAMES } from "./table.js";
import { count, many, nameOf, nbytes, shapeText, share, shortName, whole } from "./wording.js";

const LARGEST = 10;
const MOST_WARNINGS = 20;
const MOST_TAGS = 24;
const MOST_METADATA = 500;
const LONGEST_VALUE = 4000;
/** A longer one, or one of many lines, may scroll in its cell. */
const SHORT_VALUE = 100;
/** A picture from a file is shown only if it has one of these types, and at most 1 MB. */
const THUMBNAIL = /^data:image\/(?:png|jpeg|webp|gif);base64,[A-Za-z0-9+/=]+$/;
const MOST_THUMBNAIL = 1_400_000;

export function overview(table, { openTensor, find, signal }) {
  const { stored, logical } = table.counts();
  const metadata = table.metadata();
  const config = table.model.config;
  const method = config?.quantization_config?.quant_method;
  const name = nameOf(table.label);
  const sum = (number) => number < 1000 ? String(number) : `${count(number)} (${whole(number)})`;
  const isEmpty = table.tensors.length === 0;
  const kind = h("span", {}, "…");
  const screen = h(
    "article",
    { "aria-busy": "true" },
    h("h2", {}, named(escapeName(name))),
    h("p", { class: "lead" }, leadOf(table, logical)),
    facts([
      ["Path", name === table.label ? null : named(escapeName(table.label))],
      ["Kind", kind],
      ["Format", table.format],
      ["Files", whole(table.files.length)],
      ["Tensors", whole(table.tensors.length)],
      ["Parameters", sum(logical)],
      ["Parameters as stored", stored === logical ? null : sum(stored)],
      ["Quantisation", typeof method === "string" ? escapeName(method) : null],
      ["Size", `${nbytes(table.nbytes)} (${whole(table.nbytes)} bytes)`],
    ]),
    warnings(table),
    changes(table, find),
    specCard(metadata),
    loraCard(metadata),
    ...(isEmpty ? [] : [health(table, { openTensor, signal }), dtypes(table)]),
  );
  // What takes long, and the end of the screen, are made while the beginning is read.
  afterPaint(() => {
    fill(kind, kindOfTable(table).text);
    screen.append(...[isEmpty ? null : largest(table, openTensor), raw(metadata)].filter(Boolean));
    screen.removeAttribute("aria-busy");
  });
  return screen;
}

/** Puts a text into a list of facts, or removes the pair without one. */
function fill(place, text) {
  const { parentElement: value } = place;
  place.textContent = text;
  if (text === "") [value.previousElementSibling, value].forEach((one) => one.remove());
}

/** The model in one line. */
function leadOf(table, parameters) {
  const dtypes = [...new Set(table.tensors.map(({ dtype }) => dtype))].slice(
    0,
    4,
  ).join(", ");
  const parts = [
    many(table.tensors.length, "tensor"),
    `${count(parameters)} ${parameters === 1 ? "parameter" : "parameters"}`,
    dtypes,
  ];
  return [...parts.filter(Boolean), nbytes(table.nbytes)].join(" · ");
}

function dtypes(table) {
  const found = new Map();
  table.tensors.forEach((tensor, number) => {
    const one = found.get(tensor.dtype) ??
      { tensors: 0, elements: 0, nbytes: 0 };
    found.set(tensor.dtype, {
      tensors: one.tensors + 1,
      elements: one.elements + table.elements[number],
      nbytes: one.nbytes + tensor.nbytes,
    });
  });
  const rows = [...found].sort(([, a], [, b]) => b.nbytes - a.nbytes);
  const all = rows.reduce((sum, [, { nbytes: size }]) => sum + size, 0);
  const bar = h(
    "div",
    { class: "bar", "aria-hidden": "true" },
    rows.map(([dtype, { nbytes: size }]) => {
      const part = h("span", {
        class: `dtype-${DTYPE_NAMES.indexOf(dtype) % 8}`,
        title: dtype,
      });
      part.style.flexGrow = String(size);
      return part;
    }),
  );
  return h(
    "section",
    {},
    h("h3", {}, "Dtypes"),
    bar,
    tableOf(
      "Dtypes",
      ["Dtype", "Tensors", "Elements", "Size", "Share"],
      rows.map((
        [dtype, one],
      ) => [
        dtype,
        whole(one.tensors),
        count(one.elements),
        nbytes(one.nbytes),
        share(one.nbytes, all),
      ]),
      [1, 2, 3, 4],
    ),
  );
}

function largest(table, openTensor) {
  const link = (number) =>
    h(
      "button",
      { type: "button", class: "link", onclick: () => openTensor(number) },
      named(shortName(table.tensors[number].name)),
    );
  return h(
    "section",
    {},
    h("h3", {}, "Largest tensors"),
    tableOf(
      "Largest tensors",
      ["Name", "Dtype", "Shape", "Size"],
      largestOf(table.tensors).map((number) => {
        const tensor = table.tensors[number];
        return [
          link(number),
          tensor.dtype,
          shapeText(tensor),
          nbytes(tensor.nbytes),
        ];
      }),
      [3],
    ),
  );
}

/** The numbers of the largest tensors, the largest first. */
function largestOf(tensors) {
  const found = [];
  tensors.forEach(({ nbytes: size }, number) => {
    if (found.length === LARGEST && size <= tensors[found.at(-1)].nbytes) return;
    const place = found.findIndex((other) => tensors[other].nbytes < size);
    found.splice(place < 0 ? found.length : place, 0, number);
    found.splice(LARGEST);
  });
  return found;
}

/** Oddities of the model, each with a code. */
function warnings(table) {
  const found = [...table.warnings];
  const misaligned = table.tensors.filter((_, number) => isMisaligned(table, number));
  if (misaligned.length > 0) {
    const names = misaligned.slice(0, 3).map(({ name }) => shortName(name))
      .join(", ");
    found.push([
      "misaligned",
      `${
        many(misaligned.length, "tensor does", "tensors do")
      } not begin at a multiple of the element size, which costs speed: ${names}`,
    ]);
  }
  const empty = table.tensors.filter(({ nbytes: size }) => size === 0).length;
  if (empty > 0) {
    found.push([
      "empty-tensor",
      `${many(empty, "tensor has", "tensors have")} no elements`,
    ]);
  }
  if (found.length === 0) return null;
  return h(
    "section",
    { class: "card" },
    h("h3", {}, "Warnings"),
    h(
      "ul",
      {},
      found.slice(0, MOST_WARNINGS).map(([code, text]) => h("li", {}, h("code", {}, code), ` ${text}`)),
    ),
    rest(found.length, MOST_WARNINGS),
  );
}

export function isMisaligned(table, number) {
  return table.position(number) %
          Math.min(8, unitOf(table.tensors[number].dtype).nbytes) !== 0 &&
    table.tensors[number].nbytes > 0;
}

function text(value, most = 300) {
  return value === undefined ? null : escapeName(value.slice(0, most)) + (value.length > most ? "…" : "");
}

function specCard(metadata) {
  const of = (key) => metadata.get(`modelspec.${key}`);
  const keys = [...metadata.keys()].filter((key) => key.startsWith("modelspec.") && key !== "modelspec.thumbnail");
  if (keys.length === 0) return null;
  const thumbnail = of("thumbnail") ?? "";
  const isShown = thumbnail.length <= MOST_THUMBNAIL &&
    THUMBNAIL.test(thumbnail);
  return h(
    "section",
    { class: "card" },
    h("h3", {}, text(of("title")) ?? "ModelSpec"),
    isShown ? picture(thumbnail) : null,
    facts(
      keys.filter((key) => key !== "modelspec.title").map((
        key,
      ) => [text(key.slice("modelspec.".length)), text(metadata.get(key))]),
    ),
  );
}

function picture(thumbnail) {
  const image = h("img", { src: thumbnail, alt: "Thumbnail of the model", width: 128 });
  image.addEventListener("error", () => image.replaceWith(h("p", {}, "The thumbnail is not a whole image.")));
  return image;
}

function loraCard(metadata) {
  const of = (key) => text(metadata.get(`ss_${key}`));
  if (![...metadata.keys()].some((key) => key.startsWith("ss_"))) return null;
  const tags = tagsOf(metadata.get("ss_tag_frequency"));
  return h(
    "section",
    { class: "card" },
    h("h3", {}, `LoRA ${of("output_name") ?? ""}`),
    facts([
      ["Base model", of("sd_model_name") ?? of("base_model_version")],
      ["Version of the base", of("base_model_version")],
      ["Module", of("network_module")],
      ["Rank", of("network_dim")],
      ["Alpha", of("network_alpha")],
      ["Resolution", of("resolution")],
      ["Images", of("num_train_images")],
      ["Epochs", of("num_epochs") ?? of("epoch")],
      ["Steps", of("steps")],
      ["Learning rate", of("learning_rate")],
      ["Tags", tagList(tags)],
    ]),
  );
}

/** The most frequent tags, and a button that shows all of them. */
function tagList(tags) {
  const texts = tags.map(([tag, times]) => `${text(tag, 60)}\u00a0(${whole(times)})`);
  if (texts.length === 0) return null;
  const shown = h("span", {}, texts.slice(0, MOST_TAGS).join(", "));
  if (texts.length <= MOST_TAGS) return shown;
  const all = button("Show all", () => {
    shown.textContent = texts.join(", ");
    count.remove();
  });
  const count = h("span", {}, ` … (${MOST_TAGS} of ${whole(texts.length)}) `, all);
  return [shown, count];
}

/** The words of the captions that a LoRA was trained with, the most frequent first. */
function tagsOf(json) {
  try {
    const sums = new Map();
    for (const folder of Object.values(JSON.parse(json ?? "{}"))) {
      for (const [tag, times] of Object.entries(folder)) {
        if (Number.isFinite(times)) sums.set(tag, (sums.get(tag) ?? 0) + times);
      }
    }
    return [...sums].sort(([, a], [, b]) => b - a);
  } catch {
    return [];
  }
}

function raw(metadata) {
  if (metadata.size === 0) return null;
  const rows = [...metadata].slice(0, MOST_METADATA).map((
    [key, value],
  ) => [
    h("span", { class: "long" }, text(key)),
    h("div", {
      class: "value",
      tabindex: value.length > SHORT_VALUE ? "0" : null,
    }, text(value, LONGEST_VALUE)),
    copying(() => value),
  ]);
  return h(
    "details",
    {},
    h("summary", {}, `Metadata (${whole(metadata.size)})`),
    tableOf("Metadata", ["Key", "Value", "Copy"], rows),
    rest(metadata.size, MOST_METADATA),
  );
}
