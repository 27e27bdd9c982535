// The entry of the page and of its worker, which run one script.

import { start } from "./main.js";
import { listen } from "./worker.js";

if (typeof document === "undefined") listen();
else start();
