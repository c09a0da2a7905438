// A request of the playground as a command for a terminal or a script.

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

export function writeCommand(writer, kind, request, address) {
  return WRITERS[writer](kind, request, address);
}
