// Files that are dragged over the page, and dropped on it.

import { escapeName } from "../src/errors.js";
import { h } from "./dom.js";

const SHARD = /-\d+-of-\d+\./;
const ALONE = /\.(safetensors|bt)$/;

/**
 * Shows what a drop does while files are over the page, and calls `open(models, place)` with the files of each model.
 * `place` is 1 for a model that is put beside the open one; `openName()` is its name, or null.
 */
export function listenForDrops({ open, fail, openName }) {
  const here = h("p", { class: "zone" });
  const beside = h("p", { class: "zone" });
  const cover = h(
    "div",
    { class: "dragging", hidden: true, role: "status" },
    here,
    beside,
  );
  document.body.append(cover);
  const isBeside = (event) => openName() !== null && event.clientX >= innerWidth / 2;
  const show = (event) => {
    event.preventDefault();
    const name = openName();
    const files = [...event.dataTransfer?.items ?? []].filter(({ kind }) => kind === "file")
      .length;
    here.textContent = files === 2 ? "Drop to compare the two" : "Drop to open";
    beside.textContent = name === null ? "" : `Drop to compare with ${name}`;
    beside.hidden = name === null || files === 2;
    here.classList.toggle("aimed", beside.hidden || !isBeside(event));
    beside.classList.toggle("aimed", isBeside(event));
    cover.hidden = false;
  };
  addEventListener("dragenter", show);
  addEventListener("dragover", show);
  addEventListener(
    "dragleave",
    (event) => (cover.hidden = event.relatedTarget === null || cover.hidden),
  );
  addEventListener("drop", async (event) => {
    event.preventDefault();
    cover.hidden = true;
    const place = isBeside(event) ? 1 : 0;
    // The items are empty once the event is over.
    const dropped = [...event.dataTransfer.items].map((item) => ({
      entry: item.webkitGetAsEntry?.(),
      file: item.getAsFile(),
    }));
    try {
      const files = await Promise.all(dropped.map(filesOfItem));
      if (files.flat().length === 0) {
        // Text that is dragged has no entry.
        const folder = dropped.find(({ entry }) => entry?.isDirectory);
        if (folder) throw noFiles(folder.entry);
        return;
      }
      if (areTwoModels(dropped, files)) await open(files, 0);
      else await open([files.flat()], place);
    } catch (error) {
      fail(error);
    }
  });
}

/** Browsers skip symbolic links in a dropped folder. */
function noFiles({ name }) {
  const why = `the dropped folder \`${escapeName(name)}\` has no files that the browser can read`;
  return Object.assign(new Error(why), { code: "no-checkpoint" });
}

/** Two items are two models if each is a folder, or a file that is no shard. */
function areTwoModels(dropped, files) {
  return dropped.length === 2 && dropped.every(({ entry }, at) => {
    if (files[at].length === 0) return false;
    const { name } = files[at][0];
    return entry?.isDirectory || (ALONE.test(name) && !SHARD.test(name));
  });
}

/** The files of a dropped item. A page of file:// can read a dropped file, but no entry. */
async function filesOfItem({ entry, file }) {
  if (!entry?.isDirectory) return file ? [file] : [];
  try {
    return await filesOf(entry);
  } catch (error) {
    const hint = "choose it with the button “A folder” instead";
    throw Object.assign(
      new Error(
        `the browser does not let this page read the dropped folder \`${escapeName(entry.name)}\` — ${hint}`,
      ),
      { code: "read", cause: error },
    );
  }
}

async function filesOf(entry) {
  if (entry.isFile) {
    const file = await new Promise((resolve, reject) => entry.file(resolve, reject));
    // A dropped folder does not contain the paths of its files.
    if (entry.fullPath.split("/").length > 2) {
      Object.defineProperty(file, "webkitRelativePath", {
        value: entry.fullPath.slice(1),
      });
    }
    return [file];
  }
  const reader = entry.createReader();
  const found = [];
  for (;;) {
    const some = await new Promise((resolve, reject) => reader.readEntries(resolve, reject));
    if (some.length === 0) {
      return (await Promise.all(found.map(filesOf))).flat();
    }
    found.push(...some);
  }
}
