// A frontend in JavaScript, of token ids alone: written from protos/engine-session.md, with @grpc/grpc-js and
// @grpc/proto-loader. It has the feature resume, and the text of token 5 is "w5 ".
//
//     node frontend.js FOLDER_OF_PROTOS ENGINE...
//
// It serves Generate at an address that it prints as JSON, until SIGTERM.

"use strict";

const crypto = require("node:crypto");
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const REVISION = 1;
const HANDSHAKE_MS = 10_000;
const SILENCE_MS = 1500;
const RESUME_LIMIT_MS = 1000;
const RESUME_ATTEMPT_MS = 500;
const RETRY_MS = 50;
const INCOMPATIBLE_RETRY_MS = 5000;
const STEP_BUDGET_MS = 5000; // of an engine that announces none
const WAIT_LIMIT_MS = 10_000; // of a request for an engine
const GOODBYE_LIMIT_MS = 1000;
const MAX_MESSAGE_BYTES = 64 * 1024 * 1024;
const FINAL_REJECTIONS = [grpc.status.INVALID_ARGUMENT, grpc.status.UNIMPLEMENTED];
const CHANNEL_OPTIONS = {
  "grpc.use_local_subchannel_pool": 1,
  "grpc.keepalive_time_ms": 500,
  "grpc.keepalive_timeout_ms": 1500,
  "grpc.initial_reconnect_backoff_ms": 100,
  "grpc.max_reconnect_backoff_ms": 500,
  "grpc.max_receive_message_length": MAX_MESSAGE_BYTES,
};

const [folder, ...engines] = process.argv.slice(2);
const protos = grpc.loadPackageDefinition(
  loader.loadSync(["triptych/engine/v1/engine.proto", "triptych/api/v1/inference.proto"], {
    includeDirs: [folder],
    keepCase: true,
    longs: String, // ids and epochs have 64 bits
    enums: String,
    defaults: true,
    oneofs: true,
  }),
).triptych;

// The session is over: the engine has ended it or violates the contract, or it cannot be resumed.
class Void extends Error {}

// The revisions of the two sides do not work together.
class Incompatible extends Error {}

const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
const randomId = () => crypto.randomBytes(16).toString("hex");
const random64 = () => crypto.randomBytes(8).readBigUInt64LE() | 1n;

function pack(values) {
  const column = Buffer.alloc(4 * values.length);
  values.forEach((value, index) => column.writeUInt32LE(value, 4 * index));
  return column;
}

function unpack(column) {
  if (column.length % 4) throw new Void("a column that is not of u32");
  return Array.from({ length: column.length / 4 }, (_, index) => column.readUInt32LE(4 * index));
}

// One output of a client's request.
class Request {
  constructor(prompt, sampling, seed, deadline, output) {
    Object.assign(this, { prompt, sampling, seed, deadline });
    this.client = output; // gets onTokens, onEnd and onError
    this.id = randomId();
    this.attempt = 0;
    this.output = [];
    this.digest = ""; // of the engine that its output is from
    this.hasBegun = false; // at the engine that has it now
    this.isAborted = false;
  }

  entry(handle) {
    const entry = {
      handle,
      request_id: this.id,
      attempt: this.attempt,
      prompt_token_ids: pack(this.prompt),
      output_token_ids: pack(this.output),
      sampling: this.sampling,
      request_seed: this.seed.toString(),
    };
    if (Number.isFinite(this.deadline)) entry.remaining_ms = Math.max(0, Math.round(this.deadline - Date.now()));
    return entry;
  }
}

// The side of one engine: its session, over as many streams as it takes, and the requests that were sent to it.
class EngineLink {
  constructor(frontend, address) {
    this.frontend = frontend;
    this.stub = new protos.engine.v1.EngineCoreService(address, grpc.credentials.createInsecure(), CHANNEL_OPTIONS);
    this.requests = new Map(); // by handle
    this.numHandles = 0;
    this.call = null; // while there is a stream whose hello was answered
    this.ack = null; // of the session
    this.digest = "";
    this.isReady = false; // the engine takes requests
    this.isClosing = false;
  }

  get isUsable() {
    return this.call !== null && this.isReady && this.hungAt === null;
  }

  async run() {
    while (!this.isClosing) {
      let pause = RETRY_MS;
      try {
        await this.runSession();
      } catch (error) {
        if (error instanceof Incompatible) pause = INCOMPATIBLE_RETRY_MS;
        else if (!(error instanceof Void)) throw error;
      }
      this.loseRequests();
      await sleep(pause);
    }
    this.stub.close();
  }

  async runSession() {
    this.sessionId = randomId();
    this.ack = null;
    this.lastSeq = 0;
    this.hungAt = null; // step number
    await this.runStream(null);
    while (this.ack !== null && this.ack.features.includes("resume")) await this.resume();
  }

  // Another stream of the session, to its end. Attempts are made one after the other.
  async resume() {
    const until = Date.now() + RESUME_LIMIT_MS;
    this.isResumed = false;
    while (!this.isResumed) {
      if (Date.now() > until) throw new Void("not resumed in time");
      await this.runStream({ engine_epoch: this.ack.engine_epoch, last_seq: this.lastSeq.toString() });
      await sleep(RETRY_MS);
    }
  }

  // Read one stream to its end; rejects unless the session may be resumed.
  runStream(resume) {
    return new Promise((resolve, reject) => {
      const call = this.stub.Connect();
      let isOver = false;
      const finish = (error) => {
        if (isOver) return;
        isOver = true;
        clearTimeout(timer);
        this.call = null;
        call.cancel();
        if (error) reject(error);
        else resolve();
      };
      // Silence is treated as a break.
      let timer = setTimeout(finish, resume ? RESUME_ATTEMPT_MS : HANDSHAKE_MS);
      call.on("error", () => {}); // its status says it
      call.on("status", (status) => finish(endOf(status)));
      call.on("data", (message) => {
        if (isOver) return;
        clearTimeout(timer);
        timer = setTimeout(finish, SILENCE_MS);
        try {
          if (this.call === null) this.takeAck(call, message, resume);
          else this.take(message);
        } catch (error) {
          finish(error);
        }
      });
      call.write({
        hello: {
          frontend_id: this.frontend.id,
          session_id: this.sessionId,
          frontend_epoch: this.frontend.epoch,
          schema_revision: REVISION,
          features: ["resume"],
          feature_set: { resume: true },
          resume,
        },
      });
    });
  }

  takeAck(call, message, resume) {
    if (message.message !== "hello_ack") throw new Void("the first message is not hello_ack");
    const ack = message.hello_ack;
    if (ack.min_peer_revision > REVISION) throw new Incompatible("a newer engine");
    if (resume !== null && !ack.resume_ok) throw new Void(ack.resume_refusal);
    this.ack = ack;
    this.call = call;
    if (resume === null) {
      this.isReady = false;
      return;
    }
    this.isResumed = true;
    for (const [handle, request] of this.requests) {
      if (!request.hasBegun) this.send({ add: { entries: [request.entry(handle)] } });
      if (request.isAborted) this.sendAbort(handle, request, request.abortReason);
    }
    this.frontend.onReady();
  }

  // What is not sent for want of a stream is sent again when the session is resumed.
  send(message) {
    if (this.call !== null) this.call.write(message);
  }

  sendAbort(handle, request, reason) {
    this.send({ abort: { handles: [handle], attempts: [request.attempt], reason } });
  }

  add(request) {
    const handle = ++this.numHandles;
    request.hasBegun = false;
    this.requests.set(handle, request);
    this.send({ add: { entries: [request.entry(handle)] } });
  }

  abort(request, reason) {
    for (const [handle, running] of this.requests) if (running === request) this.sendAbort(handle, request, reason);
  }

  close() {
    this.isClosing = true;
    this.send({ goodbye: {} });
    if (this.call !== null) this.call.end();
  }

  take(message) {
    const seq = Number(message.seq);
    if (seq !== this.lastSeq + 1) throw new Void(`number ${seq} after ${this.lastSeq}`);
    switch (message.message) {
      case "ready":
        this.isReady = true;
        this.digest = message.ready.fingerprint.digest;
        this.frontend.onReady();
        break;
      case "step":
        this.takeStep(message.step);
        break;
      case "add_rejected":
        this.takeRejection(message.add_rejected);
        break;
      case "already_finished":
        for (const handle of message.already_finished.handles) this.requests.delete(handle);
        break;
      case "heartbeat":
        this.takeHeartbeat(message.heartbeat);
        break;
      case "draining":
        this.isReady = false;
        break;
      case "dead":
        throw new Void(message.dead.reason);
    }
    this.lastSeq = seq;
    this.send({ ack: { last_seq: message.seq } });
  }

  takeStep(step) {
    const handles = unpack(step.handles);
    const tokens = unpack(step.token_ids);
    let counts = step.num_tokens_wide.length ? unpack(step.num_tokens_wide) : [...step.num_tokens];
    if (!counts.length) counts = handles.map(() => 0);
    const numTokens = counts.reduce((sum, count) => sum + count, 0);
    const rows = [...step.first, ...step.finished].map((record) => record.row);
    if (counts.length !== handles.length || numTokens !== tokens.length || rows.some((row) => row >= handles.length)) {
      throw new Void("columns that do not fit");
    }
    for (const { row } of step.first) {
      const request = this.requests.get(handles[row]);
      if (request) request.hasBegun = true;
    }
    let position = 0;
    handles.forEach((handle, row) => {
      const request = this.requests.get(handle);
      const news = tokens.slice(position, (position += counts[row]));
      if (!request || request.isAborted || !news.length) return;
      request.output.push(...news);
      request.digest = this.digest;
      request.client.onTokens(news);
    });
    for (const { row, reason, code, message } of step.finished) {
      const request = this.requests.get(handles[row]);
      this.requests.delete(handles[row]);
      if (!request || request.isAborted) continue;
      if (code) request.client.onError(code, message);
      else request.client.onEnd(reason);
    }
  }

  takeRejection({ handle, status, retry_after_ms }) {
    const request = this.requests.get(handle);
    this.requests.delete(handle);
    if (!request || request.isAborted) return;
    if (FINAL_REJECTIONS.includes(status.code) && !request.output.length) {
      request.client.onError(status.code, status.message);
    } else {
      setTimeout(() => this.frontend.move(request, this), Number(retry_after_ms));
    }
  }

  takeHeartbeat({ has_work, step_number, step_started_age_ms, step_budget_ms }) {
    const isLate = Number(step_started_age_ms || 0) > (Number(step_budget_ms || 0) || STEP_BUDGET_MS);
    if (this.hungAt !== null && BigInt(step_number) > this.hungAt) {
      this.hungAt = null;
      this.frontend.onReady();
    } else if (this.hungAt === null && has_work && isLate) {
      this.hungAt = BigInt(step_number);
      // It may come back, and must not go on with what moves to another engine.
      for (const [handle, request] of this.requests) this.sendAbort(handle, request, "ABORT_REASON_MIGRATED");
      this.loseRequests();
    }
  }

  loseRequests() {
    const lost = [...this.requests.values()].filter((request) => !request.isAborted);
    this.requests.clear();
    for (const request of lost) this.frontend.move(request, this);
  }
}

// What the status of a stream means for its session; nothing where it was cut.
function endOf({ code, details, metadata }) {
  if (code === grpc.status.FAILED_PRECONDITION) return new Incompatible(details);
  const hasReason = metadata.get("grpc-status-details-bin").length > 0;
  const isRefused = code === grpc.status.UNAVAILABLE && details.includes("ECONNREFUSED");
  return code === grpc.status.OK || hasReason || isRefused ? new Void(details) : undefined;
}

class Frontend {
  constructor(addresses) {
    this.id = `javascript-${randomId()}`;
    this.epoch = random64().toString();
    this.waiting = new Set();
    this.turn = 0;
    this.links = addresses.map((address) => new EngineLink(this, address));
    this.running = Promise.all(this.links.map((link) => link.run()));
  }

  // Send a request to an engine that may continue it, and not to `avoid` where there is another one.
  send(request, avoid) {
    if (request.isAborted) return;
    const mayGet = (link) => link.isUsable && (!request.output.length || request.digest === link.digest);
    const able = this.links.filter(mayGet);
    const others = able.filter((link) => link !== avoid);
    const preferred = others.length ? others : able;
    if (preferred.length) {
      preferred[this.turn++ % preferred.length].add(request);
      return;
    }
    this.waiting.add(request);
    setTimeout(() => {
      if (this.waiting.delete(request)) request.client.onError(grpc.status.UNAVAILABLE, "no engine is ready");
    }, WAIT_LIMIT_MS).unref();
  }

  move(request, link) {
    request.attempt += 1;
    this.send(request, link);
  }

  onReady() {
    const waiting = [...this.waiting];
    this.waiting.clear();
    for (const request of waiting) this.send(request);
  }

  abort(request, reason) {
    request.isAborted = true;
    request.abortReason = reason;
    this.waiting.delete(request);
    for (const link of this.links) link.abort(request, reason);
  }

  // Serves the Generate call of a client.
  generate(call) {
    if (call.request.input !== "token_ids") {
      call.emit("error", { code: grpc.status.UNIMPLEMENTED, details: "no input but token_ids is served" });
      return;
    }
    if (call.request.adapter) {
      call.emit("error", { code: grpc.status.UNIMPLEMENTED, details: "adapter is not served" });
      return;
    }
    if (call.request.job_id) {
      call.emit("error", { code: grpc.status.UNIMPLEMENTED, details: "job_id is not served" });
      return;
    }
    const { n, seed, stop = [], ...sampling } = call.request.sampling || {};
    const firstSeed = seed ? BigInt(seed) : random64();
    const open = new Set();
    let position = 0;
    const write = (event) => call.write({ position: (++position).toString(), ...event });
    const close = (request) => {
      open.delete(request);
      if (!open.size) call.end();
    };
    write({ started: {} });
    for (let index = 0; index < Number(n || 1); index++) {
      let text = "";
      const finish = (reason) => {
        write({ finished: { output_index: index, reason } });
        close(request);
      };
      const output = {
        onTokens: (tokens) => {
          for (const token of tokens) {
            text += `w${token} `;
            if (stop.some((one) => text.includes(one))) {
              this.abort(request, "ABORT_REASON_STOP_STRING");
              finish("FINISH_REASON_STOP");
              return;
            }
            write({ delta: { output_index: index, text: `w${token} `, token_ids: [token] } });
          }
        },
        onEnd: finish,
        onError: (code, details) => {
          open.delete(request);
          for (const other of open) this.abort(other, "ABORT_REASON_CLIENT");
          call.emit("error", { code, details });
        },
      };
      const requestSeed = BigInt.asUintN(64, firstSeed + BigInt(index));
      const request = new Request(call.request.token_ids.ids, sampling, requestSeed, +call.getDeadline(), output);
      open.add(request);
    }
    call.on("cancelled", () => {
      for (const request of open) this.abort(request, "ABORT_REASON_CLIENT");
    });
    for (const request of open) this.send(request);
  }
}

const frontend = new Frontend(engines);
const server = new grpc.Server();
server.addService(protos.api.v1.InferenceService.service, { Generate: (call) => frontend.generate(call) });
server.bindAsync("127.0.0.1:0", grpc.ServerCredentials.createInsecure(), (error, port) => {
  if (error) throw error;
  console.log(JSON.stringify({ address: `127.0.0.1:${port}` }));
});
process.on("SIGTERM", async () => {
  server.forceShutdown();
  for (const link of frontend.links) link.close();
  await Promise.race([frontend.running, sleep(GOODBYE_LIMIT_MS)]);
  process.exit(0);
});
