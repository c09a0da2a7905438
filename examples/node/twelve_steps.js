// Twelve steps with the public API from Node: `node twelve_steps.js HOST:PORT`. No generated code: protos are loaded.
'use strict';

const path = require('path');
const grpc = require('@grpc/grpc-js');
const protoLoader = require('@grpc/proto-loader');

const PROMPT = 'Once upon a time';
const DETAILS_KEY = 'grpc-status-details-bin';

const definitions = protoLoader.loadSync(
  [
    'triptych/api/v1/inference.proto',
    'triptych/api/v1/model.proto',
    'triptych/api/v1/tokenizer.proto',
    'grpc/health/v1/health.proto',
    'google/rpc/status.proto',
  ],
  {
    includeDirs: [path.join(__dirname, '../../protos'), path.join(__dirname, 'protos')],
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

function say(step, name, text) {
  console.log(`${String(step).padStart(2)} ${name.padEnd(10)} ${text}`);
}

function connect(target) {
  const credentials = grpc.credentials.createInsecure();
  const options = {
    'grpc.keepalive_time_ms': 10000,
    'grpc.keepalive_timeout_ms': 5000,
    'grpc.max_receive_message_length': 64 * 1024 * 1024,
  };
  return {
    health: new standard.health.v1.Health(target, credentials, options),
    inference: new api.InferenceService(target, credentials, options),
    models: new api.ModelService(target, credentials, options),
    tokenizer: new api.TokenizerService(target, credentials, options),
  };
}

// One unary call as a promise, with a deadline.
function call(client, method, request) {
  const deadline = Date.now() + 60000;
  return new Promise((resolve, reject) => {
    client[method](request, { deadline }, (error, response) => (error ? reject(error) : resolve(response)));
  });
}

function generateOnce(clients, sampling) {
  return call(clients.inference, 'GenerateOnce', { prompt: PROMPT, sampling });
}

async function lookAround(clients) {
  const health = await call(clients.health, 'Check', { service: 'triptych.api.v1.InferenceService' });
  expect(health.status === 'SERVING', `health is ${health.status}`);
  say(2, 'health', health.status);

  const { models } = await call(clients.models, 'ListModels', {});
  expect(models.length > 0 && models[0].max_model_len > 0, 'no model');
  say(3, 'models', models.map((model) => `${model.name} (up to ${model.max_model_len} tokens)`).join(', '));

  const info = await call(clients.models, 'GetServerInfo', {});
  expect(info.version, 'the server tells no version');
  say(4, 'server', `version ${info.version}, ${info.engines.length} engine(s)`);
}

async function tokensAndBack(clients) {
  const request = { text: PROMPT, add_special_tokens: false };
  const { token_ids } = await call(clients.tokenizer, 'Tokenize', request);
  expect(token_ids.length > 0, 'no tokens');
  say(5, 'tokenize', `[${token_ids.join(', ')}]`);

  const { text } = await call(clients.tokenizer, 'Detokenize', { token_ids });
  expect(text.trim() === PROMPT, `another text: ${text}`);
  say(6, 'detokenize', JSON.stringify(text));
}

async function wholeAndStreamed(clients) {
  const sampling = { temperature: 0, max_tokens: 24 };
  const { outputs, usage } = await generateOnce(clients, sampling);
  const [output] = outputs;
  expect(/_(STOP|LENGTH)$/.test(output.reason), `finish reason ${output.reason}`);
  expect(usage.num_completion_tokens === output.token_ids.length, `usage ${JSON.stringify(usage)}`);
  expect(output.text.length >= 6, `too short a text to go on with: ${output.text}`);
  say(7, 'unary', JSON.stringify(output.text));

  const kinds = [];
  let text = '';
  for await (const response of clients.inference.Generate({ prompt: PROMPT, sampling })) {
    kinds.push(response.event);
    if (response.event === 'delta') text += response.delta.text;
  }
  expect(kinds[0] === 'started' && kinds.at(-1) === 'finished', `events ${kinds}`);
  expect(kinds.slice(1, -1).every((kind) => kind === 'delta'), `events ${kinds}`);
  expect(text === output.text, `another text than step 7: ${text}`);
  say(8, 'stream', `the same text in ${kinds.length - 2} deltas`);
  return text;
}

async function sameSeed(clients) {
  const sampling = { temperature: 1, seed: 7, max_tokens: 16 };
  const first = (await generateOnce(clients, sampling)).outputs[0].text;
  const second = (await generateOnce(clients, sampling)).outputs[0].text;
  expect(first === second, `two texts of one seed: ${first} / ${second}`);
  say(9, 'seed', JSON.stringify(first));
}

async function stopString(clients, text) {
  const stop = text.slice(Math.floor(text.length / 2)).slice(0, 3);
  const { outputs } = await generateOnce(clients, { temperature: 0, max_tokens: 24, stop: [stop] });
  const [output] = outputs;
  expect(output.reason === 'FINISH_REASON_STOP', `finish reason ${output.reason}`);
  expect(output.stop_match.string === stop, `stopped on ${JSON.stringify(output.stop_match)}`);
  expect(output.text === text.slice(0, text.indexOf(stop)), `text ${output.text}`);
  say(10, 'stop', `${JSON.stringify(stop)} leaves ${JSON.stringify(output.text)}`);
}

async function cancel(clients) {
  const stream = clients.inference.Generate({ prompt: PROMPT, sampling: { ignore_eos: true } });
  const code = await new Promise((resolve) => {
    stream.on('data', (response) => {
      if (response.event === 'delta') stream.cancel();
    });
    stream.on('error', (error) => resolve(error.code));
    stream.on('end', () => resolve(grpc.status.OK));
  });
  expect(code === grpc.status.CANCELLED, `ended with status ${code}`);

  const giveUpAt = Date.now() + 5000;
  for (;;) {
    const { engines } = await call(clients.models, 'GetServerInfo', {});
    if (engines.every((engine) => engine.num_in_flight === 0)) break;
    expect(Date.now() < giveUpAt, 'still in flight after 5 s');
    await new Promise((resolve) => setTimeout(resolve, 20));
  }
  say(11, 'cancel', 'nothing in flight');
}

function fieldViolations(error) {
  const [trailer] = error.metadata.get(DETAILS_KEY);
  if (!trailer) return [];
  const status = definitions['google.rpc.Status'].deserialize(trailer);
  return status.details
    .filter((detail) => detail.type_url.endsWith('/google.rpc.BadRequest'))
    .flatMap((detail) => definitions['google.rpc.BadRequest'].deserialize(detail.value).field_violations);
}

async function refusal(clients) {
  const error = await generateOnce(clients, { temperature: 99 }).then(() => null, (refused) => refused);
  expect(error !== null, 'a temperature of 99 was taken');
  expect(error.code === grpc.status.INVALID_ARGUMENT, `${error}`);
  const violations = fieldViolations(error);
  expect(violations.some(({ field }) => field.includes('temperature')), `violations ${JSON.stringify(violations)}`);
  say(12, 'refusal', violations.map(({ field, description }) => `${field}: ${description}`).join('; '));
}

async function main(target) {
  const clients = connect(target);
  await new Promise((resolve, reject) => {
    clients.inference.waitForReady(Date.now() + 10000, (error) => (error ? reject(error) : resolve()));
  });
  say(1, 'connect', target);
  await lookAround(clients);
  await tokensAndBack(clients);
  const text = await wholeAndStreamed(clients);
  await sameSeed(clients);
  await stopString(clients, text);
  await cancel(clients);
  await refusal(clients);
  console.log('OK: twelve steps');
  Object.values(clients).forEach((client) => client.close());
}

main(process.argv[2] ?? '127.0.0.1:50051').catch((error) => {
  console.error(`surprise: ${error.message}`);
  process.exit(1);
});
