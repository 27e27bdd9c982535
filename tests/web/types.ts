// `deno check` in `make lint` fails if the modules do not have the types that index.d.ts declares.

import * as modules from "../../js/index.js";
import type * as declared from "../../js/index.d.ts";

modules satisfies typeof declared;
