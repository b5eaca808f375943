// Makes the folder that harness.js loads its TypeScript transforms from: each library as one file, and beside it what
// V8 compiled of it, so that an interpreter neither parses it nor compiles what it calls.
//
//   node scripts/typescript_library.js NODE_MODULES OUT
"use strict";

const fs = require("fs");
const path = require("path");
const vm = require("vm");
const Module = require("module");

const [modules, out] = process.argv.slice(2).map((each) => path.resolve(each));

// As harness.js wraps it: the cache belongs to this text.
const wrapped = (source) => `(function (exports, require, module, __filename, __dirname) { ${source}\n})`;

// What Sucrase loads and a transform of ours never uses: the check of its options and source maps.
const UNUSED = {
  "ts-interface-checker": "module.exports = new Proxy({}, { get: (_, name) => () => (name === 'createCheckers' ? { Options: { strictCheck() {} } } : {}) });",
  "@jridgewell/gen-mapping": "",
};

// Every file that `entry` comes to require, in one text that needs no file.
function bundle(entry) {
  const numbers = new Map();
  const parts = [];
  const number = (filename) => {
    if (numbers.has(filename)) return numbers.get(filename);
    const own = parts.push("") - 1;
    numbers.set(filename, own);
    const load = Module.createRequire(filename);
    const source = fs.readFileSync(filename, "utf8").replace(/\brequire\((["'])([\w@./-]+)\1\)/g, (whole, _, name) => {
      if (Module.builtinModules.includes(name.replace(/^node:/, ""))) return whole;
      if (name in UNUSED) {
        parts.push(`function (module, exports) { ${UNUSED[name]} }`);
        return `load(${parts.length - 1})`;
      }
      let found;
      try {
        found = load.resolve(name);
      } catch {
        return whole; // text in a comment
      }
      return `load(${number(found)})`;
    });
    parts[own] = `function (module, exports, load, require) { ${source}\n}`;
    return own;
  };
  number(entry);
  const loader = "const loaded = []; const load = (at) => { if (loaded[at] === undefined) { loaded[at] = { exports: {} }; parts[at](loaded[at], loaded[at].exports, load, require); } return loaded[at].exports; };";
  return withoutComments(`const parts = [${parts.join(",\n")}];\n${loader}\nmodule.exports = load(0);\n`);
}

// V8 keeps the text for as long as the code lives. What is a literal over several lines in Sucrase is code as well.
function withoutComments(source) {
  const typescript = require(path.join(modules, "typescript"));
  const compilerOptions = { module: typescript.ModuleKind.None, target: typescript.ScriptTarget.ESNext, removeComments: true };
  const { outputText } = typescript.transpileModule(source, { fileName: "bundle.js", compilerOptions });
  return outputText.replace(/^ +/gm, "");
}

// Everything that programs of many kinds make it call.
const SAMPLE = `
import fs, { readFileSync, type Stats } from "fs";
import * as path from "path";
import type { URL } from "url";
import events = require("events");
export type Shape = { kind: "circle"; r: number } | { kind: "square"; side: number };
interface Named<T extends object = {}> extends Record<string, unknown> { readonly name: string; value?: T; call(a: number): void }
enum Colour { Red, Green = "g", Blue = 1 << 2 }
const enum Small { A = 1 }
declare const outside: number;
declare module "x" { export const y: number; }
abstract class Base<T> { static count = 0; #secret = 1; protected items: T[] = []; declare later: string; constructor(private readonly id: number, public label?: string) {} abstract area(): number; get size(): number { return this.items.length; } set size(v) { this.#secret = v!; } }
class Circle extends Base<string> implements Named { name = "c"; [key: string]: any; constructor(public r: number) { super(1); } area(): number { return Math.PI * this.r ** 2; } override toString(): string { return \`\${this.name} \${this.area().toFixed(2)}\`; } call(a: number): void {} async *each(): AsyncGenerator<number> { yield 1; } }
function over(a: string): string; function over(a: number): number; function over(a: any): any { return a; }
function assert(x: unknown): asserts x is string { if (typeof x !== "string") throw new TypeError("no"); }
const identity = <T,>(x: T): T => x, pick = <T, K extends keyof T>(o: T, ...keys: K[]) => keys.map((k) => o[k]);
type Deep<T> = T extends (infer U)[] ? Deep<U> : { [P in keyof T]?: Deep<T[P]> };
let table = new Map<string, number[]>([["a", [1, 2]]]), opt = table.get("a")?.[0] ?? 0, big = 10n, re = /x+/giu, [x, , ...rest] = [1, 2, 3], { q = 5, ...others } = { q: 1, z: 2 } as { q: number; z?: number };
label: for (const [k, v] of table) { for (let i = 0; i < v.length; i++) { if (i % 2 === 0) continue label; else break; } }
switch (opt as number) { case 1: { opt += 1; break; } default: opt ||= 2; }
try { throw new Error("e", { cause: 1 }); } catch (e: unknown) { console.log((e as Error).message, e instanceof Error); } finally { void 0; }
do { opt--; } while (opt > 0); while (false) {}
const wait = (ms: number): Promise<void> => new Promise((r) => setTimeout(r, ms));
(async () => { await wait(1); for await (const n of new Circle(1).each()) console.log(n, identity<string>("s"), pick({ a: 1 }, "a"), Colour.Red, Small.A); })();
const settings = { a: 1, get b() { return 2; }, async c() {}, ["d" + 1]: 3, fs, readFileSync } satisfies object;
export default settings; export { identity as id, type Named }; export * from "os"; export const shape: Shape = { kind: "circle", r: 1 };
console.log(<number>opt, fs.existsSync("/"), path.join("a", "b"), events.once, typeof outside, x! + 1, delete (others as any).z, new.target === undefined ? 1 : 2);
`;
const DECORATED = `namespace Geo { export const one = 1; export function f(): number { return one; } }
function log(value: any, context: ClassMethodDecoratorContext) { return function (this: any, ...args: any[]) { return value.apply(this, args); }; }
class A { @log m(a: number): number { return a + Geo.f(); } accessor z = 1; }
console.log(new A().m(1));`;

const WARM = {
  sucrase(library) {
    const options = { transforms: ["typescript", "imports"], disableESTransforms: true, preserveDynamicImport: true };
    library.transform(SAMPLE.replace("new.target === undefined ? 1 : 2", "1"), options);
    library.transform("const a: number = 1", { ...options, transforms: ["typescript"] });
  },
  typescript(library) {
    const { ModuleKind, ScriptTarget } = library;
    for (const source of [DECORATED, DECORATED.replace("value: any, context: ClassMethodDecoratorContext", "target: any, key: string, d: PropertyDescriptor")]) {
      const compilerOptions = { module: ModuleKind.CommonJS, target: ScriptTarget.ES2022, esModuleInterop: true, experimentalDecorators: source.includes("PropertyDescriptor"), emitDecoratorMetadata: source.includes("PropertyDescriptor"), removeComments: true, sourceMap: true };
      library.transpileModule(source, { fileName: "main.ts", reportDiagnostics: true, compilerOptions });
    }
    const tree = library.createSourceFile("output.js", "const a = `x${1}y`;", ScriptTarget.Latest, false, library.ScriptKind.JS);
    library.forEachChild(tree, () => {});
  },
};

const SOURCES = {
  sucrase: () => bundle(path.join(modules, "sucrase", "dist", "index.js")),
  typescript: () => fs.readFileSync(path.join(modules, "typescript", "lib", "typescript.js"), "utf8"),
};

fs.mkdirSync(out, { recursive: true });
for (const [name, read] of Object.entries(SOURCES)) {
  // Plain ASCII: V8 keeps it in half the memory, and it is read in a tenth of the time.
  const source = read().replace(/[^\0-\x7f]/g, (unit) => `\\u${unit.charCodeAt(0).toString(16).padStart(4, "0")}`);
  const filename = path.join(out, `${name}.js`);
  fs.writeFileSync(filename, source);
  const script = new vm.Script(wrapped(source), { filename });
  const own = { exports: {} };
  script.runInThisContext().call(own.exports, own.exports, Module.createRequire(filename), own, filename, out);
  WARM[name](own.exports);
  fs.writeFileSync(path.join(out, `${name}.cache`), script.createCachedData());
}
