// The steps of a scenario, by the names that they have in package.json and in docs/clients.md.

import assert from 'node:assert/strict';
import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { createServer } from 'node:net';
import { resolve } from 'node:path';

/** Run steps in their order with the base address of the command line, and print their names. */
export async function run(steps) {
  const [base] = process.argv.slice(2);
  for (const step of Object.values(steps)) await step(base);
  console.log(JSON.stringify(Object.keys(steps)));
}

/** Run a program of the packages in the folder `work`; its output, and the requests that it sent to other hosts. */
export async function runAgent(name, options, environment) {
  // Other hosts would be reached through this proxy, which answers nothing.
  const asked = [];
  const proxy = createServer((socket) => {
    socket.once('data', (head) => asked.push(String(head).split('\r\n')[0]));
    socket.on('error', () => {});
  }).listen(0, '127.0.0.1');
  await once(proxy, 'listening');
  const elsewhere = `http://127.0.0.1:${proxy.address().port}`;
  const agent = spawn(resolve('node_modules/.bin', name), options, {
    cwd: 'work',
    env: {
      PATH: process.env.PATH,
      HTTP_PROXY: elsewhere,
      HTTPS_PROXY: elsewhere,
      NO_PROXY: '127.0.0.1',
      ...environment,
    },
    stdio: ['ignore', 'pipe', 'inherit'],
  });
  let printed = '';
  agent.stdout.on('data', (bytes) => (printed += bytes));
  const [status] = await once(agent, 'close');
  proxy.close();
  assert.equal(status, 0, printed);
  return { printed, asked };
}
