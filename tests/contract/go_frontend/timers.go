package main

import (
	"context"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	enginev1 "triptych/engine/v1"
)

// acker acknowledges what was processed: section 4.
type acker struct {
	engine *engine
	out    chan *enginev1.ConnectRequest

	mu       sync.Mutex
	messages int
	every    time.Duration
	unacked  int
	bytes    int
	last     uint64
	first    time.Time // when the first unacknowledged message was processed
	timer    *time.Timer
}

func (a *acker) begin(hello *enginev1.HelloAck) {
	if hello.GetFeatureSet().GetResume() || has(hello.Features, "resume") {
		a.messages = int(hello.AckIntervalMessages)
		a.every = time.Duration(hello.AckIntervalMs) * time.Millisecond
	}
}

func (a *acker) processed(m *enginev1.ConnectResponse) {
	if a.messages == 0 {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.last = m.Seq
	a.unacked++
	a.bytes += proto.Size(m)
	if a.unacked == 1 {
		a.first = time.Now()
		a.timer = time.AfterFunc(a.every, a.late)
	}
	if a.unacked >= a.messages || a.bytes >= ackBytes {
		a.ack()
	}
}

func (a *acker) late() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.unacked > 0 && time.Since(a.first) >= a.every {
		a.ack()
	}
}

func (a *acker) ack() {
	a.timer.Stop()
	select {
	case a.out <- &enginev1.ConnectRequest{Message: &enginev1.ConnectRequest_Ack{Ack: &enginev1.Ack{LastSeq: a.last}}}:
	default:
	}
	waited, n := time.Since(a.first), a.unacked
	a.unacked, a.bytes = 0, 0
	go a.engine.acked(n, waited)
}

func (a *acker) stop() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.unacked = 0
	if a.timer != nil {
		a.timer.Stop()
	}
}

// acked notes an acknowledgement for the report.
func (e *engine) acked(n int, waited time.Duration) {
	e.front.mu.Lock()
	defer e.front.mu.Unlock()
	e.facts.acks++
	if n > e.facts.maxUnacked {
		e.facts.maxUnacked = n
	}
	if waited > e.facts.maxAckDelay {
		e.facts.maxAckDelay = waited
	}
}

// watchdog cancels a stream on which nothing comes. It counts time in ticks, so that the time while this process was
// stopped is no silence.
type watchdog struct {
	mu    sync.Mutex
	quiet time.Duration
	max   time.Duration
	bit   bool
	done  chan struct{}
}

func newWatchdog(max time.Duration, cancel context.CancelFunc) *watchdog {
	const tick = 50 * time.Millisecond
	d := &watchdog{max: max, done: make(chan struct{})}
	go func() {
		ticker := time.NewTicker(tick)
		defer ticker.Stop()
		for {
			select {
			case <-d.done:
				return
			case <-ticker.C:
			}
			d.mu.Lock()
			d.quiet += tick
			d.bit = d.quiet > d.max
			bit := d.bit
			d.mu.Unlock()
			if bit {
				cancel()
				return
			}
		}
	}()
	return d
}

func (d *watchdog) alive() {
	d.mu.Lock()
	d.quiet = 0
	d.mu.Unlock()
}

func (d *watchdog) limit(max time.Duration) {
	d.mu.Lock()
	d.quiet, d.max = 0, max
	d.mu.Unlock()
}

// cause is why the stream ended: err, or the watchdog's bite.
func (d *watchdog) cause(err error) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.bit {
		return errSilent
	}
	return err
}

func (d *watchdog) stop() { close(d.done) }

func sleep(ctx context.Context, t time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(t):
	}
}
