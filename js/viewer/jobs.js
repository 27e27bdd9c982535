// The page's side of the worker.

let worker = null;
let next = 0;
const waiting = new Map();

/** Of the script of the page, where that is one file; else beside it. */
function started() {
  const whole = document.querySelector("#viewer");
  const made = whole
    ? new Worker(URL.createObjectURL(new Blob([whole.textContent], { type: "text/javascript" })))
    : new Worker(new URL("work.js", document.querySelector("script[src]").src), { type: "module" });
  made.addEventListener("message", ({ data: { number, progress, ...ended } }) => {
    const job = waiting.get(number);
    if (progress !== undefined) return job?.tell(progress);
    waiting.delete(number);
    if (ended.error) job?.reject(Object.assign(new Error(ended.error.message), ended.error));
    else job?.resolve(ended.result);
  });
  made.addEventListener("error", (event) => {
    for (const job of waiting.values()) job.reject(new Error(event.message || "the worker could not be started"));
    waiting.clear();
    worker = null;
  });
  return made;
}

/**
 * Has the worker do a job. An aborted `signal` ends it, and the promise fails with its reason at once; `tell` is given
 * what comes before the end.
 */
export function run(job, given, { signal, tell = () => {} } = {}) {
  worker ??= started();
  const number = next++;
  return new Promise((resolve, reject) => {
    signal?.throwIfAborted();
    signal?.addEventListener("abort", () => {
      worker?.postMessage({ number });
      waiting.delete(number);
      reject(signal.reason);
    });
    waiting.set(number, { resolve, reject, tell });
    worker.postMessage({ number, job, given });
  });
}

export function isAbort(error) {
  return error?.name === "AbortError";
}
