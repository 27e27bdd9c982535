// The entry of the page and of its worker, which run one script.

import { start } from "./main.js";
import { listen } from "./worker.js";

if (typeof document === "undefined") listen();
// After the script, whose functions are then not on the stack of the first request: developer tools record that stack,
// for which V8 parses all of them a second time.
else queueMicrotask(start);
