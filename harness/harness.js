// Runs JavaScript cells inside a sandbox and speaks the line protocol of `src/harness/mod.rs`.
//
// Cells are evaluated by V8 itself in its REPL mode, through an inspector session inside this process (no port is
// opened): the engine then knows top-level await, `const` and `let` declared anew in a later cell, and the value of
// the last statement, none of which a source rewrite gets right. What that mode cannot do is `import()`, so calls of
// it are rewritten (see `withImports`).
//
// A program is something else: what `node main.js` would have run, once, after which this process is gone. It is
// compiled as node compiles a file and left to node, which reports what nobody caught and ends when nothing is left to
// do. Only the file is missing: its name is one in the working directory, and its text is what came over the pipe.
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

  // Ours, by a switch of ours; a guest's `vm` has what it would have without it.
  const { SourceTextModule, SyntheticModule } = vm;
  for (const name of ["Module", "SourceTextModule", "SyntheticModule"]) delete vm[name];

  const REQUESTS = 3;
  const EVENTS = 4;
  const EXIT_BROKEN = 70;
  const STANDING_MS = 20; // how often a program that is over looks whether it is wanted
  const ORDER_ENTRIES_MAX = 10_000;
  const RESULT_CHARS_MAX = 2_100_000;
  const EVALUE_CHARS_MAX = 400_000;
  const TRACEBACK_CHARS_MAX = 1_000_000;
  const CELL_NAME = "evalmachine.<anonymous>";
  const IMPORT = "caisson.import";
  const EXIT_UNSETTLED = 13; // as node has it for a top-level await that nothing can settle
  const LIBRARIES = path.join(path.dirname(__filename), "toolchains", "typescript");

  const { parse, stringify } = JSON;
  const { inspect } = util;
  const { readSync, writeSync, constants: fsConstants } = fs;
  const BufferFrom = Buffer.from.bind(Buffer);
  const later = setImmediate;
  const tick = process.nextTick;
  const StringOf = String;
  const nap = Atomics.wait.bind(null, new Int32Array(new SharedArrayBuffer(4)), 0, 0);
  const { apply } = Reflect;
  const { then } = Promise.prototype;
  const cwd = process.cwd.bind(process);
  const chdir = process.chdir.bind(process);
  const countListeners = process.listenerCount.bind(process);
  const lengthOf = Reflect.getOwnPropertyDescriptor(Reflect.getPrototypeOf(Uint8Array.prototype), "length").get;
  const exit = process.reallyExit ? process.reallyExit.bind(process) : process.exit.bind(process);

  // --- output ------------------------------------------------------------------------------------------------------

  // Which stream this interpreter wrote how many bytes to, in order.
  const recorder = { entries: [], muted: false, idle: false };

  function note(key, size) {
    if (recorder.idle) return;
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
    const length = apply(lengthOf, bytes, []);
    let sent = 0;
    while (sent < length) {
      try {
        sent += writeSync(fd, bytes, sent, length - sent);
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

  // Frames are put together by hand: `JSON.stringify` asks objects and lists, and so their prototypes, for a `toJSON`.
  function listText(list, textOf) {
    let text = "";
    for (let i = 0; i < list.length; i++) text += `${i > 0 ? "," : ""}${textOf(list[i])}`;
    return `[${text}]`;
  }

  const orNull = (text) => (text === null ? "null" : stringify(text));

  function errorText({ ename, evalue, traceback }) {
    return `{"ename":${stringify(ename)},"evalue":${stringify(evalue)},"traceback":${listText(traceback, stringify)}}`;
  }

  function doneFrame(nonce, { result, error }, order, refused) {
    let more = "";
    if (order !== undefined) more += `,"order":${listText(order, (entry) => `["${entry[0]}",${entry[1]}]`)}`;
    if (refused !== undefined) more += `,"refused":{"what":"${refused.what}","errno":${refused.errno}}`;
    // The newline before it ends what a cell may have written there, so that ours is not read as its tail.
    return `\n{"nonce":${stringify(nonce)},"event":"done","result":${orNull(result)},"error":${error === null ? "null" : errorText(error)}${more}}\n`;
  }

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
  function makeImporter(folder, file = "[cell]") {
    const useDefault = vm.constants?.USE_MAIN_CONTEXT_DEFAULT_LOADER;
    const filename = path.join(folder, file);
    if (useDefault !== undefined) {
      return new vm.Script("(name, options) => import(name, options)", { filename, importModuleDynamically: useDefault }).runInThisContext();
    }
    const resolve = Module.createRequire(filename).resolve; // before Node 20.12
    return async (name, options) => {
      const text = `${name}`;
      const attributes = options === undefined ? undefined : { assert: options.with ?? options.assert, with: options.with ?? options.assert };
      if (Module.builtinModules.includes(text.replace(/^node:/, "")) || /^(file|data|node):/.test(text)) return import(text, attributes);
      return import(pathToFileURL(/^\.{0,2}\//.test(text) ? path.resolve(folder, text) : resolve(text)).href, attributes);
    };
  }

  let lastImporter = { folder: undefined, file: undefined, run: undefined };

  function importerOf(folder, file) {
    if (lastImporter.folder !== folder || lastImporter.file !== file) lastImporter = { folder, file, run: makeImporter(folder, file) };
    return lastImporter.run;
  }

  // What node calls experimental it announces at the first use, on what would be a cell's stderr.
  function hushed(action) {
    const { emitWarning } = process;
    process.emitWarning = () => {};
    try {
      return action();
    } finally {
      process.emitWarning = emitWarning;
    }
  }

  function hushImporter() {
    hushed(() => importer("fs").catch(() => {}));
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

  const givenNames = ["require", "module", "exports"];

  function builtinNames() {
    const load = require;
    for (const name of Module.builtinModules) {
      if (/^_|\/|^(sys|wasi|trace_events|inspector)$/.test(name) || name in globalThis) continue;
      givenNames.push(name);
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

  // --- programs ----------------------------------------------------------------------------------------------------

  const COMMON_NAMES = ["exports", "require", "module", "__filename", "__dirname"];
  // What V8 says of a source that can only be a module.
  const IS_MODULE = /^(Cannot use import statement outside a module|Unexpected token 'export'|Cannot use 'import\.meta' outside a module|Identifier '(exports|require|module|__filename|__dirname)' has already been declared)/;
  // V8 takes `await (x)` in a function for a call.
  const MAY_AWAIT = /(^|[\n;{}=(,])\s*await\s*[([`+\-/]/;
  // Programs start themselves again by their file's name: threads, processes of a cluster.
  const MAY_START_ITSELF = /\b(worker_threads|child_process|cluster)\b/;

  // What calls a program's code shows in its stacks as what node has in this place.
  const enterMain = new vm.Script(
    "(function executeUserEntryPoint(main, self, values, done) { const end = Reflect.apply(main, self, values); if (done !== undefined) done(end); })",
    { filename: "node:internal/modules/run_main" },
  ).runInThisContext();

  // Runs a program, once: this process has no other work any more, and ends as node would end it.
  function runProgram(program, nonce, begin = later) {
    const state = becomeMain();
    state.quotedNonce = stringify(nonce);
    requests.unref();
    const folder = cwd();
    let main;
    try {
      main = program.typescript === true ? compileTypeScript(StringOf(program.code), folder) : compile(withoutMark(StringOf(program.code)), folder, ".js");
    } catch (error) {
      return reject(error);
    }
    process.argv.push(main.filename, ...(Array.isArray(program.args) ? program.args.map(StringOf) : []));
    if (MAY_START_ITSELF.test(main.code)) letStartItself(main, folder);
    return main.format === "module" ? startModule(main, folder, state) : startCommon(main, folder, state, begin);
  }

  // What is known of the program, once this process is for one.
  let ending;

  // Gives up what belongs to cells, and has the end reported.
  function becomeMain() {
    if (ending !== undefined) return ending;
    const state = { quotedNonce: undefined, dying: false, idle: false, unsettled: undefined };
    ending = state;
    recorder.idle = true;
    for (const [event, watcher] of Object.entries(watchers)) process.removeListener(event, watcher);
    for (const name of [...givenNames, Symbol.for(IMPORT)]) delete globalThis[name];
    session.disconnect();
    process.execArgv = [];
    process.on("uncaughtExceptionMonitor", () => {
      state.dying = true;
    });
    process.on("beforeExit", () => {
      state.idle = true; // process.exit() does not come by here
    });
    process.on("exit", (code) => {
      if (state.unsettled !== undefined && state.idle && !state.dying && process.exitCode === undefined) {
        process.exitCode = EXIT_UNSETTLED;
        writeAll(2, BufferFrom(`Warning: Detected unsettled top-level await at ${state.unsettled}\n`));
      }
      // Who listens as well may still change the code; node tells of an error after this; and the launcher sees the end.
      if (state.dying || countListeners("exit") > 1) return;
      const status = (process.exitCode ?? code) & 0xff;
      try {
        writeAll(EVENTS, BufferFrom(`\n{"nonce":${state.quotedNonce},"event":"done","exit":${status}}\n`));
        standStill();
      } catch {
        // A program that has broken so much, or has closed that descriptor, ends as it does: the launcher sees it.
      }
    });
    return state;
  }

  // Until the daemon ends it, behind its answer, or is gone: our own end would take the processor from that.
  function standStill() {
    const byte = BufferFrom(" ");
    for (;;) {
      try {
        readSync(REQUESTS, byte);
        return;
      } catch (error) {
        if (error.code !== "EAGAIN") return;
        nap(STANDING_MS);
      }
    }
  }

  // A byte-order mark goes; the first line of a script is no comment to V8 where it is the body of a function.
  function withoutMark(code) {
    const bare = code.charCodeAt(0) === 0xfeff ? code.slice(1) : code;
    return bare.startsWith("#!") ? `//${bare.slice(2)}` : bare;
  }

  // What nobody caught, as node reports it; thrown from here, our own line would be shown as its place.
  function reject(error) {
    if (error instanceof Misspelt) {
      process.stderr.write(`${error.text}\n\nNode.js ${process.version}\n`);
      process.exitCode = 1;
      return;
    }
    if (isError(error) && typeof error.stack === "string") {
      const lines = error.stack.split("\n");
      const ours = lines.findIndex((line) => OWN_FRAME.test(line)); // what lies below it as well
      const value = (ours < 0 ? lines : lines.slice(0, ours)).join("\n");
      Reflect.defineProperty(error, "stack", { value, configurable: true, writable: true, enumerable: false });
    }
    Promise.reject(error);
  }

  const OWN_FRAME = new RegExp(`^\\s+at .*${__filename.replace(/[^\w/]/g, "\\$&")}`);

  // Compiles the code as node would a file of this name: as CommonJS, and as a module where it can only be that. One
  // that awaits at its top without being a module gets the names of CommonJS all the same.
  function compile(code, folder, extension) {
    const filename = path.join(folder, `main${extension}`);
    const useDefault = extension === ".ts" ? undefined : vm.constants?.USE_MAIN_CONTEXT_DEFAULT_LOADER;
    const importModuleDynamically = useDefault ?? ((name, _, attributes) => loadLater(name, filename, attributes));
    const options = { filename, importModuleDynamically };
    const common = (run, isAsync) => ({ format: "commonjs", code, filename, run, isAsync });
    const awaiting = () => {
      const head = `(async function (${COMMON_NAMES.join(", ")}) { `;
      const script = new vm.Script(`${head}${code}\n})`, { ...options, columnOffset: -head.length });
      return common(script.runInThisContext(), true);
    };
    importer = importerOf(folder, path.basename(filename));
    let failure;
    try {
      const run = vm.compileFunction(code, COMMON_NAMES, options);
      if (!MAY_AWAIT.test(code)) return common(run, false);
      try {
        return awaiting();
      } catch {
        return common(run, false);
      }
    } catch (error) {
      failure = error;
    }
    if (!IS_MODULE.test(failure.message) && /\bawait\b/.test(code)) {
      try {
        return awaiting();
      } catch (error) {
        // Said of what is wrong besides; but an end that came too early is none behind our own brackets.
        if (failure.message !== "Unexpected end of input") failure = error;
      }
    }
    if (!IS_MODULE.test(failure.message) || SourceTextModule === undefined) throw failure;
    return compileModule(code, path.join(folder, extension === ".js" ? "main.mjs" : `main${extension}`));
  }

  function startCommon(main, folder, state, begin) {
    const own = new Module(main.filename, null);
    own.id = ".";
    own.filename = main.filename;
    own.paths = Module._nodeModulePaths(folder);
    process.mainModule = own; // require.main of everything that is loaded from now on
    const values = [own.exports, Module.createRequire(main.filename), own, main.filename, folder];
    if (!main.isAsync) return begin(enterMain, main.run, own.exports, values);
    return begin(enterMain, main.run, own.exports, values, (promise) => untilDone(promise, main, state));
  }

  // Holds nothing: node ends when nothing is left that could settle it, and then we say so.
  function untilDone(promise, main, state) {
    state.unsettled = main.url ?? main.filename;
    apply(then, promise, [() => { state.unsettled = undefined; }]);
  }

  // --- modules -------------------------------------------------------------------------------------------------------

  function compileModule(code, filename) {
    importer = importerOf(path.dirname(filename), path.basename(filename));
    const url = pathToFileURL(filename).href;
    const { resolve } = Module.createRequire(filename);
    const [major, minor] = process.versions.node.split(".").map(Number);
    const initializeImportMeta = (meta) => {
      if (major > 20 || (major === 20 && minor >= 11)) Object.assign(meta, { dirname: path.dirname(filename), filename });
      if (major > 24 || (major === 24 && minor >= 2)) meta.main = true;
      meta.resolve = (name) => resolveUrl(`${name}`, url, resolve);
      meta.url = url;
    };
    const importModuleDynamically = (name, _, attributes) => loadLater(name, filename, attributes);
    const module = hushed(() => new SourceTextModule(code, { identifier: url, initializeImportMeta, importModuleDynamically }));
    return { format: "module", code, filename, url, module };
  }

  function resolveUrl(name, parent, resolve) {
    if (Module.isBuiltin?.(name) ?? Module.builtinModules.includes(name)) return name.startsWith("node:") ? name : `node:${name}`;
    if (/^([a-z][a-z\d+.-]*:|\.{0,2}\/)/i.test(name)) return new URL(name, parent).href;
    return pathToFileURL(resolve(name)).href;
  }

  function synthetic(identifier, space) {
    const names = Object.keys(space);
    const give = function () {
      for (const name of names) this.setExport(name, space[name]);
    };
    return hushed(() => new SyntheticModule(names, give, { identifier }));
  }

  // import() in a program. Files of TypeScript are CommonJS here.
  async function loadLater(name, filename, attributes) {
    if (filename.endsWith(".ts") && /^\.{0,2}\//.test(name)) {
      const load = Module.createRequire(filename);
      let found;
      try {
        found = load.resolve(name);
      } catch {
        // Then the loader says what is missing.
      }
      if (found !== undefined && /\.c?ts$/.test(found)) {
        const exports = load(found);
        const module = synthetic(found, { default: exports, ...exports });
        await module.link(() => {});
        await module.evaluate();
        return module;
      }
    }
    return importer(name, attributes === undefined || Object.keys(attributes).length === 0 ? undefined : { with: attributes });
  }

  // What a program imports comes from node's own loader, in the order of the imports; the program sees the values that
  // the names have when it starts.
  async function startModule(main, folder, state) {
    let before = null;
    const load = async (name, attributes) => {
      await before;
      return loadLater(name, main.filename, attributes);
    };
    try {
      await main.module.link(async (name, _, extra) => {
        before = load(name, extra?.attributes ?? extra?.assert);
        const space = await before;
        return space instanceof SyntheticModule ? space : synthetic(name, space);
      });
    } catch (error) {
      return reject(error);
    }
    return later(enterMain, main.module.evaluate, main.module, [], (promise) => untilDone(promise, main, state));
  }

  // --- programs that start themselves again --------------------------------------------------------------------------

  // The program has no file. Where it hands its own name to a thread or a process it gets one that lies in a folder of
  // its own, beside links to what lies in the working directory.
  function letStartItself(main, folder) {
    let copy;
    const isOwn = (value) => value === main.filename || (main.url !== undefined && StringOf(value) === main.url);
    const onDisk = () => {
      if (copy !== undefined) return copy;
      const place = fs.mkdtempSync(path.join(os.tmpdir(), "main-"));
      for (const entry of fs.readdirSync(folder)) fs.symlinkSync(path.join(folder, entry), path.join(place, entry));
      copy = path.join(place, main.format === "module" ? "main.mjs" : "main.js");
      fs.rmSync(copy, { force: true }); // somebody's file of this name
      fs.writeFileSync(copy, main.isAsync ? `(async () => { ${main.code}\n})()` : main.code);
      return copy;
    };
    const threads = require("worker_threads");
    threads.Worker = class Worker extends threads.Worker {
      constructor(file, options) {
        super(isOwn(file) ? onDisk() : file, options);
      }
    };
    const children = require("child_process");
    for (const name of ["fork", "spawn", "spawnSync", "execFile", "execFileSync"]) {
      const start = children[name];
      children[name] = function (...values) {
        const given = values.map((value) => (isOwn(value) ? onDisk() : Array.isArray(value) ? value.map((each) => (isOwn(each) ? onDisk() : each)) : value));
        return apply(start, this, given);
      };
      Object.defineProperty(children[name], "name", { value: name });
    }
    Module.syncBuiltinESMExports();
  }

  // --- TypeScript ----------------------------------------------------------------------------------------------------

  const libraries = new Map();

  // A library from the folder that set-up made, from the code that V8 made of it there. `undefined` where there is none.
  function library(name) {
    if (libraries.has(name)) return libraries.get(name);
    let exports;
    try {
      const filename = path.join(LIBRARIES, `${name}.js`);
      const source = fs.readFileSync(filename, "latin1");
      let cachedData;
      try {
        cachedData = fs.readFileSync(path.join(LIBRARIES, `${name}.cache`));
      } catch {
        // It works without, only slower.
      }
      const script = new vm.Script(`(function (exports, require, module, __filename, __dirname) { ${source}\n})`, { filename, cachedData });
      const own = { exports: {} };
      apply(script.runInThisContext(), own.exports, [own.exports, Module.createRequire(filename), own, filename, LIBRARIES]);
      exports = own.exports;
    } catch (error) {
      if (error.code !== "ENOENT") throw error;
    }
    libraries.set(name, exports);
    return exports;
  }

  // For an interpreter that is kept for a program: its road, gone once, and the library of most of those in TypeScript.
  // There are no cells any more behind this.
  function warmPrograms() {
    const sucrase = library("sucrase");
    const sample = "import { a } from 'b'; interface I { x: number }\nenum E { A }\nclass C<T> { constructor(private c: T) {} }\nconst d = (e: I): string => `${a}` as string;";
    if (sucrase !== undefined) compile(bySucrase(sucrase, sample), cwd(), ".ts");
    // Twice, since the second time V8 makes machine code of a regular expression.
    for (let time = 0; time < 8; time++) runProgram({ code: "console.log(1)" }, "", (run, ...values) => run(...values));
    writeSync(1, BufferFrom("")); // what is muted does not come so far
    process.argv.length = 1;
    process.mainModule = undefined;
  }

  // Sucrase takes away types and keeps every line where it was. It cannot do these: namespaces that hold code (it leaves
  // them out), decorators, and what this node does not know yet (it leaves them in).
  const HAS_NAMESPACE = /(^|[\n;{}])\s*(export\s+)?(namespace|module)\s+[\w$.]+\s*\{/;

  function compileTypeScript(code, folder) {
    const sucrase = library("sucrase");
    if (sucrase === undefined) throw new Misspelt("TypeScript is not available: its transform library is not installed (scripts/setup.sh installs it)");
    resolveTypeScript();
    const source = withoutMark(code);
    let failure;
    if (!HAS_NAMESPACE.test(source)) {
      try {
        return compile(bySucrase(sucrase, source), folder, ".ts");
      } catch (error) {
        failure = error;
      }
    }
    const typescript = library("typescript");
    if (typescript === undefined) throw failure ?? new Misspelt("TypeScript's namespaces need its compiler, which is not installed (scripts/setup.sh installs it)");
    return compile(byTypeScript(typescript, source, path.join(folder, "main.ts")), folder, ".ts");
  }

  // CommonJS is what TypeScript makes of imports by default; a program that asks for `import.meta` is a module.
  const isModuleOnly = (source) => /\bimport\s*\.\s*meta\b/.test(source);

  function bySucrase(sucrase, source) {
    const transforms = isModuleOnly(source) ? ["typescript"] : ["typescript", "imports"];
    return sucrase.transform(source, { transforms, disableESTransforms: true, preserveDynamicImport: true }).code;
  }

  // The real thing takes a quarter of a second. Its output keeps its lines by `onTheirLines`.
  function byTypeScript(typescript, source, filename) {
    const { ModuleKind, ScriptTarget } = typescript;
    // Which of the two kinds of decorators, nobody says. Those of old are known by what they are called with.
    const experimentalDecorators = /\b(PropertyDescriptor|TypedPropertyDescriptor|propertyKey|descriptor|reflect-metadata)\b|[(,]\s*@\w/.test(source);
    const { outputText, sourceMapText, diagnostics } = typescript.transpileModule(source, {
      fileName: filename,
      reportDiagnostics: true,
      compilerOptions: {
        module: isModuleOnly(source) ? ModuleKind.ESNext : ModuleKind.CommonJS,
        target: ScriptTarget.ES2022,
        esModuleInterop: true,
        experimentalDecorators,
        emitDecoratorMetadata: experimentalDecorators,
        removeComments: true,
        sourceMap: true,
        newLine: typescript.NewLineKind.LineFeed,
      },
    });
    if (diagnostics.length > 0) throw misspelt(typescript, source, filename, diagnostics[0]);
    return onTheirLines(typescript, outputText, parse(sourceMapText).mappings);
  }

  // A program that cannot be compiled, with the whole text to print.
  class Misspelt {
    constructor(text) {
      this.text = text;
    }
  }

  function misspelt(typescript, source, filename, { start, messageText, code }) {
    const message = `${typescript.flattenDiagnosticMessageText(messageText, "\n")} (TS${code})`;
    const before = source.slice(0, start).split("\n");
    const column = before[before.length - 1].length;
    const line = source.split("\n")[before.length - 1];
    return new Misspelt(`${filename}:${before.length}\n${line.slice(0, 500)}\n${" ".repeat(Math.min(column, 500))}^\n\nSyntaxError: ${message}`);
  }

  // The source line that each line of the output begins with, as far as the map says.
  function sourceLines(mappings) {
    const digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let line = 0;
    return mappings.split(";").map((segments) => {
      let first;
      for (const segment of segments === "" ? [] : segments.split(",")) {
        const fields = [];
        let value = 0;
        let shift = 0;
        for (const digit of segment) {
          const bits = digits.indexOf(digit);
          value += (bits & 31) << shift;
          shift += 5;
          if (bits < 32) {
            fields.push(value & 1 ? -(value >> 1) : value >> 1);
            value = shift = 0;
          }
        }
        if (fields.length > 2) {
          line += fields[2];
          first ??= line;
        }
      }
      return first;
    });
  }

  // The output with each of its lines on the line that it came from, as far as their order allows. Its printer ends
  // every statement with a semicolon, so that a line's end means nothing outside a literal.
  function onTheirLines(typescript, output, mappings) {
    const wanted = sourceLines(mappings);
    const inLiteral = new Set();
    const file = typescript.createSourceFile("output.js", output, typescript.ScriptTarget.Latest, false, typescript.ScriptKind.JS);
    const lineOf = (at) => file.getLineAndCharacterOfPosition(at).line;
    const visit = (node) => {
      const { SyntaxKind } = typescript;
      if ([SyntaxKind.TemplateHead, SyntaxKind.TemplateMiddle, SyntaxKind.TemplateTail, SyntaxKind.NoSubstitutionTemplateLiteral, SyntaxKind.StringLiteral].includes(node.kind)) {
        for (let line = lineOf(node.getStart(file)) + 1; line <= lineOf(node.end); line++) inLiteral.add(line);
      }
      typescript.forEachChild(node, visit);
    };
    visit(file);
    let text = "";
    let at = 0; // the line that `text` ends on
    for (const [index, line] of output.split("\n").entries()) {
      if (line.startsWith("//# sourceMappingURL=")) continue;
      if (index > 0) {
        const ahead = inLiteral.has(index) ? 1 : Math.max(0, (wanted[index] ?? at) - at);
        text += ahead === 0 ? " " : "\n".repeat(ahead);
        at += ahead;
      }
      text += line;
    }
    return text;
  }

  // Files of TypeScript beside the program: `./util` and `./util.js` both mean `util.ts`.
  function resolveTypeScript() {
    const load = (module, filename) => {
      const source = withoutMark(fs.readFileSync(filename, "utf8"));
      const [sucrase, typescript] = [library("sucrase"), library("typescript")];
      const simple = typescript === undefined || !(HAS_NAMESPACE.test(source) || /^\s*@\w/m.test(source));
      module._compile(simple ? sucrase.transform(source, { transforms: ["typescript", "imports"], disableESTransforms: true, preserveDynamicImport: true }).code : byTypeScript(typescript, source, filename), filename);
    };
    Module._extensions[".ts"] = load;
    Module._extensions[".cts"] = load;
    const resolve = Module._resolveFilename;
    Module._resolveFilename = function (request, ...rest) {
      try {
        return apply(resolve, this, [request, ...rest]);
      } catch (error) {
        if (error.code !== "MODULE_NOT_FOUND" || !/^\.{0,2}\/.*\.js$/.test(request)) throw error;
        return apply(resolve, this, [request.replace(/\.js$/, ".ts"), ...rest]);
      }
    };
  }

  // --- protocol ----------------------------------------------------------------------------------------------------

  let running = null; // the cell that runs: { request, refused, rejections, finished, abandon }
  let requests; // the socket that request lines come from
  const waiting = [];

  function enter(folder) {
    try {
      chdir(folder);
      if (ending === undefined) settle(folder); // a program has names of its own
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
    return serve(cell);
  }

  function serve(cell) {
    const { program, nonce } = cell.request;
    if (program === undefined || program === null) return runCode(cell);
    return runProgram(program, StringOf(nonce));
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
        if (cell.request.programs === true) warmPrograms();
        recorder.muted = false;
        takeOrder();
        cell.rejections.clear();
        serve(cell);
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
    writeAll(EVENTS, BufferFrom(doneFrame(StringOf(cell.request.nonce), { result, error }, takeOrder(), cell.refused)));
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
  const watchers = {
    unhandledRejection(reason, promise) {
      if (running === null) complain("Unhandled rejection", reason);
      else running.rejections.set(promise, reason);
    },
    rejectionHandled(promise) {
      running?.rejections.delete(promise);
    },
    uncaughtException(error) {
      if (running === null || recorder.muted) complain("Uncaught", error);
      else finish(running, { result: null, error: describe(error) }); // what the cell awaits may never come now
    },
    beforeExit() {
      requests.ref();
      running?.abandon?.();
    },
  };

  function watchErrors() {
    for (const [event, watcher] of Object.entries(watchers)) process.on(event, watcher);
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
  Object.defineProperty(globalThis, Symbol.for(IMPORT), { value: (...args) => importer(...args), configurable: true, enumerable: false });
  watchErrors();
  listen();
})();
