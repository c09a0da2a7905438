package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"syscall"
	"time"

	oldproto "github.com/golang/protobuf/proto"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	rpcstatus "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	commonv1 "triptych/common/v1"
	enginev1 "triptych/engine/v1"
)

const (
	revision      = 1
	maxMessage    = 64 << 20
	ackBytes      = 1 << 20
	helloTimeout  = 10 * time.Second
	resumeTimeout = 500 * time.Millisecond
	resumeTime    = time.Second
	resumePause   = 50 * time.Millisecond
	maxMute       = 10 // streams in a row that break before a numbered message
	silence       = 1500 * time.Millisecond
	retry         = 300 * time.Millisecond

	retryIncompatible = 5 * time.Second
)

// ending classifies how a stream ended: the table of section 10.
type ending string

const (
	broken       ending = "broken"
	silent       ending = "silent"
	refused      ending = "refused"
	failed       ending = "failed"
	left         ending = "left"
	dismissed    ending = "dismissed"
	incompatible ending = "incompatible"
	void         ending = "void"
)

// violation is a peer that does not keep to engine-session.md.
type violation string

func (v violation) Error() string { return "violation: " + string(v) }

// never is when an engine that refused a request is asked again.
var never = time.Now().Add(1000 * time.Hour)

var errSilent = errors.New("nothing came in time")
var errIncompatible = errors.New("revisions do not fit")

// engine is the frontend's side of one engine: its session, and the requests in it. Fields are guarded by front.mu.
type engine struct {
	front   *frontend
	addr    string
	session string
	epoch   uint64 // of the engine that has the session; 0: there is none
	lastSeq uint64 // processed
	next    uint32 // the next handle

	hello    *enginev1.HelloAck
	ready    *enginev1.Ready
	draining bool
	out      chan *enginev1.ConnectRequest // nil without an open stream
	cancel   context.CancelFunc
	requests map[uint32]*request
	ended    map[uint32]*request // by handle, of this session: nothing may follow

	facts facts
}

// facts is what scenarios look at.
type facts struct {
	streams, resumed, refusals       int
	acks, maxUnacked, replayed       int
	maxAckDelay                      time.Duration
	alreadyFinished                  []uint32
	rejections                       []string
	endings                          []ending
	lateTokens, violation, drainings int
}

// run keeps a session with the engine until ctx ends.
func (e *engine) run(ctx context.Context) {
	mute, broke := 0, time.Time{}
	for ctx.Err() == nil {
		resuming := !broke.IsZero()
		seqBefore := e.lastSeq
		err := e.stream(ctx, resuming)
		how := classify(err)
		if ctx.Err() != nil {
			return
		}
		e.front.mu.Lock()
		wasOpen := e.out != nil
		e.out = nil
		e.facts.endings = append(e.facts.endings, how)
		e.front.note("%s: stream ended: %s (%v)", e.addr, how, err)
		if e.lastSeq != seqBefore {
			mute = 0
		} else {
			mute++
		}
		resumable := e.epoch != 0 && e.hello.ReplayWindowMs > 0
		if (how == broken || how == silent) && resumable {
			if wasOpen {
				broke = time.Now()
			}
			oneMore := wasOpen || how == broken // an attempt that was silent is not repeated
			if oneMore && time.Since(broke) < resumeTime && mute < maxMute {
				e.front.mu.Unlock()
				if !wasOpen {
					sleep(ctx, resumePause)
				}
				continue
			}
		}
		e.over()
		e.front.mu.Unlock()
		broke, mute = time.Time{}, 0
		if how == incompatible {
			sleep(ctx, retryIncompatible)
		} else {
			sleep(ctx, retry)
		}
	}
}

// over ends the session and moves what it had.
func (e *engine) over() {
	moved := e.requests
	e.reset()
	e.session = randomHex()
	e.ready = nil
	for _, r := range sorted(moved) {
		e.front.move(r)
	}
}

func (e *engine) reset() {
	e.epoch, e.lastSeq, e.draining = 0, 0, false
	e.requests, e.ended = map[uint32]*request{}, map[uint32]*request{}
}

// stream opens one stream and handles its messages until it ends.
func (e *engine) stream(ctx context.Context, resuming bool) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	wait := helloTimeout
	if resuming {
		wait = resumeTimeout
	}
	dialer := net.Dialer{Timeout: wait}
	conn, err := dialer.DialContext(ctx, "tcp", e.addr)
	if err != nil {
		return err
	}
	defer conn.Close()
	once := make(chan net.Conn, 1)
	once <- conn
	channel, err := grpc.DialContext(ctx, e.addr, grpc.WithInsecure(),
		grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) {
			select {
			case c := <-once:
				return c, nil
			default:
				return nil, errors.New("a stream has one connection")
			}
		}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage)))
	if err != nil {
		return err
	}
	defer channel.Close()

	dog := newWatchdog(wait, cancel)
	defer dog.stop()
	stream, err := enginev1.NewEngineCoreServiceClient(channel).Connect(ctx)
	if err != nil {
		return dog.cause(err)
	}
	if err := stream.Send(&enginev1.ConnectRequest{Message: &enginev1.ConnectRequest_Hello{Hello: e.makeHello(resuming)}}); err != nil && err != io.EOF {
		return dog.cause(err)
	}
	out := make(chan *enginev1.ConnectRequest, 1<<14)
	written := make(chan struct{})
	go func() {
		defer close(written)
		for {
			select {
			case m := <-out:
				if stream.Send(m) != nil {
					return // Recv has the status
				}
				if m.GetGoodbye() != nil {
					stream.CloseSend()
					return
				}
			case <-ctx.Done():
				return
			}
		}
	}()
	defer func() { cancel(); <-written }()

	acker := &acker{engine: e, out: out}
	defer acker.stop()
	m, err := stream.Recv()
	if err != nil {
		return dog.cause(err)
	}
	if err := e.opened(m, resuming, out, cancel); err != nil {
		return err
	}
	acker.begin(m.GetHelloAck())
	dog.limit(silence)
	for {
		m, err := stream.Recv()
		if err != nil {
			return dog.cause(err)
		}
		dog.alive()
		if err := e.handle(m); err != nil {
			return err
		}
		acker.processed(m)
	}
}

func (e *engine) makeHello(resuming bool) *enginev1.Hello {
	e.front.mu.Lock()
	defer e.front.mu.Unlock()
	hello := &enginev1.Hello{
		FrontendId: e.front.id, SessionId: e.session, FrontendEpoch: e.front.epoch, SchemaRevision: revision,
		Features: []string{"resume"}, FeatureSet: &enginev1.FeatureSet{Resume: true},
	}
	if resuming {
		hello.Resume = &enginev1.ResumePoint{EngineEpoch: e.epoch, LastSeq: e.lastSeq}
	}
	e.facts.streams++
	return hello
}

// opened handles hello_ack: a new session, or the old one and what has to be sent again.
func (e *engine) opened(m *enginev1.ConnectResponse, resuming bool, out chan *enginev1.ConnectRequest, cancel context.CancelFunc) error {
	ack := m.GetHelloAck()
	if ack == nil || m.Seq != 0 || ack.EngineEpoch == 0 {
		return violation("the first message is no hello_ack")
	}
	if ack.MinPeerRevision > revision || ack.SchemaRevision < revision {
		return errIncompatible
	}
	f := e.front
	f.mu.Lock()
	defer f.mu.Unlock()
	if ack.ResumeOk && (!resuming || ack.EngineEpoch != e.epoch) {
		return violation("resume_ok for a session that was not named")
	}
	e.hello, e.out, e.cancel = ack, out, cancel
	e.draining = ack.State == enginev1.EngineState_ENGINE_STATE_DRAINING
	if ack.ResumeOk {
		e.facts.resumed++
		f.note("%s: resumed after %d", e.addr, e.lastSeq)
		var again []*request
		for _, r := range sorted(e.requests) {
			if !r.first {
				again = append(again, r)
			}
		}
		e.writeAdds(again)
		for _, r := range sorted(e.requests) {
			if r.aborted {
				e.writeAbort(r)
			}
		}
	} else {
		lost := e.requests
		e.reset()
		e.epoch = ack.EngineEpoch
		e.ready = nil // it comes
		if resuming {
			e.facts.refusals++
			f.note("%s: not resumed: %s", e.addr, ack.ResumeRefusal)
		}
		for _, r := range sorted(lost) {
			f.move(r)
		}
	}
	f.flush()
	return nil
}

// handle processes one message whole.
func (e *engine) handle(m *enginev1.ConnectResponse) error {
	f := e.front
	f.mu.Lock()
	defer f.mu.Unlock()
	if m.Seq != e.lastSeq+1 {
		return violation(fmt.Sprintf("seq %d after %d", m.Seq, e.lastSeq))
	}
	switch c := m.Message.(type) {
	case *enginev1.ConnectResponse_Ready:
		// After draining it says that the drain was cancelled; the first one of a session does not.
		e.draining = e.draining && e.ready == nil
		e.ready = c.Ready
		f.flush()
	case *enginev1.ConnectResponse_Step:
		if err := e.step(c.Step); err != nil {
			return err
		}
	case *enginev1.ConnectResponse_AddRejected:
		e.rejected(c.AddRejected)
	case *enginev1.ConnectResponse_AlreadyFinished:
		e.facts.alreadyFinished = append(e.facts.alreadyFinished, c.AlreadyFinished.Handles...)
		for _, h := range c.AlreadyFinished.Handles {
			if r := e.requests[h]; r != nil {
				e.end(r, commonv1.FinishReason_FINISH_REASON_ABORT, nil)
			}
		}
	case *enginev1.ConnectResponse_Draining:
		e.draining = true
		e.facts.drainings++
		f.note("%s: draining, %d ms", e.addr, c.Draining.DeadlineMs)
	case *enginev1.ConnectResponse_Dead:
		f.note("%s: dead: %s", e.addr, c.Dead.Reason)
	case *enginev1.ConnectResponse_Heartbeat:
		if c.Heartbeat.LastSeq != m.Seq-1 {
			return violation(fmt.Sprintf("heartbeat %d says last_seq %d", m.Seq, c.Heartbeat.LastSeq))
		}
		f.flush() // some may wait for retry_after_ms
	case *enginev1.ConnectResponse_HelloAck:
		return violation("a second hello_ack")
	}
	e.lastSeq = m.Seq
	f.changed.Broadcast()
	return nil
}

// step gives the rows of a step to their requests.
func (e *engine) step(s *enginev1.Step) error {
	handles, ok := column(s.Handles)
	tokens, ok2 := column(s.TokenIds)
	counts := make([]int, len(handles))
	wide, ok3 := column(s.NumTokensWide)
	switch {
	case !ok || !ok2 || !ok3 || len(s.NumTokens) > 0 && len(wide) > 0:
		return violation("columns")
	case len(s.NumTokens) == len(handles):
		for i, n := range s.NumTokens {
			counts[i] = int(n)
		}
	case len(wide) == len(handles):
		for i, n := range wide {
			counts[i] = int(n)
		}
	case len(s.NumTokens)+len(wide) != 0:
		return violation("num_tokens")
	}
	rows := make([][]uint32, len(handles))
	seen := map[uint32]bool{}
	for i, n := range counts {
		if n > len(tokens) || seen[handles[i]] {
			return violation("token_ids, or a handle twice")
		}
		rows[i], tokens = tokens[:n], tokens[n:]
		seen[handles[i]] = true
	}
	if len(tokens) > 0 {
		return violation("more token_ids than rows have")
	}
	for _, f := range s.First {
		if int(f.Row) >= len(handles) {
			return violation("first.row")
		}
		if r := e.requests[handles[f.Row]]; r != nil {
			r.first = true
		}
	}
	for i, h := range handles {
		for _, id := range rows[i] {
			if id >= e.ready.VocabSize {
				return violation("a token outside the vocabulary")
			}
		}
		if r := e.requests[h]; r == nil {
			e.facts.lateTokens += len(rows[i]) // ended, or never ours
		} else if !r.aborted {
			r.output = append(r.output, rows[i]...)
		} else {
			r.ignored += len(rows[i])
		}
	}
	for _, f := range s.Finished {
		if int(f.Row) >= len(handles) {
			return violation("finished.row")
		}
		if byToken := f.Reason == stop || f.Reason == length; byToken && len(rows[f.Row]) == 0 {
			return violation("an end by a token that is not there")
		}
		if r := e.requests[handles[f.Row]]; r != nil {
			e.end(r, f.Reason, f)
		} else {
			e.front.note("%s: an end of handle %d, which has none to come", e.addr, handles[f.Row])
			e.facts.violation++
		}
	}
	return nil
}

// end ends a request of this session.
func (e *engine) end(r *request, reason commonv1.FinishReason, finished *enginev1.StepFinished) {
	delete(e.requests, r.handle)
	e.ended[r.handle] = r
	r.finish(reason, finished)
}

// rejected handles add_rejected: the end of the request, or an invitation to another engine.
func (e *engine) rejected(rejected *enginev1.AddRejected) {
	r := e.requests[rejected.Handle]
	if r == nil || r.attempt != rejected.Attempt {
		return
	}
	code := codes.Code(rejected.GetStatus().GetCode())
	reason := reasonOf(rejected.GetStatus().GetDetails())
	e.facts.rejections = append(e.facts.rejections, fmt.Sprintf("%s %s", code, reason))
	e.front.note("%s: handle %d rejected: %s %s: %s", e.addr, r.handle, code, reason, rejected.GetStatus().GetMessage())
	delete(e.requests, r.handle)
	e.ended[r.handle] = r
	text := fmt.Sprintf("%s %s", code, reason)
	if invited := code == codes.Unavailable || code == codes.ResourceExhausted; invited {
		r.avoid[e] = time.Now().Add(time.Duration(rejected.RetryAfterMs) * time.Millisecond)
	} else if r.avoid[e] = never; r.attempt == 0 || e.front.all(func(o *engine) bool { return r.avoid[o] == never }) {
		r.rejected = text
		r.finish(commonv1.FinishReason_FINISH_REASON_ERROR, nil)
		return
	}
	e.front.move(r)
}

// takes is whether r may be sent here now.
func (e *engine) takes(r *request) bool {
	return e.out != nil && e.ready != nil && !e.draining && !r.avoid[e].After(time.Now()) &&
		len(e.requests) < int(e.hello.MaxInflightAdds) &&
		(len(r.output) == 0 || r.ready.Fingerprint.Digest == e.ready.Fingerprint.Digest)
}

// add registers requests, then writes them.
func (e *engine) add(rs []*request) {
	for _, r := range rs {
		r.handle, r.first, r.engine = e.next, false, e
		r.ready = e.ready
		e.requests[r.handle] = r
		e.next++
	}
	e.writeAdds(rs)
}

// writeAdds writes Adds that stay below the largest message.
func (e *engine) writeAdds(rs []*request) {
	add, size := &enginev1.Add{}, 0
	for _, r := range rs {
		entry := r.entry()
		if n := proto.Size(entry) + 16; size > 0 && size+n > int(e.hello.MaxFrameBytes)/2 {
			e.send(&enginev1.ConnectRequest{Message: &enginev1.ConnectRequest_Add{Add: add}})
			add, size = &enginev1.Add{}, 0
		} else {
			size += n
		}
		add.Entries = append(add.Entries, entry)
	}
	if len(add.Entries) > 0 {
		e.send(&enginev1.ConnectRequest{Message: &enginev1.ConnectRequest_Add{Add: add}})
	}
}

func (e *engine) writeAbort(rs ...*request) {
	abort := &enginev1.Abort{Reason: enginev1.AbortReason_ABORT_REASON_CLIENT}
	for _, r := range rs {
		abort.Handles = append(abort.Handles, r.handle)
		abort.Attempts = append(abort.Attempts, r.attempt)
	}
	e.send(&enginev1.ConnectRequest{Message: &enginev1.ConnectRequest_Abort{Abort: abort}})
}

// send writes a message if there is a stream; what was not written is sent again when the session is resumed.
func (e *engine) send(m *enginev1.ConnectRequest) {
	if e.out == nil {
		return
	}
	select {
	case e.out <- m:
	default:
		e.cancel() // the engine has not read for long: a break
	}
}

// classify is the table of section 10.
func classify(err error) ending {
	var v violation
	switch {
	case errors.As(err, &v):
		return void
	case errors.Is(err, errSilent):
		return silent
	case errors.Is(err, errIncompatible):
		return incompatible
	case errors.Is(err, syscall.ECONNREFUSED):
		return refused
	case errors.Is(err, io.EOF):
		return left
	}
	s, _ := status.FromError(err)
	reason := ""
	for _, d := range s.Details() {
		if info, ok := d.(*errdetails.ErrorInfo); ok {
			reason = info.Reason
		}
	}
	switch {
	case s.Code() == codes.Unavailable && reason == "ENGINE_DEAD":
		return failed
	case s.Code() == codes.Unavailable && reason == "ENGINE_DRAINED":
		return left
	case s.Code() == codes.FailedPrecondition:
		return incompatible
	case (s.Code() == codes.ResourceExhausted || s.Code() == codes.Aborted) && reason != "":
		return dismissed
	case reason != "":
		return void
	}
	return broken
}

// reasonOf is the reason in a serialized google.rpc.Status.
func reasonOf(details []byte) string {
	var s rpcstatus.Status
	if oldproto.Unmarshal(details, &s) != nil {
		return ""
	}
	for _, d := range status.FromProto(&s).Details() {
		if info, ok := d.(*errdetails.ErrorInfo); ok {
			return info.Reason
		}
	}
	return ""
}

// column reads a packed u32 column.
func column(data []byte) ([]uint32, bool) {
	ids := make([]uint32, len(data)/4)
	for i := range ids {
		ids[i] = binary.LittleEndian.Uint32(data[4*i:])
	}
	return ids, len(data)%4 == 0
}

// packed writes a u32 column.
func packed(ids []uint32) []byte {
	data := make([]byte, 4*len(ids))
	for i, id := range ids {
		binary.LittleEndian.PutUint32(data[4*i:], id)
	}
	return data
}
