// What users of npm's `openai` do, against a server.
//
//     node scenario.mjs http://127.0.0.1:8000/v1 http://127.0.0.1:8001/v1 REQUESTS
//
// The second server is one whose model embeds; REQUESTS is a JSON object of what is asked.
// Prints a JSON object: what each step saw. An assertion that fails ends it.

import assert from 'node:assert/strict';
import OpenAI from 'openai';
import { zodFunction, zodResponseFormat, zodResponsesFunction, zodTextFormat } from 'openai/helpers/zod';
import { z } from 'zod';

const [base, baseOfEmbeddings, requests] = process.argv.slice(2);
const { prompt, message, following, embedded, sampled } = JSON.parse(requests);
const messages = [{ role: 'user', content: message }];
const cities = ['Paris', 'Pisa'];
const City = z.object({ city: z.enum(cities) });
const Tower = z.object({ city: z.string().max(20), is_tall: z.boolean() });

function connect(baseURL) {
  return new OpenAI({ baseURL, apiKey: 'none', maxRetries: 0 });
}

async function all(stream) {
  const found = [];
  for await (const each of stream) found.push(each);
  return found;
}

async function runChats(client, model) {
  const ids = { return_token_ids: true };
  const whole = await client.completions.create({ model, prompt, ...ids, ...sampled });
  const chunks = await all(await client.completions.create({ model, prompt, stream: true, ...ids, ...sampled }));
  const choices = chunks.flatMap((chunk) => chunk.choices);
  assert.equal(choices.map((choice) => choice.text).join(''), whole.choices[0].text);

  const chat = await client.chat.completions.create({ model, messages, ...ids, ...sampled });
  const stream = client.chat.completions.stream({ model, messages, stream_options: { include_usage: true }, ...sampled });
  let text = '';
  stream.on('content', (delta) => (text += delta));
  const final = await stream.finalChatCompletion();
  assert.equal(text, chat.choices[0].message.content);
  assert.equal(final.choices[0].message.content, text);
  assert.deepEqual(final.usage, chat.usage);

  const parsed = await client.chat.completions.parse({
    model, messages, seed: 1, max_tokens: 200, response_format: zodResponseFormat(Tower, 'tower'),
  });
  Tower.parse(parsed.choices[0].message.parsed);

  const asked = {
    model, messages, seed: 2, max_tokens: 200, tool_choice: 'required', parallel_tool_calls: false,
    tools: [zodFunction({ name: 'find_tower', parameters: City })],
  };
  const called = await client.chat.completions.parse(asked);
  const [call] = called.choices[0].message.tool_calls;
  assert.ok(cities.includes(call.function.parsed_arguments.city));
  assert.equal(called.choices[0].finish_reason, 'tool_calls');
  const streamed = await client.chat.completions.stream(asked).finalChatCompletion();
  assert.equal(streamed.choices[0].message.tool_calls[0].function.arguments, call.function.arguments);
  return {
    completion: whole.choices[0].token_ids,
    chunks: choices.flatMap((choice) => choice.token_ids ?? []),
    chat: chat.choices[0].token_ids,
    text,
  };
}

async function runResponses(client, model) {
  const asked = {
    model, input: message, temperature: sampled.temperature, max_output_tokens: sampled.max_tokens,
    seed: sampled.seed, return_token_ids: true,
  };
  const whole = await client.responses.create(asked);
  assert.equal(whole.incomplete_details.reason, 'max_output_tokens');
  assert.equal(whole.usage.output_tokens, sampled.max_tokens);
  assert.equal((await client.responses.retrieve(whole.id)).output_text, whole.output_text);

  const events = await all(await client.responses.create({ ...asked, stream: true }));
  assert.deepEqual(events.map((event) => event.sequence_number), [...events.keys()]);
  const deltas = events.filter((event) => event.type === 'response.output_text.delta');
  assert.equal(deltas.map((event) => event.delta).join(''), whole.output_text);
  const last = events.at(-1);
  assert.equal(last.type, 'response.incomplete');

  const user = { role: 'user', content: following };
  const later = await client.responses.create({ ...asked, input: [user], previous_response_id: whole.id });
  const items = [{ role: 'user', content: message }, ...whole.output, user];
  const byItems = await client.responses.create({ ...asked, input: items });
  assert.equal(later.output_text, byItems.output_text);
  assert.notEqual(later.output_text, whole.output_text);
  await client.responses.delete(whole.id);
  let gone;
  await assert.rejects(client.responses.retrieve(whole.id), (error) => {
    gone = `${error.code} ${error.param}`;
    return error instanceof OpenAI.NotFoundError;
  });

  const structured = {
    model, input: message, max_output_tokens: 200, seed: 1, text: { format: zodTextFormat(Tower, 'tower') },
  };
  const parsed = await client.responses.parse(structured);
  Tower.parse(parsed.output_parsed);
  const grown = await client.responses.stream(structured).finalResponse();
  assert.deepEqual(grown.output_parsed, parsed.output_parsed);

  const withTool = {
    model, max_output_tokens: 200, seed: 2, parallel_tool_calls: false,
    tools: [zodResponsesFunction({ name: 'find_tower', parameters: City })],
  };
  const called = await client.responses.parse({ ...withTool, input: message, tool_choice: 'required' });
  const [call] = called.output.filter((item) => item.type === 'function_call');
  assert.ok(cities.includes(call.parsed_arguments.city));
  const output = { type: 'function_call_output', call_id: call.call_id, output: 'It is tall' };
  const byCall = [{ role: 'user', content: message }, ...called.output, output];
  const answered = await client.responses.create({
    ...withTool, input: [output], previous_response_id: called.id, tool_choice: 'none',
  });
  const answeredByItems = await client.responses.create({ ...withTool, input: byCall, tool_choice: 'none' });
  assert.equal(answered.output_text, answeredByItems.output_text);
  return {
    response: whole.token_ids,
    response_chunks: last.response.token_ids,
    response_text: whole.output_text,
    gone,
  };
}

async function runAdapter(client) {
  const [base, ...adapters] = (await client.models.list()).data;
  assert.deepEqual(adapters.map((each) => each.parent), [base.id]);
  const ids = { return_token_ids: true };
  const found = await client.completions.create({ model: adapters[0].id, prompt, ...ids, ...sampled });
  return { adapter: found.choices[0].token_ids };
}

async function runEmbeddings(client) {
  const model = (await client.models.list()).data[0].id;
  // The package asks for base64 where no format is given, and decodes it.
  const found = await client.embeddings.create({ model, input: embedded });
  const plain = await client.embeddings.create({ model, input: embedded, encoding_format: 'float' });
  const vectors = found.data.map((each) => each.embedding);
  assert.deepEqual(vectors, plain.data.map((each) => each.embedding));
  return { embeddings: vectors, embedding_tokens: found.usage.prompt_tokens };
}

async function errors(client, model) {
  const seen = [];
  for (const wrong of [{ model: 'other' }, { temperature: 9 }, { max_tokens: -1 }]) {
    await assert.rejects(client.chat.completions.create({ model, messages, ...wrong }), (error) => {
      seen.push(`${error.constructor.name} ${error.param}`);
      return true;
    });
  }
  return seen;
}

const client = connect(base);
const model = (await client.models.list()).data[0].id;
assert.equal((await client.models.retrieve(model)).id, model);
console.log(JSON.stringify({
  ...(await runChats(client, model)),
  ...(await runResponses(client, model)),
  ...(await runAdapter(client)),
  ...(await runEmbeddings(connect(baseOfEmbeddings))),
  errors: await errors(client, model),
}));
