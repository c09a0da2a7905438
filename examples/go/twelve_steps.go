// Twelve steps with the public API from Go: twelve_steps HOST:PORT. Steps and results are described in ../README.md.
package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	api "triptych/api/v1"
	common "triptych/common/v1"
)

const (
	prompt      = "Once upon a time"
	traceparent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
)

// The contexts of all calls are derived from this one, so that none lasts longer.
var ctx, stop = context.WithTimeout(context.Background(), 2*time.Minute)

func expect(condition bool, format string, values ...interface{}) {
	if !condition {
		fmt.Fprintf(os.Stderr, "surprise: "+format+"\n", values...)
		os.Exit(1)
	}
}

func succeed(err error) {
	expect(err == nil, "%v", err)
}

func show(step int, name string, format string, values ...interface{}) {
	fmt.Printf("%2d %-12s %s\n", step, name, fmt.Sprintf(format, values...))
}

type client struct {
	channel   *grpc.ClientConn
	health    grpc_health_v1.HealthClient
	inference api.InferenceServiceClient
	models    api.ModelServiceClient
	tokenizer api.TokenizerServiceClient
}

func connect(target string) client {
	channel, err := grpc.Dial(target,
		grpc.WithInsecure(),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(64<<20)),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 10 * time.Second, Timeout: 5 * time.Second}))
	succeed(err)
	return client{
		channel,
		grpc_health_v1.NewHealthClient(channel),
		api.NewInferenceServiceClient(channel),
		api.NewModelServiceClient(channel),
		api.NewTokenizerServiceClient(channel),
	}
}

func textRequest(text string, sampling *common.SamplingParams) *api.GenerateRequest {
	return &api.GenerateRequest{Input: &api.GenerateRequest_Prompt{Prompt: text}, Sampling: sampling}
}

func greedy(maxTokens int64) *api.GenerateRequest {
	return textRequest(prompt, &common.SamplingParams{
		Temperature: proto.Float32(0), MaxTokens: proto.Int64(maxTokens), IgnoreEos: true,
	})
}

// 16 outputs as long as the model allows: many seconds.
func endless() *api.GenerateRequest {
	return textRequest(prompt, &common.SamplingParams{N: proto.Int64(16), IgnoreEos: true})
}

func (c client) unary(ctx context.Context, request *api.GenerateRequest, options ...grpc.CallOption) (*api.GenerateUnaryResponse, error) {
	return c.inference.GenerateOnce(ctx, request, options...)
}

// refused makes a call that must fail with `code`, and returns its status.
func (c client) refused(ctx context.Context, request *api.GenerateRequest, code codes.Code) *status.Status {
	_, err := c.unary(ctx, request)
	expect(status.Code(err) == code, "%v instead of %v", err, code)
	return status.Convert(err)
}

// violation returns the one field violation among the details of a status.
func violation(refusal *status.Status) *errdetails.BadRequest_FieldViolation {
	for _, detail := range refusal.Details() {
		if badRequest, ok := detail.(*errdetails.BadRequest); ok && len(badRequest.FieldViolations) == 1 {
			return badRequest.FieldViolations[0]
		}
	}
	expect(false, "no field violation in %v", refusal)
	return nil
}

// readText reads a stream from its first delta to its end, and returns the text.
func readText(stream api.InferenceService_GenerateClient) string {
	var text strings.Builder
	isFinished := false
	for {
		response, err := stream.Recv()
		if err == io.EOF {
			expect(isFinished, "the stream ended without finished")
			return text.String()
		}
		succeed(err)
		expect(!isFinished, "%v after finished", response)
		switch event := response.Event.(type) {
		case *api.GenerateResponse_Delta:
			text.WriteString(event.Delta.Text)
		case *api.GenerateResponse_Finished:
			isFinished = true
		default:
			expect(false, "event %v", response)
		}
	}
}

// open starts a stream and reads its first message.
func (c client) open(request *api.GenerateRequest) api.InferenceService_GenerateClient {
	stream, err := c.inference.Generate(ctx, request)
	succeed(err)
	response, err := stream.Recv()
	succeed(err)
	expect(response.GetStarted() != nil, "first event %v", response)
	return stream
}

func (c client) waitUntilIdle() {
	for giveUpAt := time.Now().Add(5 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		info, err := c.models.GetServerInfo(ctx, &api.GetServerInfoRequest{})
		succeed(err)
		inFlight := uint32(0)
		for _, engine := range info.Engines {
			inFlight += engine.NumInFlight
		}
		if inFlight == 0 {
			return
		}
		expect(time.Now().Before(giveUpAt), "still in flight after 5 s")
	}
}

func (c client) lookAround() {
	health, err := c.health.Check(ctx, &grpc_health_v1.HealthCheckRequest{Service: "triptych.api.v1.InferenceService"})
	succeed(err)
	expect(health.Status == grpc_health_v1.HealthCheckResponse_SERVING, "health is %v", health.Status)
	show(1, "health", "SERVING")

	list, err := c.models.ListModels(ctx, &api.ListModelsRequest{})
	succeed(err)
	expect(len(list.Models) == 1, "models %v", list.Models)
	show(2, "models", "%s, up to %d tokens", list.Models[0].Name, list.Models[0].MaxModelLen)
}

func (c client) unaryAndStream() string {
	response, err := c.unary(ctx, greedy(24))
	succeed(err)
	output := response.Outputs[0]
	expect(output.Reason == common.FinishReason_FINISH_REASON_LENGTH, "finish reason %v", output.Reason)
	expect(int(response.Usage.NumCompletionTokens) == len(output.TokenIds), "usage %v", response.Usage)
	show(3, "unary", "%d tokens, finished by length", len(output.TokenIds))

	text := readText(c.open(greedy(24)))
	expect(text == output.Text, "another text than the unary answer: %q", text)
	show(4, "stream", "the text of the unary answer")
	return text
}

func (c client) cancelAndDeadline() {
	cancellable, cancel := context.WithCancel(ctx)
	stream, err := c.inference.Generate(cancellable, endless())
	succeed(err)
	for err == nil {
		var response *api.GenerateResponse
		response, err = stream.Recv()
		if response.GetDelta() != nil {
			cancel()
		}
	}
	expect(status.Code(err) == codes.Canceled, "the cancelled stream ended with %v", err)
	c.waitUntilIdle()
	show(5, "cancel", "nothing in flight")

	short, cancel := context.WithTimeout(ctx, 200*time.Millisecond)
	defer cancel()
	c.refused(short, endless(), codes.DeadlineExceeded)
	c.waitUntilIdle()
	show(6, "deadline", "DEADLINE_EXCEEDED, nothing in flight")
}

func (c client) refusals() {
	unknown := greedy(24)
	unknown.Model = "nope"
	show(7, "bad model", "NOT_FOUND: %s", c.refused(ctx, unknown, codes.NotFound).Message())

	hot := textRequest(prompt, &common.SamplingParams{Temperature: proto.Float32(99)})
	bad := violation(c.refused(ctx, hot, codes.InvalidArgument))
	show(8, "bad field", "INVALID_ARGUMENT in %s: %s", bad.Field, bad.Description)

	bad = violation(c.refused(ctx, textRequest(strings.Repeat("x", 5<<20), nil), codes.InvalidArgument))
	tokens, err := c.tokenizer.Tokenize(ctx, &api.TokenizeRequest{Text: strings.Repeat("x", 500000), ReturnTokens: true})
	succeed(err)
	expect(tokens.Tokens[len(tokens.Tokens)-1] == "x", "the last token is not x")
	show(9, "big prompt", "INVALID_ARGUMENT in %s; %d tokens with their names came back", bad.Field, len(tokens.Tokens))
}

func (c client) twoStreams(text string) {
	first, second := c.open(greedy(24)), c.open(greedy(24))
	expect(readText(first) == text && readText(second) == text, "another text than the unary answer")
	show(10, "two streams", "the text of the unary answer, twice")
}

func (c client) ids() {
	var header metadata.MD
	outgoing := metadata.AppendToOutgoingContext(ctx, "x-request-id", "twelve-steps", "traceparent", traceparent)
	_, err := c.unary(outgoing, greedy(1), grpc.Header(&header))
	succeed(err)
	show(11, "ids", "x-request-id %s, x-trace-id %s", header.Get("x-request-id")[0], header.Get("x-trace-id")[0])
}

// reconnect streams until the server asks the channel to leave its connection, and then once more.
func (c client) reconnect() {
	left := make(chan bool, 1)
	go func() {
		bounded, cancel := context.WithTimeout(ctx, time.Minute)
		defer cancel()
		left <- c.channel.WaitForStateChange(bounded, connectivity.Ready)
	}()
	for isLast := false; !isLast; {
		select {
		case hasLeft := <-left:
			expect(hasLeft, "no GOAWAY in 60 s")
			isLast = true
		default:
		}
		readText(c.open(greedy(200)))
	}
	show(12, "reconnect", "a stream outlived its connection, the next call took another")
}

func main() {
	defer stop()
	c := connect(os.Args[1])
	defer c.channel.Close()
	c.lookAround()
	text := c.unaryAndStream()
	c.cancelAndDeadline()
	c.refusals()
	c.twoStreams(text)
	c.ids()
	c.reconnect()
	fmt.Println("OK")
}
