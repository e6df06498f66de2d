// trace_processor.mjs FOLDER TRACE SQL…: loads a trace into Perfetto's trace_processor, as its web page does, and prints the
// rows of each query as a line of JSON. FOLDER is that of a release of the page, with engine_bundle.js and
// trace_processor.wasm.
//
// The engine is a web worker that is given a port, and speaks trace_processor.proto's TraceProcessorRpc over it.
import fs from "node:fs";
import path from "node:path";
import vm from "node:vm";

const [folder, trace, ...queries] = process.argv.slice(2);

// ---- protobuf, as far as it is needed

function varint(value) {
  const bytes = [];
  for (let rest = BigInt(value); ; rest >>= 7n) {
    if (rest < 128n) return Buffer.from([...bytes, Number(rest)]);
    bytes.push(Number(rest & 127n) | 128);
  }
}

const bytes = (field, value) => Buffer.concat([varint((field << 3) | 2), varint(value.length), value]);
const number = (field, value) => Buffer.concat([varint(field << 3), varint(value)]);

/** Fields of a message: [number, value], a BigInt or the bytes. */
function* fields(buffer) {
  let at = 0;
  const read = () => {
    for (let value = 0n, shift = 0n; ; shift += 7n) {
      const byte = buffer[at++];
      value |= BigInt(byte & 127) << shift;
      if (byte < 128) return value;
    }
  };
  while (at < buffer.length) {
    const tag = Number(read());
    const [field, kind] = [tag >> 3, tag & 7];
    if (kind === 0) yield [field, read()];
    else if (kind === 1) yield [field, buffer.subarray(at, (at += 8))];
    else if (kind === 2) {
      const length = Number(read());
      yield [field, buffer.subarray(at, (at += length))];
    } else throw new Error(`wire type ${kind}`);
  }
}

function* packed(buffer) {
  let [value, shift] = [0n, 0n];
  for (const byte of buffer) {
    value |= BigInt(byte & 127) << shift;
    shift += 7n;
    if (byte < 128) {
      yield value;
      [value, shift] = [0n, 0n];
    }
  }
}

// ---- the engine

globalThis.self = globalThis;
globalThis.WorkerGlobalScope = class {};
globalThis.importScripts = () => {};
globalThis.location = { href: "http://localhost/engine_bundle.js", pathname: "/engine_bundle.js" };
globalThis.XMLHttpRequest = class {
  open(_method, name) {
    this.file = path.join(folder, path.basename(String(name)));
  }
  send() {
    this.status = 200;
    this.response = new Uint8Array(fs.readFileSync(this.file)).buffer;
  }
};
// What it says of itself is not asked for.
console.log = console.info = console.warn = console.error = () => {};
const { process: node } = globalThis;
globalThis.process = undefined;
vm.runInThisContext(fs.readFileSync(path.join(folder, "engine_bundle.js"), "utf8"), { filename: "engine_bundle.js" });
globalThis.process = node;

const { port1: port, port2: theirs } = new MessageChannel();
globalThis.onmessage({ data: theirs });

const APPEND = 1;
const FINALIZE = 2;
const QUERY = 3;
let sequence = 0;

function ask(method, argument = Buffer.alloc(0)) {
  const rpc = Buffer.concat([number(1, ++sequence), number(2, method), argument]);
  port.postMessage(new Uint8Array(bytes(1, rpc)));
}

const answers = [];
let wake = () => {};
port.on("message", (data) => {
  for (const [, answer] of fields(Buffer.from(data))) answers.push(new Map(fields(answer)));
  wake();
});

async function answer() {
  while (answers.length === 0) await new Promise((resolve) => (wake = resolve));
  const got = answers.shift();
  if (got.has(5)) throw new Error(`trace_processor: ${got.get(5)}`);
  return got;
}

async function query(sql) {
  ask(QUERY, bytes(103, bytes(1, Buffer.from(sql))));
  const [columns, values] = [[], []];
  for (let last = false; !last; ) {
    const result = (await answer()).get(203);
    for (const [field, value] of fields(result)) {
      if (field === 1) columns.push(value.toString());
      else if (field === 2 && value.length > 0) throw new Error(`${sql}: ${value}`);
      else if (field === 3) last = cells(value, values);
    }
  }
  const rows = [];
  for (let at = 0; at < values.length; at += columns.length)
    rows.push(Object.fromEntries(columns.map((name, i) => [name, values[at + i]])));
  return rows;
}

/** Adds the values of a CellsBatch; whether it is the last one. */
function cells(batch, values) {
  const [kinds, integers, floats] = [[], [], []];
  let [strings, last] = [[], false];
  for (const [field, value] of fields(batch)) {
    if (field === 1) kinds.push(...packed(value));
    else if (field === 2) integers.push(...packed(value));
    else if (field === 3) for (let at = 0; at < value.length; at += 8) floats.push(value.readDoubleLE(at));
    else if (field === 5) strings = value.toString().split("\0");
    else if (field === 6) last = value !== 0n;
  }
  for (const kind of kinds) {
    if (kind === 1n) values.push(null);
    else if (kind === 2n) values.push(Number(BigInt.asIntN(64, integers.shift())));
    else if (kind === 3n) values.push(floats.shift());
    else if (kind === 4n) values.push(strings.shift());
    else throw new Error(`cell of kind ${kind}`);
  }
  return last;
}

ask(APPEND, bytes(101, fs.readFileSync(trace)));
await answer();
ask(FINALIZE);
await answer();
for (const sql of queries) process.stdout.write(JSON.stringify(await query(sql)) + "\n");
process.exit(0);
