package main

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"os"
	"sort"
	"sync"
	"time"

	commonv1 "triptych/common/v1"
	enginev1 "triptych/engine/v1"
)

// traceID is of the trace of all requests.
var traceID string

// request is one request of the frontend, wherever it runs. Fields are guarded by frontend.mu.
type request struct {
	id      string
	prompt  []uint32
	params  *commonv1.SamplingParams
	seed    uint64
	arrived time.Time

	engine  *engine // where it was sent last
	handle  uint32
	attempt uint32
	ready   *enginev1.Ready       // of that engine
	avoid   map[*engine]time.Time // engines that rejected it, and until when
	first   bool                  // its first record came, in this attempt
	aborted bool

	output   []uint32
	ignored  int // tokens that came after the abort
	moves    int
	done     bool
	reason   commonv1.FinishReason
	finished *enginev1.StepFinished // nil without a finish record
	rejected string
}

// entry is the request as an ADD has it now.
func (r *request) entry() *enginev1.AddEntry {
	return &enginev1.AddEntry{
		Handle: r.handle, RequestId: r.id, Attempt: r.attempt, RequestSeed: r.seed,
		PromptTokenIds: packed(r.prompt), OutputTokenIds: packed(r.output),
		Params: &enginev1.AddEntry_Sampling{Sampling: r.params},
		AgeMs:  uint64(time.Since(r.arrived).Milliseconds()),
		// The span of a request has the first half of its id.
		TraceContext: &enginev1.TraceContext{Traceparent: fmt.Sprintf("00-%s-%s-01", traceID, r.id[:16])},
	}
}

func (r *request) finish(reason commonv1.FinishReason, finished *enginev1.StepFinished) {
	r.done, r.reason, r.finished = true, reason, finished
}

// frontend is one frontend process: it has a session with each engine, and requests.
type frontend struct {
	id    string
	epoch uint64

	mu      sync.Mutex
	changed *sync.Cond
	engines []*engine
	waiting []*request // for an engine that takes them
	stop    context.CancelFunc
	running sync.WaitGroup
}

// newFrontend opens a session with each engine.
func newFrontend(addrs ...string) *frontend {
	ctx, cancel := context.WithCancel(context.Background())
	f := &frontend{id: "go-" + randomHex()[:8], epoch: randomUint64() | 1, stop: cancel}
	f.changed = sync.NewCond(&f.mu)
	for _, addr := range addrs {
		e := &engine{front: f, addr: addr, session: randomHex()}
		e.reset()
		f.engines = append(f.engines, e)
	}
	for _, e := range f.engines {
		f.running.Add(1)
		go func(e *engine) {
			defer f.running.Done()
			e.run(ctx)
		}(e)
	}
	return f
}

// close says goodbye to every engine and is whether they all answered with OK.
func (f *frontend) close() bool {
	f.mu.Lock()
	n := 0
	for _, e := range f.engines {
		if e.out != nil {
			n++
			e.facts.endings = nil
			e.send(&enginev1.ConnectRequest{Message: &enginev1.ConnectRequest_Goodbye{Goodbye: &enginev1.Goodbye{}}})
		}
	}
	f.mu.Unlock()
	ok := f.wait(2*time.Second, func() bool {
		ends := 0
		for _, e := range f.engines {
			if len(e.facts.endings) > 0 && e.facts.endings[0] == left {
				ends++
			}
		}
		return ends >= n
	})
	f.stop()
	f.running.Wait()
	return ok
}

// wait waits until condition holds, under the lock.
func (f *frontend) wait(timeout time.Duration, condition func() bool) bool {
	deadline := time.Now().Add(timeout)
	for time.Now().Before(deadline) {
		f.mu.Lock()
		ok := condition()
		f.mu.Unlock()
		if ok {
			return true
		}
		time.Sleep(time.Millisecond)
	}
	return false
}

// waitReady waits until n engines take requests.
func (f *frontend) waitReady(n int) bool {
	return f.wait(60*time.Second, func() bool {
		ready := 0
		for _, e := range f.engines {
			if e.out != nil && e.ready != nil && !e.draining {
				ready++
			}
		}
		return ready >= n
	})
}

// submit sends requests, those of one engine in one Add.
func (f *frontend) submit(rs ...*request) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.waiting = append(f.waiting, rs...)
	f.flush()
}

// flush sends what waits to the first engine that takes it.
func (f *frontend) flush() {
	for _, e := range f.engines {
		var here, rest []*request
		for _, r := range f.waiting {
			if r.aborted {
				r.finish(commonv1.FinishReason_FINISH_REASON_ABORT, nil)
				continue
			}
			if e.takes(r) {
				here = append(here, r)
			} else {
				rest = append(rest, r)
			}
		}
		f.waiting = rest
		if len(here) > 0 {
			e.add(here)
		}
	}
}

// move sends a request, with its output so far, to any engine that takes it.
func (f *frontend) move(r *request) {
	if r.aborted {
		r.finish(commonv1.FinishReason_FINISH_REASON_ABORT, nil)
	} else {
		r.attempt++
		r.moves++
		f.note("request %s moves with %d tokens, attempt %d", r.id[:6], len(r.output), r.attempt)
		f.waiting = append(f.waiting, r)
		f.flush()
	}
}

// all is whether something holds for all engines.
func (f *frontend) all(holds func(*engine) bool) bool {
	for _, e := range f.engines {
		if !holds(e) {
			return false
		}
	}
	return true
}

// abort ends a request.
func (f *frontend) abort(rs ...*request) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, r := range rs {
		r.aborted = true
		if r.engine != nil {
			r.engine.writeAbort(r)
		}
	}
}

var verbose bool
var began = time.Now()

func (f *frontend) note(format string, args ...interface{}) {
	if verbose {
		fmt.Fprintf(os.Stderr, "%7.3f %s\n", time.Since(began).Seconds(), fmt.Sprintf(format, args...))
	}
}

func sorted(rs map[uint32]*request) []*request {
	var list []*request
	for _, r := range rs {
		list = append(list, r)
	}
	sort.Slice(list, func(i, j int) bool { return list[i].handle < list[j].handle })
	return list
}

func randomHex() string {
	var b [16]byte
	if _, err := rand.Read(b[:]); err != nil {
		panic(err)
	}
	return hex.EncodeToString(b[:])
}

func randomUint64() uint64 {
	var b [8]byte
	if _, err := rand.Read(b[:]); err != nil {
		panic(err)
	}
	return binary.LittleEndian.Uint64(b[:])
}

func has[T comparable](list []T, one T) bool {
	for _, x := range list {
		if x == one {
			return true
		}
	}
	return false
}
