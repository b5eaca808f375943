const { Worker } = require("worker_threads");
const source = "const { parentPort, workerData } = require('worker_threads'); parentPort.postMessage(workerData * 2)";
const answers = await Promise.all([1, 2, 3].map((workerData) => new Promise((resolve, reject) => {
  new Worker(source, { eval: true, workerData }).on("message", resolve).on("error", reject);
})));
require("assert").deepStrictEqual(answers, [2, 4, 6]);
console.log("ok worker_threads");
