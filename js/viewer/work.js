// The worker's entry, where modules are served.

import { listen } from "./worker.js";

listen();
