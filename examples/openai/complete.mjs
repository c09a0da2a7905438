// OpenAI's API with the package `openai`: npm install && node complete.mjs http://127.0.0.1:8000/v1
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none" });
const prompt = "Once upon a time";
const settings = { temperature: 0, max_tokens: 24 };

const model = (await client.models.list()).data[0].id;
console.log("model  ", model);

const whole = await client.completions.create({ model, prompt, ...settings });
console.log("whole  ", JSON.stringify(whole.choices[0].text));

let text = "";
for await (const chunk of await client.completions.create({ model, prompt, ...settings, stream: true })) {
  text += chunk.choices[0].text;
}
console.log("stream ", JSON.stringify(text));

const messages = [{ role: "user", content: prompt }];
const chat = await client.chat.completions.create({ model, messages, ...settings });
console.log("chat   ", JSON.stringify(chat.choices[0].message.content));
