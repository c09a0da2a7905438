// Twelve steps with the public API from C++: `twelve_steps HOST:PORT`. Steps and results are described in ../README.md.
#include <chrono>
#include <iomanip>
#include <iostream>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>

#include <grpcpp/grpcpp.h>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "triptych/api/v1/inference.grpc.pb.h"
#include "triptych/api/v1/model.grpc.pb.h"
#include "triptych/api/v1/tokenizer.grpc.pb.h"

namespace api = triptych::api::v1;
namespace health = grpc::health::v1;
using namespace std::chrono_literals;
using std::chrono::steady_clock;

const std::string kPrompt = "Once upon a time";
const auto kMaxWait = 60s;

// Fails unless `condition` is true.
void Expect(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error(what);
}

void Expect(const grpc::Status& status, grpc::StatusCode code = grpc::StatusCode::OK) {
  Expect(status.error_code() == code, "status " + std::to_string(status.error_code()) + ": " + status.error_message());
}

// Prints the line of one step.
void Show(int step, const std::string& name, const std::string& result) {
  std::cout << std::setw(2) << step << ' ' << std::left << std::setw(12) << name << std::right << ' ' << result << std::endl;
}

// The context of one call, with a deadline.
struct Call : grpc::ClientContext {
  explicit Call(std::chrono::milliseconds limit = kMaxWait) { set_deadline(std::chrono::system_clock::now() + limit); }
};

std::shared_ptr<grpc::Channel> Connect(const std::string& target) {
  grpc::ChannelArguments options;
  options.SetMaxReceiveMessageSize(64 << 20);
  options.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 10'000);
  options.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 5'000);
  return grpc::CreateCustomChannel(target, grpc::InsecureChannelCredentials(), options);
}

// The services of a frontend, over one channel.
struct Frontend {
  explicit Frontend(const std::string& target) : channel(Connect(target)) {}

  std::shared_ptr<grpc::Channel> channel;
  health::Health::Stub health{channel};
  api::InferenceService::Stub inference{channel};
  api::ModelService::Stub models{channel};
  api::TokenizerService::Stub tokenizer{channel};
};

api::GenerateRequest Greedy(int max_tokens) {
  api::GenerateRequest request;
  request.set_prompt(kPrompt);
  request.mutable_sampling()->set_temperature(0);
  request.mutable_sampling()->set_max_tokens(max_tokens);
  request.mutable_sampling()->set_ignore_eos(true);
  return request;
}

// 16 outputs as long as the model permits: many seconds.
api::GenerateRequest Endless() {
  api::GenerateRequest request;
  request.set_prompt(kPrompt);
  request.mutable_sampling()->set_n(16);
  request.mutable_sampling()->set_ignore_eos(true);
  return request;
}

// Makes a call that must fail with `code`, and returns its status.
grpc::Status Refused(Frontend& frontend, const api::GenerateRequest& request, grpc::StatusCode code,
                     std::chrono::milliseconds limit = kMaxWait) {
  Call call(limit);
  api::GenerateUnaryResponse response;
  const auto status = frontend.inference.GenerateOnce(&call, request, &response);
  Expect(status, code);
  return status;
}

// The one field that the details of a status name.
google::rpc::BadRequest::FieldViolation Violation(const grpc::Status& status) {
  google::rpc::Status details;
  Expect(details.ParseFromString(status.error_details()), "no google.rpc.Status");
  google::rpc::BadRequest refused;
  for (const auto& detail : details.details()) {
    if (detail.UnpackTo(&refused) && refused.field_violations_size() == 1) return refused.field_violations(0);
  }
  throw std::runtime_error("no field violation in " + details.DebugString());
}

// The stream of one answer: started, then deltas, then finished.
class Stream {
 public:
  Stream(Frontend& frontend, const api::GenerateRequest& request)
      : reader_(frontend.inference.Generate(&call_, request)) {
    Expect(Read().has_started(), "the stream did not begin with started");
  }

  // Reads to the end.
  std::string Text() {
    std::string text;
    for (;;) {
      const auto response = Read();
      if (response.has_finished()) break;
      Expect(response.has_delta(), "event " + response.DebugString());
      text += response.delta().text();
    }
    api::GenerateResponse more;
    Expect(!reader_->Read(&more), "a message after finished");
    Expect(reader_->Finish());
    return text;
  }

  // Cancels it after its first delta.
  void Cancel() {
    Expect(Read().has_delta(), "ended before it was cancelled");
    call_.TryCancel();
    Expect(reader_->Finish(), grpc::StatusCode::CANCELLED);
  }

 private:
  api::GenerateResponse Read() {
    api::GenerateResponse response;
    if (!reader_->Read(&response)) Expect(reader_->Finish());
    return response;
  }

  Call call_;
  std::unique_ptr<grpc::ClientReader<api::GenerateResponse>> reader_;
};

// An abandoned request is aborted: soon, the frontend has none in flight.
void WaitUntilIdle(Frontend& frontend) {
  for (const auto give_up_at = steady_clock::now() + 5s;; std::this_thread::sleep_for(20ms)) {
    Call call;
    api::GetServerInfoResponse info;
    Expect(frontend.models.GetServerInfo(&call, {}, &info));
    int num_in_flight = 0;
    for (const auto& engine : info.engines()) num_in_flight += engine.num_in_flight();
    if (num_in_flight == 0) return;
    Expect(steady_clock::now() < give_up_at, "still in flight after 5 s");
  }
}

void LookAround(Frontend& frontend) {
  Call check;
  health::HealthCheckRequest service;
  service.set_service("triptych.api.v1.InferenceService");
  health::HealthCheckResponse state;
  Expect(frontend.health.Check(&check, service, &state));
  Show(1, "health", health::HealthCheckResponse::ServingStatus_Name(state.status()));

  Call list;
  api::ListModelsResponse served;
  Expect(frontend.models.ListModels(&list, {}, &served));
  Expect(served.models_size() == 1, "models " + served.DebugString());
  const auto& model = served.models(0);
  Show(2, "models", model.name() + ", up to " + std::to_string(model.max_model_len()) + " tokens");
}

std::string UnaryAndStream(Frontend& frontend) {
  Call call;
  api::GenerateUnaryResponse response;
  Expect(frontend.inference.GenerateOnce(&call, Greedy(24), &response));
  const auto& output = response.outputs(0);
  const auto num_tokens = response.usage().num_completion_tokens();
  Expect(num_tokens == static_cast<uint32_t>(output.token_ids_size()), "usage " + response.usage().DebugString());
  Expect(output.reason() == triptych::common::v1::FINISH_REASON_LENGTH, "finished otherwise: " + output.DebugString());
  Show(3, "unary", std::to_string(num_tokens) + " tokens, finished by length");

  Expect(Stream(frontend, Greedy(24)).Text() == output.text(), "another text than the unary answer");
  Show(4, "stream", "the text of the unary answer");
  return output.text();
}

void CancelAndDeadline(Frontend& frontend) {
  Stream(frontend, Endless()).Cancel();
  WaitUntilIdle(frontend);
  Show(5, "cancel", "nothing in flight");

  Refused(frontend, Endless(), grpc::StatusCode::DEADLINE_EXCEEDED, 200ms);
  WaitUntilIdle(frontend);
  Show(6, "deadline", "DEADLINE_EXCEEDED, nothing in flight");
}

void Refusals(Frontend& frontend) {
  auto unknown = Greedy(24);
  unknown.set_model("nope");
  Show(7, "bad model", "NOT_FOUND: " + Refused(frontend, unknown, grpc::StatusCode::NOT_FOUND).error_message());

  auto hot = Greedy(24);
  hot.mutable_sampling()->set_temperature(99);
  const auto bad = Violation(Refused(frontend, hot, grpc::StatusCode::INVALID_ARGUMENT));
  Show(8, "bad field", "INVALID_ARGUMENT in " + bad.field() + ": " + bad.description());
}

void BigPrompt(Frontend& frontend) {
  auto request = Greedy(24);
  request.set_prompt(std::string(5 << 20, 'x'));
  const auto bad = Violation(Refused(frontend, request, grpc::StatusCode::INVALID_ARGUMENT));

  api::TokenizeRequest text;
  text.set_text(std::string(500'000, 'x'));
  text.set_return_tokens(true);
  Call call;
  api::TokenizeResponse response;
  Expect(frontend.tokenizer.Tokenize(&call, text, &response));
  const auto& tokens = response.tokens();
  Expect(!tokens.empty() && *tokens.rbegin() == "x", "the last token is not x");
  Show(9, "big prompt",
       "INVALID_ARGUMENT in " + bad.field() + "; " + std::to_string(tokens.size()) + " tokens with their names came back");
}

void TwoStreams(Frontend& frontend, const std::string& text) {
  Stream first(frontend, Greedy(24)), second(frontend, Greedy(24));
  Expect(first.Text() == text && second.Text() == text, "another text than the unary answer");
  Show(10, "two streams", "the text of the unary answer, twice");
}

void Ids(Frontend& frontend) {
  Call call;
  call.AddMetadata("x-request-id", "twelve-steps");
  call.AddMetadata("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01");
  api::GenerateUnaryResponse response;
  Expect(frontend.inference.GenerateOnce(&call, Greedy(1), &response));
  const auto received = [&call](const std::string& key) {
    const auto entry = call.GetServerInitialMetadata().find(key);
    Expect(entry != call.GetServerInitialMetadata().end(), "no metadata " + key);
    return std::string(entry->second.data(), entry->second.size());
  };
  Show(11, "ids", "x-request-id " + received("x-request-id") + ", x-trace-id " + received("x-trace-id"));
}

// Streams until the server asks the channel to leave its connection, and then once more.
void Reconnect(Frontend& frontend) {
  const auto give_up_at = steady_clock::now() + kMaxWait;
  do {
    Expect(steady_clock::now() < give_up_at, "no GOAWAY in 60 s");
    Stream(frontend, Greedy(200)).Text();
  } while (frontend.channel->GetState(false) == GRPC_CHANNEL_READY);
  Stream(frontend, Greedy(200)).Text();
  Show(12, "reconnect", "a stream outlived its connection, the next call took another");
}

int main(int argc, char** argv) try {
  Expect(argc == 2, "usage: twelve_steps HOST:PORT");
  Frontend frontend(argv[1]);
  LookAround(frontend);
  const auto text = UnaryAndStream(frontend);
  CancelAndDeadline(frontend);
  Refusals(frontend);
  BigPrompt(frontend);
  TwoStreams(frontend, text);
  Ids(frontend);
  Reconnect(frontend);
  std::cout << "OK" << std::endl;
} catch (const std::exception& error) {
  std::cerr << "surprise: " << error.what() << std::endl;
  return 1;
}
