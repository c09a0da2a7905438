// Twelve steps with the public API from Node: `node twelve_steps.js HOST:PORT`. No generated code: protos are loaded.
// Steps and results are described in ../README.md.
'use strict';

const path = require('path');
const { setTimeout: sleep } = require('timers/promises');
const grpc = require('@grpc/grpc-js');
const protoLoader = require('@grpc/proto-loader');

const PROMPT = 'Once upon a time';
const TRACEPARENT = '00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01';

const definitions = protoLoader.loadSync(
  [
    'triptych/api/v1/inference.proto',
    'triptych/api/v1/model.proto',
    'triptych/api/v1/tokenizer.proto',
    'grpc/health/v1/health.proto',
    'google/rpc/error_details.proto',
    'google/rpc/status.proto',
  ],
  {
    includeDirs: [path.join(__dirname, '../../protos'), path.join(__dirname, '../../third_party')],
    keepCase: true,
    longs: String,
    enums: String,
    defaults: true,
    oneofs: true,
  },
);
const { triptych, grpc: standard } = grpc.loadPackageDefinition(definitions);
const api = triptych.api.v1;

function expect(condition, what) {
  if (!condition) throw new Error(what);
}

function show(step, name, result) {
  console.log(`${String(step).padStart(2)} ${name.padEnd(12)} ${result}`);
}

function connect(target) {
  const credentials = grpc.credentials.createInsecure();
  // No keepalive: grpc-js 1.14 fails the open streams of a connection at the next ping after GOAWAY (grpc-node 3068).
  const channelOverride = new grpc.Channel(target, credentials, {
    'grpc.max_receive_message_length': 64 * 1024 * 1024,
  });
  const client = (Service) => new Service(target, credentials, { channelOverride });
  return {
    channel: channelOverride,
    health: client(standard.health.v1.Health),
    inference: client(api.InferenceService),
    models: client(api.ModelService),
    tokenizer: client(api.TokenizerService),
  };
}

// One unary call as a promise, with a deadline.
function call(client, method, request, timeoutMs = 60000) {
  const deadline = Date.now() + timeoutMs;
  return new Promise((resolve, reject) => {
    client[method](request, { deadline }, (error, response) => (error ? reject(error) : resolve(response)));
  });
}

function generateOnce(clients, request, timeoutMs) {
  return call(clients.inference, 'GenerateOnce', { prompt: PROMPT, ...request }, timeoutMs);
}

// The error of a call that must fail with `code`.
async function refused(promise, code) {
  const error = await promise.then(() => null, (reason) => reason);
  expect(error?.code === code, `${error} instead of ${grpc.status[code]}`);
  return error;
}

// The one field violation among the details of an error.
function violationOf(error) {
  const [trailer] = error.metadata.get('grpc-status-details-bin');
  const { details } = definitions['google.rpc.Status'].deserialize(trailer);
  const detail = details.find(({ type_url }) => type_url.endsWith('/google.rpc.BadRequest'));
  const violations = definitions['google.rpc.BadRequest'].deserialize(detail.value).field_violations;
  expect(violations.length === 1, `violations ${JSON.stringify(violations)}`);
  return violations[0];
}

function greedy(max_tokens) {
  return { temperature: 0, max_tokens, ignore_eos: true };
}

// 16 outputs as long as the model allows: many seconds.
const ENDLESS = { n: 16, ignore_eos: true };

// Start a stream and read its first message; returns the rest.
async function open(clients, sampling) {
  const responses = clients.inference.Generate({ prompt: PROMPT, sampling })[Symbol.asyncIterator]();
  const { value } = await responses.next();
  expect(value.event === 'started', `first event ${value.event}`);
  return responses;
}

// Read a stream from its first delta to its end; returns the text.
async function readText(responses) {
  let text = '';
  let last = 'started';
  for (let { value, done } = await responses.next(); !done; { value, done } = await responses.next()) {
    expect(last !== 'finished' && value.event !== 'started', `${value.event} after ${last}`);
    last = value.event;
    if (last === 'delta') text += value.delta.text;
  }
  expect(last === 'finished', `last event ${last}`);
  return text;
}

async function waitUntilIdle(clients) {
  const giveUpAt = Date.now() + 5000;
  for (;;) {
    const { engines } = await call(clients.models, 'GetServerInfo', {});
    if (engines.every((engine) => engine.num_in_flight === 0)) return;
    expect(Date.now() < giveUpAt, 'still in flight after 5 s');
    await sleep(20);
  }
}

async function lookAround(clients) {
  const { status } = await call(clients.health, 'Check', { service: 'triptych.api.v1.InferenceService' });
  expect(status === 'SERVING', `health is ${status}`);
  show(1, 'health', status);

  const { models } = await call(clients.models, 'ListModels', {});
  expect(models.length === 1, `${models.length} models`);
  show(2, 'models', `${models[0].name}, up to ${models[0].max_model_len} tokens`);
}

async function unaryAndStream(clients) {
  const { outputs, usage } = await generateOnce(clients, { sampling: greedy(24) });
  const [output] = outputs;
  expect(output.reason === 'FINISH_REASON_LENGTH', `finish reason ${output.reason}`);
  expect(usage.num_completion_tokens === output.token_ids.length, `usage ${JSON.stringify(usage)}`);
  show(3, 'unary', `${output.token_ids.length} tokens, finished by length`);

  const text = await readText(await open(clients, greedy(24)));
  expect(text === output.text, `another text than the unary answer: ${text}`);
  show(4, 'stream', 'the text of the unary answer');
  return text;
}

async function cancelAndDeadline(clients) {
  const stream = clients.inference.Generate({ prompt: PROMPT, sampling: ENDLESS });
  const code = await new Promise((resolve) => {
    stream.on('data', (response) => {
      if (response.event === 'delta') stream.cancel();
    });
    stream.on('error', (error) => resolve(error.code));
    stream.on('end', () => resolve(grpc.status.OK));
  });
  expect(code === grpc.status.CANCELLED, `the cancelled stream ended with ${grpc.status[code]}`);
  await waitUntilIdle(clients);
  show(5, 'cancel', 'nothing in flight');

  await refused(generateOnce(clients, { sampling: ENDLESS }, 200), grpc.status.DEADLINE_EXCEEDED);
  await waitUntilIdle(clients);
  show(6, 'deadline', 'DEADLINE_EXCEEDED, nothing in flight');
}

async function refusals(clients) {
  const unknown = await refused(generateOnce(clients, { model: 'nope' }), grpc.status.NOT_FOUND);
  show(7, 'bad model', `NOT_FOUND: ${unknown.details}`);

  const hot = generateOnce(clients, { sampling: { temperature: 99 } });
  const { field, description } = violationOf(await refused(hot, grpc.status.INVALID_ARGUMENT));
  show(8, 'bad field', `INVALID_ARGUMENT in ${field}: ${description}`);

  const long = generateOnce(clients, { prompt: 'x'.repeat(5 << 20) });
  const tooLong = violationOf(await refused(long, grpc.status.INVALID_ARGUMENT));
  const request = { text: 'x'.repeat(500000), return_tokens: true };
  const { tokens } = await call(clients.tokenizer, 'Tokenize', request);
  expect(tokens.at(-1) === 'x', `the last token is ${tokens.at(-1)}`);
  const result = `INVALID_ARGUMENT in ${tooLong.field}; ${tokens.length} tokens with their names came back`;
  show(9, 'big prompt', result);
}

async function twoStreams(clients, text) {
  const streams = [await open(clients, greedy(24)), await open(clients, greedy(24))];
  const texts = await Promise.all(streams.map(readText));
  expect(texts.every((each) => each === text), `other texts than the unary answer: ${texts}`);
  show(10, 'two streams', 'the text of the unary answer, twice');
}

async function ids(clients) {
  const metadata = new grpc.Metadata();
  metadata.set('x-request-id', 'twelve-steps');
  metadata.set('traceparent', TRACEPARENT);
  const stream = clients.inference.Generate({ prompt: PROMPT, sampling: greedy(1) }, metadata);
  const header = await new Promise((resolve, reject) => stream.on('metadata', resolve).on('error', reject));
  stream.resume();
  show(11, 'ids', `x-request-id ${header.get('x-request-id')}, x-trace-id ${header.get('x-trace-id')}`);
}

// Stream until the server asks the channel to leave its connection, and then once more.
async function reconnect(clients) {
  let hasLeft = false;
  const giveUpAt = Date.now() + 60000;
  const watched = new Promise((resolve, reject) => {
    clients.channel.watchConnectivityState(grpc.connectivityState.READY, giveUpAt, (error) => {
      hasLeft = true;
      if (error) reject(new Error('no GOAWAY in 60 s'));
      else resolve();
    });
  });
  while (!hasLeft) await readText(await open(clients, greedy(200)));
  await watched;
  await readText(await open(clients, greedy(200)));
  show(12, 'reconnect', 'a stream outlived its connection, the next call took another');
}

async function main(target) {
  const clients = connect(target);
  await lookAround(clients);
  const text = await unaryAndStream(clients);
  await cancelAndDeadline(clients);
  await refusals(clients);
  await twoStreams(clients, text);
  await ids(clients);
  await reconnect(clients);
  clients.channel.close();
  console.log('OK');
}

main(process.argv[2]).catch((error) => {
  console.error(`surprise: ${error.message}`);
  process.exit(1);
});
