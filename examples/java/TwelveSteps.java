// Twelve steps with the public API from Java: `build/twelve_steps HOST:PORT`. Steps and results are described in ../README.md.

import com.google.protobuf.Any;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.rpc.BadRequest;
import io.grpc.ConnectivityState;
import io.grpc.Context;
import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;
import io.grpc.Metadata;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.health.v1.HealthCheckRequest;
import io.grpc.health.v1.HealthGrpc;
import io.grpc.protobuf.StatusProto;
import io.grpc.stub.AbstractStub;
import io.grpc.stub.MetadataUtils;
import java.util.Iterator;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicReference;
import triptych.api.v1.GenerateRequest;
import triptych.api.v1.GenerateResponse;
import triptych.api.v1.GetServerInfoRequest;
import triptych.api.v1.InferenceServiceGrpc;
import triptych.api.v1.InferenceServiceGrpc.InferenceServiceBlockingStub;
import triptych.api.v1.ListModelsRequest;
import triptych.api.v1.ModelServiceGrpc;
import triptych.api.v1.ModelServiceGrpc.ModelServiceBlockingStub;
import triptych.api.v1.TokenizeRequest;
import triptych.api.v1.TokenizerServiceGrpc;
import triptych.common.v1.FinishReason;
import triptych.common.v1.SamplingParams;

/** A client of one frontend over one channel. */
public final class TwelveSteps implements AutoCloseable {
  private static final String PROMPT = "Once upon a time";
  private static final long MAX_WAIT_S = 60;

  private final ManagedChannel channel;

  private TwelveSteps(String target) {
    channel =
        ManagedChannelBuilder.forTarget(target)
            .usePlaintext()
            .maxInboundMessageSize(64 << 20)
            .keepAliveTime(10, TimeUnit.SECONDS)
            .keepAliveTimeout(5, TimeUnit.SECONDS)
            .build();
  }

  @Override
  public void close() {
    channel.shutdownNow();
  }

  private static void expect(boolean condition, Object what) {
    if (!condition) {
      throw new IllegalStateException(what.toString());
    }
  }

  /** Prints the line of one step. */
  private static void show(int step, String name, String result) {
    System.out.printf("%2d %-12s %s%n", step, name, result);
  }

  // A deadline counts from here, so each call has a stub of its own.
  private static <S extends AbstractStub<S>> S timed(S stub) {
    return stub.withDeadlineAfter(MAX_WAIT_S, TimeUnit.SECONDS);
  }

  private InferenceServiceBlockingStub inference() {
    return timed(InferenceServiceGrpc.newBlockingStub(channel));
  }

  private ModelServiceBlockingStub models() {
    return timed(ModelServiceGrpc.newBlockingStub(channel));
  }

  private static GenerateRequest.Builder prompt(SamplingParams.Builder sampling) {
    return GenerateRequest.newBuilder().setPrompt(PROMPT).setSampling(sampling);
  }

  private static GenerateRequest.Builder greedy(int maxTokens) {
    return prompt(SamplingParams.newBuilder().setTemperature(0).setMaxTokens(maxTokens).setIgnoreEos(true));
  }

  /** 16 outputs as long as the model permits: many seconds. */
  private static GenerateRequest.Builder endless() {
    return prompt(SamplingParams.newBuilder().setN(16).setIgnoreEos(true));
  }

  /** Makes a call that must fail with {@code code}, and returns its error. */
  private static StatusRuntimeException refused(
      InferenceServiceBlockingStub inference, GenerateRequest.Builder request, Status.Code code) {
    try {
      inference.generateOnce(request.build());
    } catch (StatusRuntimeException error) {
      expect(error.getStatus().getCode() == code, error);
      return error;
    }
    throw new IllegalStateException("an answer instead of " + code);
  }

  /** The one field that the details of a status name. */
  private static BadRequest.FieldViolation violation(StatusRuntimeException error)
      throws InvalidProtocolBufferException {
    for (Any detail : StatusProto.fromThrowable(error).getDetailsList()) {
      if (detail.is(BadRequest.class)) {
        BadRequest refused = detail.unpack(BadRequest.class);
        expect(refused.getFieldViolationsCount() == 1, refused);
        return refused.getFieldViolations(0);
      }
    }
    throw new IllegalStateException("no field violation in " + error);
  }

  /** Starts a stream and reads its first message. */
  private Iterator<GenerateResponse> open(GenerateRequest.Builder request) {
    Iterator<GenerateResponse> responses = inference().generate(request.build());
    expect(responses.next().hasStarted(), "the stream did not begin with started");
    return responses;
  }

  /** Reads a stream from its first delta to its end, and returns the text. */
  private static String readText(Iterator<GenerateResponse> responses) {
    StringBuilder text = new StringBuilder();
    GenerateResponse response = responses.next();
    for (; response.hasDelta(); response = responses.next()) {
      text.append(response.getDelta().getText());
    }
    expect(response.hasFinished() && !responses.hasNext(), response);
    return text.toString();
  }

  /** An abandoned request is aborted: soon, the frontend has none in flight. */
  private void waitUntilIdle() throws InterruptedException {
    long giveUpAt = System.nanoTime() + TimeUnit.SECONDS.toNanos(5);
    while (models().getServerInfo(GetServerInfoRequest.getDefaultInstance()).getEnginesList().stream()
        .anyMatch(engine -> engine.getNumInFlight() > 0)) {
      expect(System.nanoTime() < giveUpAt, "still in flight after 5 s");
      Thread.sleep(20);
    }
  }

  private void lookAround() {
    var request = HealthCheckRequest.newBuilder().setService(InferenceServiceGrpc.SERVICE_NAME).build();
    show(1, "health", timed(HealthGrpc.newBlockingStub(channel)).check(request).getStatus().toString());

    var models = models().listModels(ListModelsRequest.getDefaultInstance()).getModelsList();
    expect(models.size() == 1, models);
    show(2, "models", models.get(0).getName() + ", up to " + models.get(0).getMaxModelLen() + " tokens");
  }

  private String unaryAndStream() {
    var response = inference().generateOnce(greedy(24).build());
    var output = response.getOutputs(0);
    expect(output.getReason() == FinishReason.FINISH_REASON_LENGTH, output);
    expect(response.getUsage().getNumCompletionTokens() == output.getTokenIdsCount(), response);
    show(3, "unary", output.getTokenIdsCount() + " tokens, finished by length");

    String text = readText(open(greedy(24)));
    expect(text.equals(output.getText()), "another text than the unary answer: " + text);
    show(4, "stream", "the text of the unary answer");
    return text;
  }

  private void cancelAndDeadline() throws InterruptedException {
    // The calls made in a context end with it.
    try (var context = Context.current().withCancellation()) {
      context.run(() -> expect(open(endless()).next().hasDelta(), "ended before it was cancelled"));
    }
    waitUntilIdle();
    show(5, "cancel", "nothing in flight");

    var hurried = InferenceServiceGrpc.newBlockingStub(channel).withDeadlineAfter(200, TimeUnit.MILLISECONDS);
    refused(hurried, endless(), Status.Code.DEADLINE_EXCEEDED);
    waitUntilIdle();
    show(6, "deadline", "DEADLINE_EXCEEDED, nothing in flight");
  }

  private void refusals() throws InvalidProtocolBufferException {
    var unknown = refused(inference(), greedy(24).setModel("nope"), Status.Code.NOT_FOUND);
    show(7, "bad model", "NOT_FOUND: " + unknown.getStatus().getDescription());

    var hot = prompt(SamplingParams.newBuilder().setTemperature(99));
    var bad = violation(refused(inference(), hot, Status.Code.INVALID_ARGUMENT));
    show(8, "bad field", "INVALID_ARGUMENT in " + bad.getField() + ": " + bad.getDescription());

    var big = greedy(24).setPrompt("x".repeat(5 << 20));
    bad = violation(refused(inference(), big, Status.Code.INVALID_ARGUMENT));
    var text = TokenizeRequest.newBuilder().setText("x".repeat(500_000)).setReturnTokens(true).build();
    var tokens = timed(TokenizerServiceGrpc.newBlockingStub(channel)).tokenize(text).getTokensList();
    expect(tokens.get(tokens.size() - 1).equals("x"), "the last token is not x");
    String back = tokens.size() + " tokens with their names came back";
    show(9, "big prompt", "INVALID_ARGUMENT in " + bad.getField() + "; " + back);
  }

  private void twoStreams(String text) {
    var first = open(greedy(24));
    var second = open(greedy(24));
    expect(readText(first).equals(text) && readText(second).equals(text), "another text than the unary answer");
    show(10, "two streams", "the text of the unary answer, twice");
  }

  private void ids() {
    var requestId = Metadata.Key.of("x-request-id", Metadata.ASCII_STRING_MARSHALLER);
    var traceId = Metadata.Key.of("x-trace-id", Metadata.ASCII_STRING_MARSHALLER);
    var traceparent = Metadata.Key.of("traceparent", Metadata.ASCII_STRING_MARSHALLER);
    Metadata sent = new Metadata();
    sent.put(requestId, "twelve-steps");
    sent.put(traceparent, "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01");
    var received = new AtomicReference<Metadata>();
    var withMetadata =
        inference()
            .withInterceptors(
                MetadataUtils.newAttachHeadersInterceptor(sent),
                MetadataUtils.newCaptureMetadataInterceptor(received, new AtomicReference<>()));
    withMetadata.generateOnce(greedy(1).build());
    Metadata headers = received.get();
    show(11, "ids", "x-request-id " + headers.get(requestId) + ", x-trace-id " + headers.get(traceId));
  }

  /** Streams until the server asks the channel to leave its connection, and then once more. */
  private void reconnect() {
    long giveUpAt = System.nanoTime() + TimeUnit.SECONDS.toNanos(MAX_WAIT_S);
    do {
      expect(System.nanoTime() < giveUpAt, "no GOAWAY in " + MAX_WAIT_S + " s");
      readText(open(greedy(200)));
    } while (channel.getState(false) == ConnectivityState.READY);
    readText(open(greedy(200)));
    show(12, "reconnect", "a stream outlived its connection, the next call took another");
  }

  public static void main(String[] arguments) throws Exception {
    try (var client = new TwelveSteps(arguments[0])) {
      client.lookAround();
      String text = client.unaryAndStream();
      client.cancelAndDeadline();
      client.refusals();
      client.twoStreams(text);
      client.ids();
      client.reconnect();
      System.out.println("OK");
    } catch (RuntimeException surprise) {
      System.err.println("surprise: " + surprise);
      System.exit(1);
    }
  }
}
