const bytes = new Uint8Array([0, 97, 115, 109, 1, 0, 0, 0, 1, 7, 1, 96, 2, 127, 127, 1, 127, 3, 2, 1, 0, 7, 7, 1, 3, 97, 100, 100, 0, 0, 10, 9, 1, 7, 0, 32, 0, 32, 1, 106, 11]);
const { instance } = await WebAssembly.instantiate(bytes);
const memory = new WebAssembly.Memory({ initial: 2, maximum: 64 });
let sum = 0;
for (let i = 0; i < 300000; i++) sum = instance.exports.add(sum, 1);
require("assert").deepStrictEqual([sum, memory.buffer.byteLength], [300000, 131072]);
console.log("ok wasm_add");
