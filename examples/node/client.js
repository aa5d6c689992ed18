// Loads an adapter, streams an output of it, and prints all life-cycle events: docs/wire.md in use.
//   node client.js .loradock reverse 'hello>'
import { randomBytes } from "node:crypto";
import { decode, encode } from "@msgpack/msgpack";
import { Dealer, Subscriber } from "zeromq";

const [directory, adapter, prompt] = process.argv.slice(2);
const [requests, events] = [new Dealer({ receiveTimeout: 1000 }), new Subscriber()];
// Magic and version, the channel, the controller's epoch (1: not known yet), seq (unused in requests)
// and this client's token.
const head = Buffer.concat([Buffer.from("LD\x02Q"), Buffer.alloc(16), randomBytes(12)]);
head.writeBigUInt64BE(1n, 4);
let [count, next] = [0, 1];

function read(frame, channel) {
  const prefix = frame.toString("latin1", 0, 4);
  if (prefix !== `LD\x02${channel}`) throw new Error(`not a frame of channel ${channel}: ${prefix}`);
  return { seq: Number(frame.readBigUInt64BE(12)), body: decode(frame.subarray(20)) };
}

// Whether a frame of replies is from a later start of the controller than all before.
function isRestart(frame) {
  if (frame.readBigUInt64BE(4) <= head.readBigUInt64BE(4)) return false;
  frame.copy(head, 4, 4, 12);
  return true;
}

function onTimeout(error) {
  if (error.code !== "EAGAIN") throw error;
  return [];
}

// Yields the replies to one request. It is sent again under its id, and executed once.
async function* ask(kind, ...fields) {
  const id = `${++count}`;
  const body = encode([[kind, id, ...fields]]);
  const send = () => requests.send(Buffer.concat([head, body]));
  await send();
  for (;;) {
    const [received] = await requests.receive().catch(onTimeout);
    if (!received || isRestart(received)) await send();
    const isEarlier = received?.compare(head, 4, 12, 4, 12) < 0;
    for (const [reply, of, ...values] of received ? read(received, "A").body : []) {
      if (of !== id || (isEarlier && reply === "Refused")) continue;
      if (reply === "Refused") throw new Error(`${values[0]}: ${values[1]}`);
      yield [reply, ...values];
      if (reply !== "TokensStreamed") return;
    }
  }
}
const answer = async (...request) => (await ask(...request).next()).value;

// Yields each event once and in order; those that the subscription has missed are fetched.
async function* follow() {
  for (;;) {
    const [frame] = await events.receive();
    const { seq, body } = read(frame, "E");
    while (next <= seq) {
      const isNext = body.length > 0 && body[0][0] === next;
      const [reply, found] = isNext ? ["Subscribed", body] : await answer("FetchEvents", next);
      if (reply === "EventsTooOld") next = found;
      else for (const [number, , event] of found) if (number === next) yield [next++, ...event];
    }
  }
}

events.connect(`ipc://${directory}/run/events.sock`);
events.subscribe("LD\x02E");
requests.connect(`ipc://${directory}/run/requests.sock`);
const [, name, state] = await answer("LoadAdapter", adapter);
console.log(`loaded: ${name} is ${state}`);
let tokens = 0;
for await (const [reply, ...values] of ask("Generate", adapter, prompt, [32])) {
  const [offset, ids, text] = values;
  if (reply === "GenerationDone" && tokens < values[3]) throw new Error("output was lost");
  if (reply === "GenerationDone") console.log(`\n${reply}: ${values[1]}, ${tokens} tokens`);
  else if (offset === tokens) process.stdout.write(text), (tokens += ids.length);
}
const [, , newest] = await answer("ListAdapters");
for await (const event of follow()) if (console.log(...event), event[0] >= newest) break;
requests.close(), events.close();
