// Vercel's AI SDK with each of its three models for OpenAI's APIs.
//
//     node scenario.mjs http://127.0.0.1:8000/v1

import assert from 'node:assert/strict';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateObject, generateText, isStepCount, Output, streamObject, streamText, tool } from 'ai';
import { z } from 'zod';
import { run } from './steps.mjs';

const MODEL = 'triptych-tiny';
const PROMPT = 'Where is the tower?';
const City = z.object({ city: z.enum(['Paris', 'Pisa']) });
const Tower = z.object({ city: z.enum(['Paris', 'Pisa']), is_tall: z.boolean() });
const compatible = { name: 'triptych', includeUsage: true, supportsStructuredOutputs: true };
// One call a step: the tiny model makes them up to its limit. The names are those of the providers.
const providerOptions = { openai: { parallelToolCalls: false }, triptych: { parallel_tool_calls: false } };
const settings = { prompt: PROMPT, temperature: 0, maxOutputTokens: 300, maxRetries: 0, providerOptions };

async function allOf(model) {
  const short = { model, ...settings, maxOutputTokens: 24 };
  const whole = await generateText(short);
  const stream = streamText({ ...short, onError: ({ error }) => { throw error; } });
  let text = '';
  for await (const delta of stream.textStream) text += delta;
  assert.equal(text, whole.text);
  assert.ok(text);
  assert.equal((await stream.usage).outputTokens, whole.usage.outputTokens);

  const asked = { model, ...settings, schema: Tower };
  const { object } = await generateObject(asked);
  Tower.parse(object);
  const parts = [];
  for await (const part of streamObject(asked).partialObjectStream) parts.push(part);
  assert.deepEqual(parts.at(-1), object);

  const calls = [];
  const execute = ({ city }) => {
    calls.push(city);
    return `There is one in ${city}.`;
  };
  const tools = { find_tower: tool({ description: 'Find a tower.', inputSchema: City, execute }) };
  const typed = { model, ...settings, tools, output: Output.object({ schema: Tower }), stopWhen: isStepCount(3) };
  const demanded = ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? 'required' : 'none' });
  const called = await generateText({ ...typed, prepareStep: demanded });
  Tower.parse(called.output);
  assert.ok(calls.length);
  assert.equal(called.steps[0].finishReason, 'tool-calls');
  City.parse(called.steps[0].toolCalls[0].input);
  const streamed = streamText({ model, ...settings, tools, toolChoice: { type: 'tool', toolName: 'find_tower' } });
  await streamed.consumeStream({ onError: (error) => { throw error; } });
  assert.deepEqual((await streamed.toolCalls)[0].input, called.steps[0].toolCalls[0].input);
  // What is chosen is the model's business: a call or a text.
  await generateText({ model, ...settings, tools, stopWhen: isStepCount(2) });
}

await run({
  'compatible: text, stream, object, tools, demanded tool': (baseURL) =>
    allOf(createOpenAICompatible({ ...compatible, baseURL })(MODEL)),
  'openai chat: text, stream, object, tools, demanded tool': (baseURL) =>
    allOf(createOpenAI({ baseURL, apiKey: 'none' }).chat(MODEL)),
  'openai responses: text, stream, object, tools, demanded tool': (baseURL) =>
    allOf(createOpenAI({ baseURL, apiKey: 'none' }).responses(MODEL)),
});
