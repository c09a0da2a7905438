// The frontend is a minimal frontend of triptych's engines, written from the protos and engine-session.md alone. It
// runs scenarios against engines that it is given, prints PASS or FAIL with facts for each, and exits with 1 where one
// failed.
package main

import (
	"flag"
	"fmt"
	"os"
	"reflect"
	"strconv"
	"strings"
	"syscall"
	"time"

	"google.golang.org/grpc/codes"

	commonv1 "triptych/common/v1"
	enginev1 "triptych/engine/v1"
)

const (
	stop   = commonv1.FinishReason_FINISH_REASON_STOP
	length = commonv1.FinishReason_FINISH_REASON_LENGTH
	abort  = commonv1.FinishReason_FINISH_REASON_ABORT
)

// given are the engines and the schema of the command line.
type given struct {
	addrs  []string
	pids   []int
	schema string
}

// signal signals the process of engine i.
func (g given) signal(c *check, i int, s syscall.Signal) {
	if i >= len(g.pids) {
		c.failf("no -pids for engine %d", i)
		return
	}
	c.that(syscall.Kill(g.pids[i], s) == nil, "kill %d", g.pids[i])
}

// check collects what a scenario finds.
type check struct {
	failures []string
	facts    []string
}

func (c *check) that(ok bool, format string, args ...interface{}) bool {
	if !ok {
		c.failf(format, args...)
	}
	return ok
}

func (c *check) failf(format string, args ...interface{}) {
	c.failures = append(c.failures, fmt.Sprintf(format, args...))
}

func (c *check) fact(format string, args ...interface{}) {
	c.facts = append(c.facts, fmt.Sprintf(format, args...))
}

var scenarios = []struct {
	name    string
	engines int
	run     func(*check, given)
}{
	{"generate", 1, generate}, {"language", 1, language}, {"abort", 1, aborts}, {"resume", 1, resume}, {"lapse", 2, lapse},
	{"drain", 2, drain}, {"deadline", 2, deadline}, {"death", 2, death},
}

func main() {
	engines := flag.String("engines", "", "addresses of engines, host:port with commas")
	pids := flag.String("pids", "", "process ids of the engines, in the same order, for drain and death")
	names := flag.String("scenarios", "generate,abort,resume", "scenarios to run: generate, language, abort, resume, lapse, drain, deadline, death")
	schema := flag.String("schema", "{}", "schema of the outputs of language, whose token ids it prints")
	flag.StringVar(&traceID, "trace", randomHex(), "trace id of all requests, 32 hex digits")
	flag.BoolVar(&verbose, "v", false, "write what happens to stderr")
	flag.Parse()
	g := given{addrs: strings.Split(*engines, ","), schema: *schema}
	for _, text := range strings.Split(*pids, ",") {
		if pid, err := strconv.Atoi(text); err == nil {
			g.pids = append(g.pids, pid)
		}
	}
	failed := false
	for _, name := range strings.Split(*names, ",") {
		c, start := &check{}, time.Now()
		known := false
		for _, s := range scenarios {
			if s.name == name {
				known = true
				if c.that(len(g.addrs) >= s.engines, "needs %d engines", s.engines) {
					s.run(c, g)
				}
			}
		}
		c.that(known, "no such scenario")
		verdict := "PASS"
		if len(c.failures) > 0 {
			verdict, failed = "FAIL", true
		}
		fmt.Printf("%s %s %.1fs: %s\n", verdict, name, time.Since(start).Seconds(), strings.Join(c.facts, "; "))
		for _, text := range c.failures {
			fmt.Printf("  FAIL %s: %s\n", name, text)
		}
	}
	if failed {
		os.Exit(1)
	}
}

// ask is a request for n tokens.
func ask(prompt []uint32, n int64, change ...func(*request)) *request {
	zero := float32(0)
	r := &request{id: randomHex(), prompt: prompt, seed: randomUint64(), arrived: time.Now(), avoid: map[*engine]time.Time{},
		params: &commonv1.SamplingParams{Temperature: &zero, MaxTokens: &n, IgnoreEos: true}}
	for _, f := range change {
		f(r)
	}
	return r
}

func sampled(temperature float32, seed uint64) func(*request) {
	return func(r *request) { r.params.Temperature, r.seed = &temperature, seed }
}

func prompt(i int) []uint32 {
	return []uint32{1, 15, 200, 37, uint32(40 + i), 99, uint32(7 * (i + 1)), 150}
}

// allDone waits for the ends of requests.
func allDone(f *frontend, rs ...*request) bool {
	return f.wait(150*time.Second, func() bool {
		for _, r := range rs {
			if !r.done {
				return false
			}
		}
		return true
	})
}

// produced waits until a request has n tokens, or its end.
func produced(f *frontend, r *request, n int) bool {
	return f.wait(60*time.Second, func() bool { return r.done || len(r.output) >= n }) && !r.done
}

// references are uncut greedy runs of the same prompts.
func references(c *check, addr string, rs []*request) [][]uint32 {
	f := newFrontend(addr)
	defer f.close()
	c.that(f.waitReady(1), "not ready")
	var plain []*request
	for _, r := range rs {
		plain = append(plain, ask(r.prompt, *r.params.MaxTokens))
	}
	f.submit(plain...)
	c.that(allDone(f, plain...), "no end of a reference")
	var outputs [][]uint32
	for _, r := range plain {
		c.that(r.reason == length && len(r.output) == int(*r.params.MaxTokens), "a reference ended with %s", r.reason)
		outputs = append(outputs, r.output)
	}
	return outputs
}

// same compares requests with their references.
func same(c *check, rs []*request, expected [][]uint32) {
	for i, r := range rs {
		c.that(r.reason == length && reflect.DeepEqual(r.output, expected[i]),
			"request %d: %s, %d tokens of %d, equal up to %d", i, r.reason, len(r.output), len(expected[i]), common(r.output, expected[i]))
	}
}

func common(a, b []uint32) int {
	for i := range a {
		if i >= len(b) || a[i] != b[i] {
			return i
		}
	}
	return len(a)
}

// wellBehaved checks what holds for every session.
func wellBehaved(c *check, f *frontend) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, e := range f.engines {
		c.that(e.facts.lateTokens == 0, "%s: %d tokens after an end", e.addr, e.facts.lateTokens)
		c.that(e.facts.violation == 0, "%s: a second end", e.addr)
		for _, how := range e.facts.endings {
			c.that(how != void && how != incompatible && how != dismissed, "%s: a stream ended %s", e.addr, how)
		}
		if h := e.hello; h != nil && e.facts.acks > 0 {
			c.that(e.facts.maxUnacked <= int(h.AckIntervalMessages), "%d messages without ack", e.facts.maxUnacked)
			c.that(e.facts.maxAckDelay < 5*time.Second, "an ack after %s", e.facts.maxAckDelay) // far off 50 ms, as machines are busy
		}
	}
}

func generate(c *check, g given) {
	f := newFrontend(g.addrs[0])
	if !c.that(f.waitReady(1), "not ready") {
		return
	}
	e := f.engines[0]
	f.mu.Lock()
	c.fact("model %s, vocabulary %d, features %v, window %d ms", e.ready.ModelName, e.ready.VocabSize, e.hello.Features, e.hello.ReplayWindowMs)
	f.mu.Unlock()

	greedy, again := ask(prompt(0), 40), ask(prompt(0), 40)
	f.submit(greedy)
	c.that(allDone(f, greedy), "no end")
	// The token that occurs first at the largest position ends the next request there.
	at, seen := 0, map[uint32]bool{}
	for i, id := range greedy.output {
		if !seen[id] {
			at = i
		}
		seen[id] = true
	}
	token := greedy.output[at]
	stopped := ask(prompt(0), 40, func(r *request) { r.params.StopTokenIds = []uint32{token} })
	one := ask(prompt(1), 1)
	seeded, twin, other := ask(prompt(2), 60, sampled(0.9, 7)), ask(prompt(2), 60, sampled(0.9, 7)), ask(prompt(2), 60, sampled(0.9, 8))
	text := ask(prompt(0), 40, func(r *request) { // what is the frontend's own has no effect on an engine
		no, five, seed := false, int64(5), uint64(9)
		r.params.Detokenize, r.params.SkipSpecialTokens, r.params.SpacesBetweenSpecialTokens = &no, &no, &no
		r.params.IncludeStopInOutput, r.params.StreamInterval, r.params.Seed = true, &five, &seed
		r.params.OutputKind = commonv1.OutputKind_OUTPUT_KIND_FINAL_ONLY
	})
	reseeded := ask(prompt(2), 60, sampled(0.9, 7), func(r *request) { other := uint64(8); r.params.Seed = &other })
	bad := ask([]uint32{1, e.ready.VocabSize}, 5)
	worse := ask(prompt(3), 0)
	rs := []*request{again, stopped, one, seeded, bad, worse, twin, other, text, reseeded}
	f.submit(rs...)
	c.that(allDone(f, rs...), "no end")

	f.mu.Lock()
	c.that(greedy.reason == length && len(greedy.output) == 40, "greedy: %s, %d", greedy.reason, len(greedy.output))
	c.that(reflect.DeepEqual(again.output, greedy.output), "greedy differs")
	c.that(reflect.DeepEqual(text.output, greedy.output), "parameters about text have an effect: %s", text.rejected)
	c.that(reflect.DeepEqual(reseeded.output, seeded.output), "sampling.seed has an effect")
	c.that(stopped.reason == stop && stopped.finished.GetStopTokenId() == token && reflect.DeepEqual(stopped.output, greedy.output[:at+1]),
		"stop token: %s %v, %d tokens of %d", stopped.reason, stopped.finished, len(stopped.output), at+1)
	c.that(one.reason == length && len(one.output) == 1, "max_tokens 1: %s, %d", one.reason, len(one.output))
	c.that(reflect.DeepEqual(seeded.output, twin.output) && len(seeded.output) == 60, "one seed, two outputs")
	c.that(!reflect.DeepEqual(seeded.output, other.output), "two seeds, one output")
	c.that(strings.HasPrefix(bad.rejected, "InvalidArgument"), "a token outside the vocabulary: %q", bad.rejected)
	c.that(strings.HasPrefix(worse.rejected, "InvalidArgument"), "max_tokens 0: %q", worse.rejected)
	c.fact("stop token %d at %d; rejected: %v", token, at, e.facts.rejections)
	c.that(e.facts.acks > 0, "no acks")
	f.mu.Unlock()
	// Two seconds without requests: heartbeats are acknowledged too.
	f.wait(2*time.Second, func() bool { return false })
	wellBehaved(c, f)
	f.mu.Lock()
	c.fact("%d messages, %d acks, at most %d messages and %s late", e.lastSeq, e.facts.acks, e.facts.maxUnacked, e.facts.maxAckDelay.Round(time.Millisecond))
	f.mu.Unlock()
	c.that(f.close(), "goodbye was not answered with OK: %v", e.facts.endings)
}

// language sends a schema as a client wrote it, which the engine rewrites, and one that no engine enforces.
func language(c *check, g given) {
	f := newFrontend(g.addrs[0])
	if !c.that(f.waitReady(1), "not ready") {
		return
	}
	held := func(schema string) func(*request) {
		return func(r *request) {
			r.params.IgnoreEos = false
			r.params.StructuredOutput = &commonv1.StructuredOutput{
				Constraint: &commonv1.StructuredOutput_JsonSchema{JsonSchema: schema}, DisableAnyWhitespace: true,
			}
		}
	}
	var rs []*request
	for i := 0; i < 4; i++ {
		rs = append(rs, ask(prompt(i), 200, sampled(1, uint64(i)), held(g.schema)))
	}
	unknown := ask(prompt(4), 5, held(`{"minProperties": 3}`))
	f.submit(append(rs, unknown)...)
	c.that(allDone(f, append(rs, unknown)...), "no end")
	f.mu.Lock()
	for _, r := range rs {
		c.that(r.reason == stop || r.reason == length, "held to the schema: %s: %s", r.reason, r.finished.GetMessage())
		if r.reason == stop {
			c.fact("%v", r.output)
		}
	}
	end := unknown.finished
	c.that(codes.Code(end.GetCode()) == codes.InvalidArgument && reasonOf(end.GetDetails()) == "CONSTRAINT_NOT_ENFORCED" &&
		strings.Contains(end.GetMessage(), "no backend enforces minProperties at #"), "a keyword that none enforces: %v", end)
	c.that(len(unknown.output) == 0, "a refused request has output")
	f.mu.Unlock()
	wellBehaved(c, f)
	c.that(f.close(), "goodbye was not answered with OK")
}

func aborts(c *check, g given) {
	f := newFrontend(g.addrs[0])
	if !c.that(f.waitReady(1), "not ready") {
		return
	}
	rs := []*request{ask(prompt(0), 300), ask(prompt(1), 300), ask(prompt(2), 1500), ask(prompt(3), 1500)}
	expected := references(c, g.addrs[0], rs[:2])
	e := f.engines[0]
	f.submit(rs...)
	if !c.that(produced(f, rs[2], 5), "no tokens: %s", rs[2].reason) {
		return
	}
	f.abort(rs[2])
	f.abort(rs[2]) // the second one is no error
	c.that(allDone(f, rs[2]), "an abort has no end")
	f.mu.Lock()
	c.that(rs[2].reason == abort && len(rs[2].output) < 1500, "aborted: %s, %d", rs[2].reason, len(rs[2].output))
	c.fact("aborted after %d tokens, %d ignored", len(rs[2].output), rs[2].ignored)
	rs[3].attempt = 5
	f.mu.Unlock()
	f.abort(rs[3]) // as another attempt: not meant for this one
	time.Sleep(100 * time.Millisecond)
	f.mu.Lock()
	c.that(!rs[3].done, "an abort of another attempt ended it")
	rs[3].attempt = 0
	f.mu.Unlock()
	f.abort(rs[3])
	early := ask(prompt(4), 1500)
	f.submit(early)
	f.abort(early)
	c.that(allDone(f, append(rs, early)...), "an abort has no end")
	c.that(early.reason == abort, "aborted at once: %s", early.reason)
	same(c, rs[:2], expected)
	// A handle that ended is answered, one that was never there is not, and the stream goes on.
	f.mu.Lock()
	e.facts.alreadyFinished = nil
	ghost := &request{handle: 4242, engine: e}
	f.mu.Unlock()
	f.abort(ghost)
	f.abort(rs[0])
	c.that(f.wait(2*time.Second, func() bool { return len(e.facts.alreadyFinished) > 0 }), "no already_finished")
	time.Sleep(300 * time.Millisecond)
	f.mu.Lock()
	c.that(reflect.DeepEqual(e.facts.alreadyFinished, []uint32{rs[0].handle}), "already_finished %v", e.facts.alreadyFinished)
	c.fact("already_finished %v", e.facts.alreadyFinished)
	f.mu.Unlock()
	after := ask(prompt(5), 5)
	f.submit(after)
	c.that(allDone(f, after) && after.reason == length, "after the aborts: %s", after.reason)
	wellBehaved(c, f)
	c.that(f.close(), "goodbye was not answered with OK")
}

func resume(c *check, g given) {
	p, err := newProxy(g.addrs[0])
	if !c.that(err == nil, "%v", err) {
		return
	}
	defer p.close()
	var rs []*request
	for i := 0; i < 7; i++ { // four long ones, which outlast the cuts, and three that are sent into them
		rs = append(rs, ask(prompt(i), []int64{1900, 60}[i/4]))
	}
	long, lost, gone, quiet := rs[:4], rs[4], rs[5], rs[6]
	expected := references(c, g.addrs[0], rs)
	f := newFrontend(p.addr())
	if !c.that(f.waitReady(1), "not ready") {
		return
	}
	e := f.engines[0]
	back := func(n int) bool {
		return c.that(f.wait(5*time.Second, func() bool { return e.facts.resumed >= n && e.out != nil }), "resumption %d did not come", n)
	}
	f.submit(long...)
	c.that(produced(f, long[0], 5), "no tokens")
	p.cut() // 1: between any two reads
	back(1)
	c.that(produced(f, long[0], 50), "no tokens after the first cut")
	p.lose() // 2: what both sides send is lost: steps and acks, and an ADD
	f.submit(lost)
	time.Sleep(200 * time.Millisecond)
	p.cut()
	f.submit(gone) // written to a stream that is gone
	back(2)
	c.that(allDone(f, lost, gone), "an ADD was lost")
	for i, bytes := range []int{1, 7, 60, 333, 2000} { // 3 to 7: inside a frame
		p.cutAfter(bytes)
		if !back(3 + i) {
			return
		}
	}
	p.cutAfter(20) // 8: and the stream that resumes is cut as well, three times: in the settings or in hello_ack
	f.wait(time.Second, func() bool { return p.count() >= 8 })
	for _, bytes := range []int{10, 40, 90} {
		p.cutAfter(bytes)
		n := p.count()
		f.wait(time.Second, func() bool { return p.count() > n })
	}
	back(8)
	p.lose() // 9: nothing is closed: silence. An ADD and an abort are lost in it.
	doomed := ask(prompt(7), 1900)
	f.submit(quiet, doomed)
	f.abort(doomed)
	start := time.Now()
	back(9)
	c.fact("silence found after %s", time.Since(start).Round(10*time.Millisecond))
	c.that(allDone(f, append(rs, doomed)...), "no end")
	same(c, rs, expected)
	f.mu.Lock()
	c.that(doomed.reason == abort && doomed.finished != nil, "an abort that was lost: %s", doomed.reason)
	c.that(e.facts.refusals == 0, "%d resumptions refused", e.facts.refusals)
	tokens := 0
	for _, r := range rs {
		c.that(r.moves == 0, "a request moved")
		tokens += len(r.output)
	}
	c.fact("%d cuts, %d streams, %d resumed, %d tokens whole", p.count(), e.facts.streams, e.facts.resumed, tokens)
	f.mu.Unlock()
	wellBehaved(c, f)
	c.that(f.close(), "goodbye was not answered with OK")
}

// lapse is a break that lasts: requests move to the other engine, and the first one forgets the session.
func lapse(c *check, g given) {
	p, err := newProxy(g.addrs[0])
	if !c.that(err == nil, "%v", err) {
		return
	}
	defer p.close()
	f, rs, expected := two(c, given{addrs: []string{p.addr(), g.addrs[1]}}, 4, 1500)
	if f == nil {
		return
	}
	first := f.engines[0]
	p.shut(true)
	start := time.Now()
	c.that(f.wait(3*time.Second, func() bool { return rs[0].moves > 0 }), "no move")
	c.fact("moved after %s", time.Since(start).Round(10*time.Millisecond))
	p.shut(false)
	c.that(f.wait(3*time.Second, func() bool { return first.ready != nil && first.out != nil }), "the engine does not come back")
	c.that(allDone(f, rs...), "no end")
	same(c, rs, expected)
	for _, r := range rs {
		c.that(r.moves == 1 && r.engine == f.engines[1], "%d moves", r.moves)
	}
	// The window of 5 s is over, and the session unknown; the requests go on where they were, in a new session.
	more := []*request{ask(prompt(0), 1500)}
	f.mu.Lock()
	f.engines[1].draining = true // not there
	f.mu.Unlock()
	f.submit(more...)
	c.that(produced(f, more[0], 5), "no tokens")
	f.mu.Lock()
	first.session = randomHex() // the resumption names a session that is not known
	f.mu.Unlock()
	p.cut()
	c.that(allDone(f, more...), "no end")
	same(c, more, expected)
	f.mu.Lock()
	c.that(first.facts.refusals == 1 && more[0].moves == 1 && more[0].engine == first, "%d refusals, %d moves", first.facts.refusals, more[0].moves)
	f.mu.Unlock()
	wellBehaved(c, f)
	c.that(f.close(), "goodbye was not answered with OK")
}

// two starts n long requests on the first of two engines.
func two(c *check, g given, n int, tokens int64) (*frontend, []*request, [][]uint32) {
	var rs []*request
	for i := 0; i < n; i++ {
		rs = append(rs, ask(prompt(i%4), tokens))
	}
	expected := references(c, g.addrs[1], rs[:4])
	for i := 4; i < n; i++ {
		expected = append(expected, expected[i%4])
	}
	f := newFrontend(g.addrs[:2]...)
	if !c.that(f.waitReady(2), "not ready") {
		return nil, nil, nil
	}
	f.mu.Lock()
	c.that(f.engines[0].ready.Fingerprint.Digest == f.engines[1].ready.Fingerprint.Digest, "two fingerprints")
	f.mu.Unlock()
	f.submit(rs...)
	if !c.that(produced(f, rs[n-1], 10), "no tokens") {
		return nil, nil, nil
	}
	return f, rs, expected
}

// drain ends with the last request of the engine: none moves.
func drain(c *check, g given) {
	leave(c, g, 4, 1500, func(moves int) bool { return moves == 0 })
}

// deadline is a drain with more tokens than can be made in its time: the rest moves with its output.
func deadline(c *check, g given) {
	leave(c, g, 16, 1900, func(moves int) bool { return moves > 0 })
}

func leave(c *check, g given, n int, tokens int64, fits func(int) bool) {
	f, rs, expected := two(c, g, n, tokens)
	if f == nil {
		return
	}
	first := f.engines[0]
	g.signal(c, 0, syscall.SIGTERM)
	late := ask(prompt(0), 20)
	f.submit(late) // may cross the draining message: then it is rejected, and moves
	c.that(f.wait(5*time.Second, func() bool { return first.draining }), "no draining")
	start := time.Now()
	f.mu.Lock()
	alive := first.out != nil
	f.mu.Unlock()
	next := ask(prompt(1), 20)
	f.submit(next)
	guest := newFrontend(g.addrs[0]) // a session that begins in the drain
	there := guest.engines[0]
	c.that(guest.wait(5*time.Second, func() bool {
		return there.hello.GetState() == enginev1.EngineState_ENGINE_STATE_DRAINING && there.ready != nil && there.facts.drainings > 0
	}), "no ready and draining in a session that begins in a drain")
	c.that(guest.close(), "goodbye was not answered with OK")
	c.that(allDone(f, append(rs, late, next)...), "no end")
	same(c, append(rs, late, next), append(expected, expected[0][:20], expected[1][:20]))
	c.that(f.wait(30*time.Second, func() bool { return len(first.facts.endings) > 0 }), "the stream of the drained engine does not end")
	f.mu.Lock()
	c.that(next.engine == f.engines[1], "a new request went to the draining engine")
	c.that(alive && first.facts.endings[0] == left, "the first end of the drained engine is %v", first.facts.endings)
	moves := 0
	for _, r := range rs {
		moves += r.moves
		c.that(r.moves <= 1, "%d moves", r.moves)
	}
	c.that(fits(moves), "%d moves", moves)
	c.fact("%d of %d running requests moved, late one %d times; ends %v; rejections %v; done after %s",
		moves, len(rs), late.moves, first.facts.endings[0], first.facts.rejections, time.Since(start).Round(100*time.Millisecond))
	f.mu.Unlock()
	wellBehaved(c, f)
	f.close()
}

func death(c *check, g given) {
	f, rs, expected := two(c, g, 4, 1000)
	if f == nil {
		return
	}
	f.mu.Lock()
	var had []int
	for _, r := range rs {
		had = append(had, len(r.output))
	}
	f.mu.Unlock()
	start := time.Now()
	g.signal(c, 0, syscall.SIGKILL)
	c.that(f.wait(5*time.Second, func() bool { return rs[0].moves > 0 }), "no move")
	c.fact("moved after %s with %v tokens", time.Since(start).Round(time.Millisecond), had)
	c.that(allDone(f, rs...), "no end")
	same(c, rs, expected)
	f.mu.Lock()
	for _, r := range rs {
		c.that(r.attempt == 1 && r.engine == f.engines[1], "attempt %d", r.attempt)
	}
	c.fact("ends %v", f.engines[0].facts.endings)
	f.mu.Unlock()
	wellBehaved(c, f)
	f.close()
}
