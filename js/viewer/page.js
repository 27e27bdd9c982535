// The entry of the page, where modules are served.

import { start } from "./main.js";

start();
