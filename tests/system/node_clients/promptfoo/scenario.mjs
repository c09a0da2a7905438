// promptfoo with each of its three providers for OpenAI's APIs, and assertions that need no other model.
//
//     node scenario.mjs http://127.0.0.1:8000/v1

import assert from 'node:assert/strict';
import { spawnSync } from 'node:child_process';
import { readFileSync, writeFileSync } from 'node:fs';
import { run } from './steps.mjs';

const PROVIDERS = ['openai:chat:triptych-tiny', 'openai:completion:triptych-tiny', 'openai:responses:triptych-tiny'];
const PLACES = ['tower', 'house'];

function evaluate(apiBaseUrl) {
  const config = { apiBaseUrl, apiKey: 'none', temperature: 0, max_tokens: 24 };
  writeFileSync('config.json', JSON.stringify({
    prompts: ['Where is the {{place}}?'],
    providers: PROVIDERS.map((id) => ({ id, config })),
    defaultTest: { assert: [
      { type: 'javascript', value: 'output.length > 0 && !/[<>]/.test(output)' },
      { type: 'latency', threshold: 60_000 },
    ] },
    tests: PLACES.map((place) => ({ vars: { place } })),
  }));
  const options = ['--no-cache', '--no-write', '--no-table', '--no-progress-bar', '-o', 'results.json'];
  const { status, stderr, stdout } = spawnSync('node_modules/.bin/promptfoo', ['eval', '-c', 'config.json', ...options], {
    encoding: 'utf8',
    env: {
      ...process.env,
      PROMPTFOO_CONFIG_DIR: process.cwd(),
      PROMPTFOO_DISABLE_TELEMETRY: '1',
      PROMPTFOO_DISABLE_UPDATE: '1',
      PROMPTFOO_DISABLE_REMOTE_GENERATION: '1',
      PROMPTFOO_SELF_HOSTED: '1',
    },
  });
  assert.equal(status, 0, `${stdout}\n${stderr}`);
  const { stats, results } = JSON.parse(readFileSync('results.json', 'utf8')).results;
  assert.deepEqual([stats.successes, stats.failures, stats.errors], [PROVIDERS.length * PLACES.length, 0, 0]);
  assert.deepEqual(new Set(results.map((one) => one.provider.id)), new Set(PROVIDERS));
  for (const one of results) assert.ok(one.response.tokenUsage.completion > 0);
}

await run({ '`openai:chat`, `openai:completion`, `openai:responses`: an evaluation': evaluate });
