const assert = require("assert");
const crypto = require("crypto");
const { promisify } = require("util");
const { publicKey, privateKey } = await promisify(crypto.generateKeyPair)("ed25519");
assert.ok(crypto.verify(null, Buffer.from("x"), publicKey, crypto.sign(null, Buffer.from("x"), privateKey)));
assert.strictEqual((await promisify(crypto.scrypt)("p", "s", 32)).length, 32);
assert.notStrictEqual(crypto.randomUUID(), crypto.randomUUID());
assert.strictEqual((await crypto.subtle.digest("SHA-256", Buffer.from("x"))).byteLength, 32);
console.log("ok crypto_keys");
