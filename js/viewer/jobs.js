// The page's side of the worker.

let worker = null;
let next = 0;
const waiting = new Map();

/** The address of the worker's script, a copy of the page's own. */
let script = null;

function made() {
  script ??= URL.createObjectURL(
    new Blob([document.querySelector("#viewer").textContent], { type: "text/javascript" }),
  );
  return new Worker(script);
}

function started() {
  const shared = made();
  shared.addEventListener("message", ({ data: { number, progress, ...ended } }) => {
    const job = waiting.get(number);
    if (progress !== undefined) return job?.onProgress(progress);
    waiting.delete(number);
    if (ended.error) job?.reject(Object.assign(new Error(ended.error.message), ended.error));
    else job?.resolve(ended.result);
  });
  shared.addEventListener("error", (event) => {
    for (const job of waiting.values()) job.reject(new Error(event.message || "the worker could not be started"));
    waiting.clear();
    worker = null;
  });
  return shared;
}

/**
 * Runs a job in the worker. An aborted `signal` ends it, and the promise fails with its reason at once; `onProgress` is
 * called with intermediate results.
 *
 * @param {string} job
 * @param {object} input
 * @param {{ signal?: AbortSignal, onProgress?: (progress: any) => void }} [options]
 * @returns {Promise<any>}
 */
export function run(job, input, { signal, onProgress = () => {} } = {}) {
  worker ??= started();
  const number = next++;
  return new Promise((resolve, reject) => {
    signal?.throwIfAborted();
    signal?.addEventListener("abort", () => {
      worker?.postMessage({ number });
      waiting.delete(number);
      reject(signal.reason);
    });
    waiting.set(number, { resolve, reject, onProgress });
    worker.postMessage({ number, job, input });
  });
}

/** Runs a job in a separate worker for at most `timeout` milliseconds, since the job's code may not end by itself. */
export async function runIsolated(job, input, { signal, timeout }) {
  signal.throwIfAborted();
  const own = made();
  let timer;
  try {
    return await new Promise((resolve, reject) => {
      own.addEventListener(
        "message",
        ({ data }) => (data.error ? reject(new Error(data.error.message)) : resolve(data.result)),
      );
      own.addEventListener("error", (event) => reject(new Error(event.message || "the worker could not be started")));
      signal.addEventListener("abort", () => reject(signal.reason));
      timer = setTimeout(() => reject(new Error(`stopped: it takes longer than ${timeout / 1000} s`)), timeout);
      own.postMessage({ number: 0, job, input });
    });
  } finally {
    clearTimeout(timer);
    own.terminate();
  }
}

export function isAbort(error) {
  return error?.name === "AbortError";
}
