// A request of the playground: what is sent, and the same as a command for a terminal or a script.

export const NUMBERS = ["temperature", "max_tokens", "seed", "logprobs"];

const METHODS = {
  generate: { service: "InferenceService", method: "Generate", module: "generate_pb2", message: "GenerateRequest", stub: "inference_pb2_grpc", text: "text" },
  chat: { service: "ChatService", method: "Chat", module: "chat_message_pb2", message: "ChatRequest", stub: "chat_pb2_grpc", text: "content" },
};

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

const WRITERS = {
  buf(kind, request, address) {
    const { service, method } = METHODS[kind];
    return [
      "buf curl --protocol grpc --http2-prior-knowledge \\",
      `  -d ${quoted(JSON.stringify(request))} \\`,
      `  http://${address}/triptych.api.v1.${service}/${method}`,
    ].join("\n");
  },

  python(kind, request, address) {
    const { service, method, module, message, stub, text } = METHODS[kind];
    return [
      "import grpc",
      "from google.protobuf import json_format",
      `from triptych.api.v1 import ${module}, ${stub}`,
      "",
      // The text of a JSON string is one in Python, too.
      `request = json_format.Parse(${JSON.stringify(JSON.stringify(request))}, ${module}.${message}())`,
      `with grpc.insecure_channel(${JSON.stringify(address)}) as channel:`,
      `    for response in ${stub}.${service}Stub(channel).${method}(request):`,
      `        print(response.delta.${text}, end="", flush=True)`,
    ].join("\n");
  },

  curl(kind, request) {
    return [
      "curl -N -H 'content-type: application/json' \\",
      `  -d ${quoted(JSON.stringify(request))} \\`,
      `  ${location.origin}/ui/${kind}`,
    ].join("\n");
  },
};

// The JSON of a GenerateRequest or, with the turns of a conversation, of a ChatRequest. `fields` has the texts of the
// form. What is not a number is sent as it is, and refused by the frontend.
export function makeRequest(kind, fields, turns) {
  const request = {};
  if (fields.model) request.model = fields.model;
  if (kind === "chat") {
    const system = fields.system ? [{ role: "SYSTEM", text: fields.system }] : [];
    const messages = [...system, ...turns, { role: "USER", text: fields.prompt }];
    request.messages = messages.map(({ role, text }) => ({ role: `CHAT_ROLE_${role}`, parts: [{ text }] }));
  } else {
    request.prompt = fields.prompt;
  }
  const given = NUMBERS.filter((name) => fields[name].trim() !== "");
  if (given.length) request.sampling = Object.fromEntries(given.map((name) => [name, numberOf(fields[name].trim())]));
  return request;
}

// A number, unless the text is none or has more digits than one can have here: JSON of protobuf takes texts, too.
function numberOf(text) {
  const number = Number(text);
  const isExact = Number.isFinite(number) && (!/^-?\d+$/.test(text) || Number.isSafeInteger(number));
  return isExact ? number : text;
}

export function writeCommand(writer, kind, request, address) {
  return WRITERS[writer](kind, request, address);
}
