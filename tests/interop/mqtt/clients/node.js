// node node.js FOLDER_OF_MODULES URL NAME CERTIFICATE_OF_AUTHORITY
"use strict";

const { readFileSync } = require("node:fs");
const { createRequire } = require("node:module");

require("./scenario.js");
const [folder, url, name, authority] = process.argv.slice(2);
const mqtt = createRequire(`${folder}/`)("mqtt");
globalThis.scenario(mqtt, url, name, { ca: readFileSync(authority) }).then(
  () => console.log("passed"),
  (error) => {
    console.error(error);
    process.exit(1);
  },
);
