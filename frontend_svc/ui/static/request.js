// A request of the playground: what is sent, and the same as a command for a terminal or a script.

export const NUMBERS = ["temperature", "top_p", "max_tokens", "seed", "logprobs"];
export const TEXTS = ["prompt", "system", "stop", "schema", "tools", "tool_choice"];

export const EXAMPLES = {
  schema: JSON.stringify(
    { type: "object", properties: { name: { type: "string" }, age: { type: "integer" } }, required: ["name", "age"] },
    null,
    1,
  ),
  tools: JSON.stringify(
    [
      {
        type: "function",
        function: {
          name: "get_weather",
          description: "The weather of a city.",
          parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
        },
      },
    ],
    null,
    1,
  ),
};

// What a field of the form has cannot be sent.
export class FieldError extends Error {
  constructor(field, message) {
    super(message);
    this.field = field;
  }
}

const METHODS = {
  generate: { service: "InferenceService", method: "Generate", module: "generate_pb2", message: "GenerateRequest", stub: "inference_pb2_grpc", text: "text" },
  chat: { service: "ChatService", method: "Chat", module: "chat_message_pb2", message: "ChatRequest", stub: "chat_pb2_grpc", text: "content" },
};

const MAX_LINE = 64; // characters of a list or an object that is written in one line
const TOOL_MODES = { required: "TOOL_CHOICE_MODE_REQUIRED", none: "TOOL_CHOICE_MODE_NONE" };

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

const WRITERS = {
  "openai-curl"(kind, fields, turns, about) {
    const key = about.needs_key ? ['  -H "authorization: Bearer $OPENAI_API_KEY" \\'] : [];
    return [
      `curl -N ${urlOf(about)}/v1/${kind === "chat" ? "chat/completions" : "completions"} \\`,
      "  -H 'content-type: application/json' \\",
      ...key,
      `  -d ${quoted(written(makeBody(kind, fields, turns), JSON.stringify))}`,
    ].join("\n");
  },

  "openai-python"(kind, fields, turns, about) {
    const body = makeBody(kind, fields, turns);
    // The package has it for chats alone.
    const { response_format: format, ...rest } = body;
    const named = kind === "chat" || !format ? body : { ...rest, extra_body: { response_format: format } };
    const method = kind === "chat" ? "chat.completions" : "completions";
    const delta = kind === "chat" ? "choice.delta.content or choice.delta.tool_calls" : "choice.text";
    return [
      "from openai import OpenAI",
      "",
      // Without an argument the package reads OPENAI_API_KEY.
      `client = OpenAI(base_url=${JSON.stringify(`${urlOf(about)}/v1`)}${about.needs_key ? "" : ', api_key="none"'})`,
      `stream = client.${method}.create(`,
      ...Object.entries(named).map(([name, value]) => `    ${name}=${written(value, pythonOf, "    ")},`),
      ")",
      "for chunk in stream:",
      "    for choice in chunk.choices:",
      `        print(${delta} or "", end="", flush=True)`,
    ].join("\n");
  },

  "grpc-buf"(kind, fields, turns, about) {
    const { service, method } = METHODS[kind];
    return [
      "buf curl --protocol grpc --http2-prior-knowledge \\",
      `  -d ${quoted(JSON.stringify(makeRequest(kind, fields, turns)))} \\`,
      `  http://${about.address}/triptych.api.v1.${service}/${method}`,
    ].join("\n");
  },

  "grpc-python"(kind, fields, turns, about) {
    const { service, method, module, message, stub, text } = METHODS[kind];
    const request = JSON.stringify(makeRequest(kind, fields, turns));
    return [
      "import grpc",
      "from google.protobuf import json_format",
      `from triptych.api.v1 import ${module}, ${stub}`,
      "",
      // The text of a JSON string is one in Python, too.
      `request = json_format.Parse(${JSON.stringify(request)}, ${module}.${message}())`,
      `with grpc.insecure_channel(${JSON.stringify(about.address)}) as channel:`,
      `    for response in ${stub}.${service}Stub(channel).${method}(request):`,
      `        print(response.delta.${text}, end="", flush=True)`,
    ].join("\n");
  },

  "page-curl"(kind, fields, turns) {
    return [
      "curl -N -H 'content-type: application/json' \\",
      `  -d ${quoted(JSON.stringify(makeRequest(kind, fields, turns)))} \\`,
      `  ${location.origin}/ui/${kind}`,
    ].join("\n");
  },
};

// `about` is the JSON of /ui/about. Throws FieldError.
export function writeCommand(writer, kind, fields, turns, about) {
  return WRITERS[writer](kind, fields, turns, about);
}

// The JSON of a GenerateRequest or, with the turns of a conversation, of a ChatRequest. `fields` has the texts of the
// form. What is not a number is sent as it is, and refused by the frontend. Throws FieldError.
export function makeRequest(kind, fields, turns) {
  const { prompt, stop, schema, tools } = read(kind, fields);
  const request = {};
  if (fields.model) request.model = fields.model;
  if (kind === "chat") {
    request.messages = messagesOf(fields, turns).map(({ role, text }) => ({ role: `CHAT_ROLE_${role}`, parts: [{ text }] }));
  } else {
    request.prompt = prompt;
  }
  if (tools) {
    request.tools = tools.map((tool) => {
      const { name, description, parameters, strict } = tool.function ?? tool;
      const schemaOf = parameters === undefined ? {} : { parameters_json_schema: JSON.stringify(parameters) };
      return { name, description, ...schemaOf, strict };
    });
    if (fields.tool_choice) request.tool_choice = { mode: TOOL_MODES[fields.tool_choice] };
  }
  const sampling = numbersOf(fields);
  if (stop.length) sampling.stop = stop;
  if (schema !== undefined) sampling.structured_output = { json_schema: JSON.stringify(schema) };
  if (Object.keys(sampling).length) request.sampling = sampling;
  return request;
}

// The same request as the JSON body of OpenAI's API.
function makeBody(kind, fields, turns) {
  const { prompt, stop, schema, tools } = read(kind, fields);
  const { logprobs, ...numbers } = numbersOf(fields);
  const body = { model: fields.model };
  if (kind === "chat") {
    body.messages = messagesOf(fields, turns).map(({ role, text }) => ({ role: role.toLowerCase(), content: text }));
  } else {
    body.prompt = prompt;
  }
  Object.assign(body, numbers);
  if (logprobs !== undefined) Object.assign(body, kind === "chat" ? { logprobs: true, top_logprobs: logprobs } : { logprobs });
  if (stop.length) body.stop = stop;
  if (schema !== undefined) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  if (tools) {
    body.tools = tools.map((tool) => (tool.function ? tool : { type: "function", function: tool }));
    if (fields.tool_choice) body.tool_choice = fields.tool_choice;
  }
  return { ...body, stream: true };
}

// The fields that are more than a number or a name.
function read(kind, fields) {
  const isEmpty = kind === "chat" ? fields.prompt.trim() === "" : fields.prompt === "";
  if (isEmpty) throw new FieldError("prompt", kind === "chat" ? "Write a message first." : "Write a prompt first.");
  const schema = parsed(fields, "schema", "The schema");
  const tools = kind === "chat" ? parsed(fields, "tools", "The list of tools") : undefined;
  if (tools && !(Array.isArray(tools) && tools.every((tool) => tool && typeof tool === "object"))) {
    throw new FieldError("tools", "The list of tools must be a JSON list of objects.");
  }
  // A line break within a stop string is written as \n.
  const stop = fields.stop.split("\n").filter((line) => line !== "").map((line) => line.replaceAll("\\n", "\n"));
  return { prompt: fields.prompt, schema, tools, stop };
}

function parsed(fields, name, title) {
  if (fields[name].trim() === "") return undefined;
  try {
    return JSON.parse(fields[name]);
  } catch (error) {
    throw new FieldError(name, `${title} is not JSON: ${error.message}.`);
  }
}

function messagesOf(fields, turns) {
  const system = fields.system ? [{ role: "SYSTEM", text: fields.system }] : [];
  return [...system, ...turns, { role: "USER", text: fields.prompt }];
}

function numbersOf(fields) {
  const names = NUMBERS.filter((name) => fields[name].trim() !== "");
  return Object.fromEntries(names.map((name) => [name, numberOf(fields[name].trim())]));
}

// A number, unless the text is none or has more digits than one can have here: JSON of protobuf takes texts, too.
function numberOf(text) {
  const number = Number(text);
  const isExact = Number.isFinite(number) && (!/^-?\d+$/.test(text) || Number.isSafeInteger(number));
  return isExact ? number : text;
}

function urlOf(about) {
  return `${about.has_tls ? "https" : "http"}://${about.http_address}`;
}

// A value of JSON, whose parts are in lines of their own where they do not fit into one. `plainOf` writes what has none.
function written(value, plainOf, indent = "") {
  if (value === null || typeof value !== "object") return plainOf(value);
  const parts = (inner) =>
    Array.isArray(value)
      ? value.map((each) => written(each, plainOf, inner))
      : Object.entries(value).map(([name, each]) => `${JSON.stringify(name)}: ${written(each, plainOf, inner)}`);
  const [open, close] = Array.isArray(value) ? ["[", "]"] : ["{", "}"];
  const line = `${open}${parts(indent).join(", ")}${close}`;
  if (line.length <= MAX_LINE && !line.includes("\n")) return line;
  const inner = `${indent}  `;
  return `${open}\n${parts(inner).map((part) => `${inner}${part}`).join(",\n")}\n${indent}${close}`;
}

// A text of JSON is one of Python, too.
function pythonOf(value) {
  if (value === null) return "None";
  return typeof value === "boolean" ? (value ? "True" : "False") : JSON.stringify(value);
}
