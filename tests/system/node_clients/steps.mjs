// The steps of a scenario, by the names that they have in package.json and in docs/clients.md.

/** Run steps in their order with the base address of the command line, and print their names. */
export async function run(steps) {
  const [base] = process.argv.slice(2);
  for (const step of Object.values(steps)) await step(base);
  console.log(JSON.stringify(Object.keys(steps)));
}
