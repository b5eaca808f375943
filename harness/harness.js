// Runs JavaScript cells inside a sandbox and speaks the line protocol of `src/harness/mod.rs`.
//
// Cells are evaluated by V8 itself in its REPL mode, through an inspector session inside this process (no port is
// opened): the engine then knows top-level await, `const` and `let` declared anew in a later cell, and the value of
// the last statement, none of which a source rewrite gets right. What that mode cannot do is `import()`, so calls of
// it are rewritten (see `withImports`).
//
// As in harness.py nothing here defends against the guest, only against mistakes: what is used after the first cell
// is held in this closure, and a cell that breaks a prototype breaks its own output at most.
"use strict";

(() => {
  const fs = require("fs");
  const path = require("path");
  const { Session } = require("inspector");
  const Module = require("module");
  const net = require("net");
  const os = require("os");
  const { Writable } = require("stream");
  const { pathToFileURL } = require("url");
  const util = require("util");
  const vm = require("vm");

  const REQUESTS = 3;
  const EVENTS = 4;
  const EXIT_BROKEN = 70;
  const ORDER_ENTRIES_MAX = 10_000;
  const RESULT_CHARS_MAX = 2_100_000;
  const EVALUE_CHARS_MAX = 400_000;
  const TRACEBACK_CHARS_MAX = 1_000_000;
  const CELL_NAME = "evalmachine.<anonymous>";
  const IMPORT = "caisson.import";

  const { parse, stringify } = JSON;
  const { inspect } = util;
  const { writeSync, constants: fsConstants } = fs;
  const BufferFrom = Buffer.from.bind(Buffer);
  const later = setImmediate;
  const tick = process.nextTick;
  const StringOf = String;
  const nap = Atomics.wait.bind(null, new Int32Array(new SharedArrayBuffer(4)), 0, 0);
  const { apply } = Reflect;
  const { then } = Promise.prototype;
  const cwd = process.cwd.bind(process);
  const chdir = process.chdir.bind(process);
  const exit = process.reallyExit ? process.reallyExit.bind(process) : process.exit.bind(process);

  // --- output ------------------------------------------------------------------------------------------------------

  // Which stream this interpreter wrote how many bytes to, in order.
  const recorder = { entries: [], muted: false };

  function note(key, size) {
    const { entries } = recorder;
    const last = entries[entries.length - 1];
    if (last !== undefined && last[0] === key) last[1] += size;
    else if (entries.length <= ORDER_ENTRIES_MAX) entries[entries.length] = [key, size];
  }

  function takeOrder() {
    const { entries } = recorder;
    recorder.entries = [];
    return entries.length > ORDER_ENTRIES_MAX ? undefined : entries;
  }

  // Writes everything, waiting where the other end is slow and a child or libuv made the pipe non-blocking.
  function writeAll(fd, bytes) {
    let sent = 0;
    while (sent < bytes.length) {
      try {
        sent += writeSync(fd, bytes, sent, bytes.length - sent);
      } catch (error) {
        if (error.code !== "EAGAIN") throw error;
        nap(1);
      }
    }
  }

  // process.stdout and process.stderr of cells: every write has reached the descriptor when it returns.
  class Stream extends Writable {
    constructor(fd, key) {
      super({ decodeStrings: true, emitClose: false });
      this.fd = fd;
      this._type = "pipe";
      Object.defineProperty(this, "_key", { value: key });
    }

    // The short way for nearly every write: no queue is needed where nothing waits.
    write(chunk, encoding, done) {
      if (typeof chunk !== "string" || this.writableCorked > 0) return super.write(chunk, encoding, done);
      const named = typeof encoding === "string";
      const callback = named ? done : encoding ?? done;
      this._write(BufferFrom(chunk, named ? encoding : "utf8"), "buffer", () => {
        if (typeof callback === "function") tick(callback);
      });
      return true;
    }

    _write(chunk, _encoding, done) {
      try {
        if (!recorder.muted) {
          writeAll(this.fd, chunk);
          note(this._key, chunk.length);
        }
        done();
      } catch {
        done(); // descriptor closed by a cell: not worth the session
      }
    }

    // A cell may end or destroy its stream, as programs do before they exit; the next one finds it open.
    end(chunk, encoding, done) {
      const callback = [chunk, encoding, done].find((each) => typeof each === "function");
      if (chunk !== undefined && chunk !== null && typeof chunk !== "function") this.write(chunk, typeof encoding === "string" ? encoding : "utf8");
      if (callback !== undefined) tick(callback);
      return this;
    }

    destroy() {
      return this;
    }
  }

  function ownStreams() {
    for (const [name, fd, key] of [["stdout", 1, "o"], ["stderr", 2, "e"]]) {
      const stream = new Stream(fd, key);
      Object.defineProperty(process, name, { configurable: true, enumerable: true, get: () => stream });
    }
  }

  // The inspector wraps the methods of `console`: it takes a stack for every call and keeps the last thousand with
  // their arguments. Nobody listens to it, so cells get the methods as they are without it.
  function ownConsole() {
    const { stdout, stderr } = process;
    const plain = new console.Console({ stdout, stderr });
    for (const name of Object.keys(plain)) {
      if (typeof plain[name] === "function" && typeof console[name] === "function") console[name] = plain[name];
    }
  }

  // --- text for frames ---------------------------------------------------------------------------------------------

  const wellFormed = (text) => BufferFrom(text, "utf8").toString("utf8");

  // Fit for a frame: not too long, no lone surrogates.
  function clean(text, limit) {
    if (text.length > limit) text = `${text.slice(0, limit)}\n[cut by the harness: ${text.length - limit} characters left out]`;
    return /[\ud800-\udfff]/.test(text) ? wellFormed(text) : text;
  }

  function safely(get, otherwise) {
    try {
      const value = get();
      return typeof value === "string" ? value : StringOf(value);
    } catch {
      return otherwise;
    }
  }

  // Where a stack leaves the cell: everything from here on is the inspector's and ours.
  const OURS = new RegExp(`node:inspector|${__filename.replace(/[^\w/]/g, "\\$&")}|node:internal/(process/task_queues|timers|modules/run_main)`);

  function withoutOwnFrames(text) {
    const lines = [];
    let dropping = false;
    for (const line of text.split("\n")) {
      const frame = /^\s+at /.test(line);
      if (!frame) dropping = false;
      else if (OURS.test(line)) dropping = true;
      if (!dropping) lines.push(line);
      else if (/ \{$/.test(line)) lines[lines.length - 1] += " {"; // inspect() opens the properties behind the last frame
    }
    return lines;
  }

  function isError(value) {
    return util.types.isNativeError(value) || safely(() => value instanceof Error, "false") === "true";
  }

  function describe(value, details) {
    if (!isError(value)) {
      const text = clean(safely(() => inspect(value), "<uninspectable value>"), EVALUE_CHARS_MAX);
      return { ename: "Error", evalue: text, traceback: [`Uncaught ${text}`] };
    }
    const ename = clean(safely(() => value.name, "Error"), 1000);
    const evalue = clean(safely(() => value.message, ""), EVALUE_CHARS_MAX);
    const brief = `${ename}: ${evalue}`;
    // Copies of a huge message would take the sandbox's memory.
    const text = evalue.length > EVALUE_CHARS_MAX ? brief : clean(safely(() => inspect(value), brief), TRACEBACK_CHARS_MAX);
    const traceback = withoutOwnFrames(text);
    if (details !== undefined) traceback.unshift(...details);
    return { ename, evalue, traceback };
  }

  // The place of a syntax error, as node prints it for a file. The error itself has no frame in the cell.
  function place(code, details) {
    if (details.lineNumber === undefined) return [];
    const lines = code.split("\n");
    const at = Math.min(details.lineNumber, lines.length - 1); // an end that came too early lies behind the last
    const column = at < details.lineNumber ? lines[at].length : details.columnNumber;
    return [`${CELL_NAME}:${at + 1}`, lines[at].slice(0, 500), `${" ".repeat(Math.min(column, 500))}^`, ""];
  }

  // --- import() ----------------------------------------------------------------------------------------------------

  // A regular expression may start after these, a division after anything else that ends an operand.
  const BEFORE_REGEX = /(?:^|[=(,;:[!&|?{}+\-*%<>~^]|\b(?:return|typeof|case|in|of|delete|void|throw|new|do|else|await|yield))$/;

  // Ends of the string, comment, template or regular expression that starts at `at`; `at` itself if none does.
  function skipQuoted(code, at, before) {
    const two = code.slice(at, at + 2);
    if (two === "//") return endOf(code, "\n", at);
    if (two === "/*") return endOf(code, "*/", at + 2);
    const quote = code[at];
    if (quote === "/" && !BEFORE_REGEX.test(before)) return at;
    if (quote !== '"' && quote !== "'" && quote !== "/") return at;
    let inClass = false;
    for (let i = at + 1; i < code.length; i++) {
      const c = code[i];
      if (c === "\\") i++;
      else if (c === "\n") return i;
      else if (quote === "/" && c === "[") inClass = true;
      else if (quote === "/" && c === "]") inClass = false;
      else if (c === quote && !inClass) return i + 1;
    }
    return code.length;
  }

  function endOf(code, text, from) {
    const at = code.indexOf(text, from);
    return at < 0 ? code.length : at + text.length;
  }

  // Replaces calls of import() by calls of our importer. Text in strings and comments stays; code inside `${}` counts.
  function withImports(code) {
    if (!/\bimport\b/.test(code)) return code;
    const depths = []; // of braces, for each template that is open
    let depth = 0;
    let out = "";
    let at = 0;
    let inTemplate = false;
    while (at < code.length) {
      if (inTemplate) {
        let end = at;
        while (end < code.length && code[end] !== "`" && !(code[end] === "$" && code[end + 1] === "{")) end += code[end] === "\\" ? 2 : 1;
        if (code[end] === "$") { depths.push(depth); depth = 0; end++; }
        inTemplate = false;
        out += code.slice(at, end + 1);
        at = end + 1;
        continue;
      }
      const c = code[at];
      const end = skipQuoted(code, at, out.slice(-12).trimEnd());
      if (end > at) { out += code.slice(at, end); at = end; continue; }
      if (c === "`") inTemplate = true;
      else if (c === "{") depth++;
      else if (c === "}" && depth === 0 && depths.length > 0) { depth = depths.pop(); inTemplate = true; }
      else if (c === "}") depth--;
      else if (c === "i" && /^import\s*\(/.test(code.slice(at, at + 40)) && !/[\w$.]$/.test(out)) {
        out += `globalThis[Symbol.for("${IMPORT}")]`;
        at += "import".length;
        continue;
      }
      out += c;
      at++;
    }
    return out;
  }

  let importer = null;

  // import() as a file in the working directory would do it.
  function makeImporter(folder) {
    const useDefault = vm.constants?.USE_MAIN_CONTEXT_DEFAULT_LOADER;
    const filename = path.join(folder, "[cell]");
    if (useDefault !== undefined) {
      return new vm.Script("(name, options) => import(name, options)", { filename, importModuleDynamically: useDefault }).runInThisContext();
    }
    const resolve = Module.createRequire(filename).resolve; // before Node 20.12
    return async (name) => {
      const text = `${name}`;
      if (Module.builtinModules.includes(text.replace(/^node:/, "")) || /^(file|data|node):/.test(text)) return import(text);
      return import(pathToFileURL(/^\.{0,2}\//.test(text) ? path.resolve(folder, text) : resolve(text)).href);
    };
  }

  // The default loader announces itself as experimental at its first use, on what would be a cell's stderr.
  function hushImporter() {
    const { emitWarning } = process;
    process.emitWarning = () => {};
    importer("fs").catch(() => {});
    process.emitWarning = emitWarning;
  }

  // --- globals of a cell -------------------------------------------------------------------------------------------

  function hidden(name, value) {
    Object.defineProperty(globalThis, name, { value, configurable: true, writable: true, enumerable: false });
  }

  // `require`, `module` and the built-in modules by name, as `node -e` has them, seen from the working directory.
  function settle(folder) {
    const own = new Module("[cell]");
    own.filename = path.join(folder, "[cell]");
    own.paths = Module._nodeModulePaths(folder);
    const require = Module.createRequire(own.filename);
    require.main = own; // so that `require.main === module` holds, as in a file that is run
    hidden("require", require);
    hidden("module", own);
    hidden("exports", own.exports);
    importer = makeImporter(folder);
  }

  function builtinNames() {
    const load = require;
    for (const name of Module.builtinModules) {
      if (/^_|\/|^(sys|wasi|trace_events|inspector)$/.test(name) || name in globalThis) continue;
      Object.defineProperty(globalThis, name, {
        configurable: true,
        enumerable: false,
        get: () => load(name),
        set(value) {
          Object.defineProperty(globalThis, name, { value, configurable: true, writable: true, enumerable: true });
        },
      });
    }
  }

  // /proc in a sandbox shows processes only, and os.cpus() reads the rest: programs size their pools by its length.
  function fillCpus() {
    if (os.cpus().length > 0) return;
    const count = os.availableParallelism ? os.availableParallelism() : 1;
    const cpu = () => ({ model: "cpu", speed: 0, times: { user: 0, nice: 0, sys: 0, idle: 0, irq: 0 } });
    os.cpus = function cpus() {
      return Array.from({ length: count }, cpu);
    };
    Module.syncBuiltinESMExports();
  }

  // --- evaluation --------------------------------------------------------------------------------------------------

  const session = new Session();
  session.connect();
  const post = session.post.bind(session);
  let receiver; // object id of the function below, for the inspector
  let received;

  function makeReceiver() {
    const name = "caisson.receiver";
    globalThis[name] = (value) => {
      received = value;
    };
    post("Runtime.evaluate", { expression: `globalThis["${name}"]`, objectGroup: "harness" }, (_, reply) => {
      receiver = reply.result.objectId;
    });
    delete globalThis[name];
  }

  // The value behind the inspector's description of it.
  function valueOf(remote) {
    if (remote.objectId !== undefined) {
      post("Runtime.callFunctionOn", {
        objectId: receiver,
        functionDeclaration: "function (value) { this(value) }",
        arguments: [{ objectId: remote.objectId }],
        silent: true,
      });
      const value = received;
      received = undefined;
      post("Runtime.releaseObjectGroup", { objectGroup: "cell" });
      return value;
    }
    return remote.value;
  }

  // The outcome of a cell whose value is this one.
  function valued(value) {
    try {
      return { result: value === undefined ? null : clean(inspect(value), RESULT_CHARS_MAX), error: null };
    } catch (error) {
      return { result: null, error: describe(error) }; // a custom inspect that throws
    }
  }

  // A cell whose value is a promise, as of `main()` or an async function called in place, ends when that settles:
  // its author meant it to. Node itself says when nothing is left that could settle it: the event loop runs empty.
  // For that our own socket lets go of the loop meanwhile.
  function untilSettled(promise, done) {
    const cell = running;
    const end = (outcome) => {
      if (cell.abandon === undefined) return; // it settled after all, behind an error that nobody caught
      cell.abandon = undefined;
      requests.ref();
      done(outcome);
    };
    cell.abandon = () => end(valued(promise));
    requests.unref();
    try {
      apply(then, promise, [(value) => end(valued(value)), (reason) => end({ result: null, error: describe(reason) })]);
    } catch (error) {
      end({ result: null, error: describe(error) }); // a `constructor` that throws
    }
  }

  // The error of a cell that V8 could not see to its end; none when this process ends over it.
  function unevaluated(message) {
    if (/collected/.test(message)) {
      const evalue = "what this cell awaits can never come: nothing refers to its promise any more";
      return { ename: "Error", evalue, traceback: [`Error: ${evalue}`] };
    }
    // Node takes its inspector down before it sends itself a signal that looks deadly, `process.kill(-1)` included.
    // Where we live on there is no evaluating any more: a fresh interpreter serves the session better. A turn later,
    // because an ordinary exit takes the inspector down as well.
    later(() => {
      try {
        process.stderr.write(`the evaluator of this interpreter is gone (${message})\n`);
      } finally {
        exit(EXIT_BROKEN);
      }
    });
    return undefined;
  }

  // Calls `done` once with { result, error }.
  function evaluate(code, done) {
    const expression = `${withImports(code)}\n//# sourceURL=${CELL_NAME}`;
    post("Runtime.evaluate", { expression, objectGroup: "cell", replMode: true, awaitPromise: true }, (failure, reply) => {
      if (failure) {
        const error = unevaluated(StringOf(failure.message));
        return error && done({ result: null, error });
      }
      const details = reply.exceptionDetails;
      try {
        if (details === undefined) {
          const { subtype, unserializableValue } = reply.result;
          if (unserializableValue !== undefined) return done({ result: unserializableValue, error: null }); // NaN, -0, 5n
          const value = valueOf(reply.result);
          return subtype === "promise" && running !== null ? untilSettled(value, done) : done(valued(value));
        }
        const value = details.exception.unserializableValue ?? valueOf(details.exception);
        const syntax = details.exception.className === "SyntaxError" && details.stackTrace === undefined && details.scriptId !== undefined;
        return done({ result: null, error: describe(value, syntax ? place(code, details) : undefined) });
      } catch (error) {
        return done({ result: null, error: describe(error) }); // a custom inspect that throws
      }
    });
  }

  // --- protocol ----------------------------------------------------------------------------------------------------

  let running = null; // the cell that runs: { request, refused, rejections, finished, abandon }
  let requests; // the socket that request lines come from
  const waiting = [];

  function enter(folder) {
    try {
      chdir(folder);
      settle(folder);
      return undefined;
    } catch (error) {
      return { what: "cwd", errno: Math.abs(error.errno ?? 22) };
    }
  }

  function start(request) {
    const cell = { request, refused: undefined, rejections: new Map(), finished: false, abandon: undefined };
    running = cell;
    takeOrder();
    if (typeof request.setup?.cwd === "string") cell.refused = enter(request.setup.cwd);
    if (cell.refused !== undefined) return finish(cell, { result: null, error: null });
    if (typeof request.warm === "string") return warm(cell);
    return runCode(cell);
  }

  function runCode(cell) {
    const { code } = cell.request;
    if (typeof code !== "string") return finish(cell, { result: null, error: null });
    return evaluate(code, (outcome) => {
      // One turn, so that output and rejections of settled promises belong to this cell.
      later(() => finish(cell, outcome));
    });
  }

  // A throw-away evaluation: the same road as a cell's, no bytes written, names gone with their block.
  function warm(cell) {
    recorder.muted = true;
    evaluate(`{\n${cell.request.warm}\n}`, () => {
      later(() => {
        recorder.muted = false;
        takeOrder();
        cell.rejections.clear();
        runCode(cell);
      });
    });
  }

  function finish(cell, { result, error }) {
    if (cell.finished) return;
    cell.finished = true;
    cell.abandon = undefined;
    requests.ref();
    running = null;
    if (error === null && cell.rejections.size > 0) {
      result = null;
      error = describe(cell.rejections.values().next().value);
    }
    const frame = { nonce: StringOf(cell.request.nonce), event: "done", result, error, order: takeOrder(), refused: cell.refused };
    // The newline before it ends what a cell may have written there, so that ours is not read as its tail.
    writeAll(EVENTS, BufferFrom(`\n${stringify(frame)}\n`));
    if (waiting.length > 0) start(waiting.shift());
  }

  function complain(what, value) {
    const { traceback } = describe(value);
    try {
      process.stderr.write(`${what}: ${traceback.join("\n")}\n`);
    } catch {
      // Descriptor 2 is gone.
    }
  }

  // Errors that nobody caught: the running cell's, else the session's stderr. They end neither.
  function watchErrors() {
    process.on("unhandledRejection", (reason, promise) => {
      if (running === null) complain("Unhandled rejection", reason);
      else running.rejections.set(promise, reason);
    });
    process.on("rejectionHandled", (promise) => running?.rejections.delete(promise));
    process.on("uncaughtException", (error) => {
      if (running === null || recorder.muted) complain("Uncaught", error);
      else finish(running, { result: null, error: describe(error) }); // what the cell awaits may never come now
    });
    process.on("beforeExit", () => {
      requests.ref();
      running?.abandon?.();
    });
    process.on("SIGUSR1", () => {}); // node would open its inspector's port
  }

  function listen() {
    const socket = new net.Socket({ fd: REQUESTS, readable: true, writable: false });
    requests = { ref: socket.ref.bind(socket), unref: socket.unref.bind(socket) };
    socket.emit = socket.emit; // our own copy: a cell may replace the prototype's
    let parts = [];
    socket.on("data", (data) => {
      let from = 0;
      let at;
      while ((at = data.indexOf(10, from)) >= 0) {
        parts.push(data.subarray(from, at));
        const line = parts.length === 1 ? parts[0] : Buffer.concat(parts);
        parts = [];
        from = at + 1;
        take(line);
      }
      if (from < data.length) parts.push(data.subarray(from));
    });
    socket.on("end", () => exit(0));
    socket.on("error", () => exit(0));
    socket.on("close", () => exit(0));
  }

  function take(line) {
    let request;
    try {
      request = parse(line.toString("utf8"));
    } catch {
      return; // a cell read from the pipe and left a half
    }
    if (typeof request !== "object" || request === null) return;
    if (running === null) start(request);
    else waiting.push(request);
  }

  process.argv.length = 1;
  process.mainModule = undefined;
  Object.keys(require.cache).forEach((name) => delete require.cache[name]);
  ownStreams();
  ownConsole();
  fillCpus();
  builtinNames();
  settle(cwd());
  hushImporter();
  makeReceiver();
  Object.defineProperty(globalThis, Symbol.for(IMPORT), { value: (...args) => importer(...args), enumerable: false });
  watchErrors();
  listen();
})();
