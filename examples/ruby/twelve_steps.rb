# Twelve steps with the public API from Ruby: `ruby twelve_steps.rb HOST:PORT`, after `make`. Steps and results are
# described in ../README.md.
$LOAD_PATH.unshift(File.join(__dir__, 'build'))

require 'google/protobuf/well_known_types'
require 'google/rpc/error_details_pb'
require 'google/rpc/status_pb'
require 'grpc'
require 'grpc/health/v1/health_services_pb'
require 'triptych/api/v1/inference_services_pb'
require 'triptych/api/v1/model_services_pb'
require 'triptych/api/v1/tokenizer_services_pb'

PROMPT = 'Once upon a time'
TRACEPARENT = '00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01'
MAX_WAIT_S = 60

# The server's behaviour differs from what this example expects.
class Surprise < StandardError; end

def expect(condition, what)
  raise Surprise, what unless condition
end

# Prints the line of one step.
def show(step, name, result)
  puts format('%2d %-12s %s', step, name, result)
end

# A client of one frontend over one channel.
class TwelveSteps
  include Triptych::Api::V1
  include Triptych::Common::V1

  def initialize(target)
    options = {
      'grpc.max_receive_message_length' => 64 << 20,
      'grpc.keepalive_time_ms' => 10_000,
      'grpc.keepalive_timeout_ms' => 5_000
    }
    @channel = GRPC::Core::Channel.new(target, options, :this_channel_is_insecure)
    stub = ->(service) { service::Stub.new(target, nil, channel_override: @channel, timeout: MAX_WAIT_S) }
    @health = stub.call(Grpc::Health::V1::Health)
    @inference = stub.call(InferenceService)
    @models = stub.call(ModelService)
    @tokenizer = stub.call(TokenizerService)
  end

  def run
    look_around
    text = unary_and_stream
    cancel_and_deadline
    refusals
    big_prompt
    two_streams(text)
    ids
    reconnect
  end

  private

  def request(sampling, **fields)
    GenerateRequest.new(prompt: PROMPT, sampling: SamplingParams.new(**sampling), **fields)
  end

  def greedy(max_tokens = 24, **fields)
    request({ temperature: 0, max_tokens: max_tokens, ignore_eos: true }, **fields)
  end

  # 16 outputs as long as the model permits: many seconds.
  def endless
    request({ n: 16, ignore_eos: true })
  end

  def generate_once(request, **options)
    @inference.generate_once(request, **options)
  end

  # Makes a call that must fail with an error of the class, and returns it.
  def refused(error_class, request, **options)
    generate_once(request, **options)
  rescue error_class => error
    error
  else
    raise Surprise, "an answer instead of #{error_class}"
  end

  # The one field that the details of a status name.
  def violation(error)
    detail = error.to_rpc_status.details.find { |each| each.is(Google::Rpc::BadRequest) }
    expect(detail, "no field violation in #{error}")
    violations = detail.unpack(Google::Rpc::BadRequest).field_violations
    expect(violations.size == 1, "violations #{violations}")
    violations.first
  end

  # Starts a stream and reads its first message.
  def open(request)
    stream = @inference.generate(request)
    expect(stream.next.started, 'the stream did not begin with started')
    stream
  end

  # Reads a stream from its first delta to its end, and returns the text.
  def read_text(stream)
    responses = []
    loop { responses << stream.next } # until StopIteration
    *deltas, last = responses
    expect(last.finished && deltas.all?(&:delta), "events #{responses.map(&:event)}")
    deltas.map { |response| response.delta.text }.join
  end

  # An abandoned request is aborted: soon, the frontend has none in flight.
  def wait_until_idle
    give_up_at = Time.now + 5
    until @models.get_server_info(GetServerInfoRequest.new).engines.sum(&:num_in_flight).zero?
      expect(Time.now < give_up_at, 'still in flight after 5 s')
      sleep 0.02
    end
  end

  def look_around
    service = Grpc::Health::V1::HealthCheckRequest.new(service: InferenceService::Service.service_name)
    show(1, 'health', @health.check(service).status)

    models = @models.list_models(ListModelsRequest.new).models
    expect(models.size == 1, "models #{models}")
    show(2, 'models', "#{models[0].name}, up to #{models[0].max_model_len} tokens")
  end

  def unary_and_stream
    response = generate_once(greedy)
    output = response.outputs.first
    expect(output.reason == :FINISH_REASON_LENGTH, "finish reason #{output.reason}")
    expect(response.usage.num_completion_tokens == output.token_ids.size, "usage #{response.usage}")
    show(3, 'unary', "#{output.token_ids.size} tokens, finished by length")

    text = read_text(open(greedy))
    expect(text == output.text, "another text than the unary answer: #{text}")
    show(4, 'stream', 'the text of the unary answer')
    text
  end

  def cancel_and_deadline
    call = @inference.generate(endless, return_op: true)
    begin
      call.execute.each { |response| call.cancel if response.delta }
      raise Surprise, 'ended before it was cancelled'
    rescue GRPC::Cancelled
      wait_until_idle
    end
    show(5, 'cancel', 'nothing in flight')

    refused(GRPC::DeadlineExceeded, endless, deadline: Time.now + 0.2)
    wait_until_idle
    show(6, 'deadline', 'DEADLINE_EXCEEDED, nothing in flight')
  end

  def refusals
    unknown = refused(GRPC::NotFound, greedy(model: 'nope'))
    show(7, 'bad model', "NOT_FOUND: #{unknown.details}")

    bad = violation(refused(GRPC::InvalidArgument, request({ temperature: 99 })))
    show(8, 'bad field', "INVALID_ARGUMENT in #{bad.field}: #{bad.description}")
  end

  def big_prompt
    bad = violation(refused(GRPC::InvalidArgument, GenerateRequest.new(prompt: 'x' * (5 << 20))))
    tokens = @tokenizer.tokenize(TokenizeRequest.new(text: 'x' * 500_000, return_tokens: true)).tokens
    expect(tokens[-1] == 'x', "last token #{tokens[-1]}")
    show(9, 'big prompt', "INVALID_ARGUMENT in #{bad.field}; #{tokens.size} tokens with their names came back")
  end

  def two_streams(text)
    streams = [open(greedy), open(greedy)]
    expect(streams.all? { |stream| read_text(stream) == text }, 'another text than the unary answer')
    show(10, 'two streams', 'the text of the unary answer, twice')
  end

  def ids
    metadata = { 'x-request-id' => 'twelve-steps', 'traceparent' => TRACEPARENT }
    call = generate_once(greedy(1), metadata: metadata, return_op: true)
    call.execute
    request_id, trace_id = call.metadata.values_at('x-request-id', 'x-trace-id')
    show(11, 'ids', "x-request-id #{request_id}, x-trace-id #{trace_id}")
  end

  # Streams until the server asks the channel to leave its connection, and then once more.
  def reconnect
    give_up_at = Time.now + MAX_WAIT_S
    loop do
      expect(Time.now < give_up_at, "no GOAWAY in #{MAX_WAIT_S} s")
      read_text(open(greedy(200)))
      break if @channel.connectivity_state != GRPC::Core::ConnectivityStates::READY
    end
    read_text(open(greedy(200)))
    show(12, 'reconnect', 'a stream outlived its connection, the next call took another')
  end
end

begin
  TwelveSteps.new(ARGV.fetch(0)).run
  puts 'OK'
rescue Surprise, GRPC::BadStatus => surprise
  abort "surprise: #{surprise.message}"
end
