// Continue's CLI, which reads a note, edits it and answers, as the model of the server says.
//
//     node scenario.mjs http://127.0.0.1:8000/v1

import assert from 'node:assert/strict';
import { mkdirSync, readFileSync, writeFileSync } from 'node:fs';
import { resolve } from 'node:path';
import { run, runAgent } from './steps.mjs';

const CONFIG = (base) => `
name: triptych
version: 0.0.1
schema: v1
models:
  - name: triptych
    provider: openai
    model: tiny
    apiBase: ${base}
    apiKey: none
`;

async function print(base) {
  mkdirSync('home');
  mkdirSync('work');
  writeFileSync('config.yaml', CONFIG(base));
  writeFileSync('work/note.txt', 'The colour is red.\n');
  const options = ['--config', '../config.yaml', '--auto', '-p', 'Make the colour of note.txt blue.'];
  const { printed, asked } = await runAgent('cn', options, {
    HOME: resolve('home'),
    CONTINUE_METRICS_ENABLED: '0',
    CONTINUE_CLI_ENABLE_TELEMETRY: '0',
  });
  assert.deepEqual(asked, []);
  assert.equal(printed.trim(), 'It is blue now.');
  assert.equal(readFileSync('work/note.txt', 'utf8'), 'The colour is blue.\n');
}

await run({ '`cn -p`: a file read, an edit and an answer, by a scripted model': print });
