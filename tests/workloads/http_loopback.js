const assert = require("assert");
const server = require("http").createServer((request, reply) => reply.end("pong"));
await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
assert.strictEqual(await (await fetch(`http://127.0.0.1:${server.address().port}/`)).text(), "pong");
server.close();
server.closeAllConnections?.();
console.log("ok http_loopback");
