// Codex CLI, which reads a note, patches it and answers, as the model of the server says.
//
//     node scenario.mjs http://127.0.0.1:8000/v1

import assert from 'node:assert/strict';
import { mkdirSync, readFileSync, writeFileSync } from 'node:fs';
import { resolve } from 'node:path';
import { run, runAgent } from './steps.mjs';

const CONFIG = (base) => `
model = "tiny"
model_provider = "triptych"
check_for_update_on_startup = false
[analytics]
enabled = false
[features]
plugins = false
[model_providers.triptych]
name = "triptych"
base_url = "${base}"
env_key = "TRIPTYCH_API_KEY"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
`;

async function execute(base) {
  mkdirSync('home');
  mkdirSync('work');
  writeFileSync('home/config.toml', CONFIG(base));
  writeFileSync('work/note.txt', 'The colour is red.\n');
  const options = ['exec', '--json', '--skip-git-repo-check', '--sandbox', 'danger-full-access'];
  const { printed, asked } = await runAgent('codex', [...options, 'Make the colour of note.txt blue.'], {
    CODEX_HOME: resolve('home'),
    TRIPTYCH_API_KEY: 'none',
  });
  assert.deepEqual(asked, []);

  const events = printed.trim().split('\n').map((line) => JSON.parse(line));
  const items = events.filter((event) => event.type === 'item.completed').map((event) => event.item);
  const commands = items.filter((item) => item.type === 'command_execution');
  assert.deepEqual(commands.map((item) => item.aggregated_output), ['The colour is red.\n', 'The colour is blue.\n']);
  assert.deepEqual(items.filter((item) => item.type === 'file_change').map((item) => item.status), ['completed']);
  assert.equal(items.at(-1).text, 'It is blue now.');
  assert.equal(events.at(-1).type, 'turn.completed');
  assert.ok(events.at(-1).usage.input_tokens > 16_000);
  assert.equal(readFileSync('work/note.txt', 'utf8'), 'The colour is blue.\n');
}

await run({ '`codex exec`: commands, a patch and an answer, by a scripted model': execute });
