const assert = require("assert");
const zlib = require("zlib");
const { promisify } = require("util");
const data = Buffer.from("caisson ".repeat(10000));
assert.ok(zlib.gunzipSync(zlib.gzipSync(data)).equals(data));
assert.ok((await promisify(zlib.brotliDecompress)(await promisify(zlib.brotliCompress)(data))).equals(data));
console.log("ok zlib_roundtrip");
