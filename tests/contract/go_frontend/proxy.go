package main

import (
	"net"
	"sync"
)

// proxy is a TCP proxy that can lose bytes and cut connections.
type proxy struct {
	target   string
	listener net.Listener

	mu     sync.Mutex
	links  []*link
	budget int // bytes from the engine until the cut; below 0: no cut
	closed bool
	cuts   int
}

// link is one connection through the proxy.
type link struct {
	client, server net.Conn
	loses          bool // what comes is swallowed, both ways
}

func newProxy(target string) (*proxy, error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	p := &proxy{target: target, listener: listener, budget: -1}
	go func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			server, err := net.Dial("tcp", target)
			p.mu.Lock()
			closed := p.closed
			p.mu.Unlock()
			if err != nil || closed {
				client.Close()
				if err == nil {
					server.Close()
				}
				continue
			}
			l := &link{client: client, server: server}
			p.mu.Lock()
			p.links = append(p.links, l)
			p.mu.Unlock()
			go p.copy(l, client, server, false)
			go p.copy(l, server, client, true)
		}
	}()
	return p, nil
}

func (p *proxy) addr() string { return p.listener.Addr().String() }

func (p *proxy) copy(l *link, from, to net.Conn, down bool) {
	buffer := make([]byte, 16<<10)
	for {
		n, err := from.Read(buffer)
		if err != nil {
			from.Close()
			to.Close()
			return
		}
		p.mu.Lock()
		loses, cut := l.loses, false
		if down && p.budget >= 0 {
			if cut = n >= p.budget; cut {
				n, p.budget = p.budget, -1
			} else {
				p.budget -= n
			}
		}
		p.mu.Unlock()
		if !loses {
			to.Write(buffer[:n])
		}
		if cut {
			p.cut()
		}
	}
}

// cut closes every connection, in both directions.
func (p *proxy) cut() {
	p.mu.Lock()
	links := p.links
	p.links = nil
	p.cuts++
	p.mu.Unlock()
	for _, l := range links {
		l.client.Close()
		l.server.Close()
	}
}

// shut cuts every connection, and new ones as long as it holds.
func (p *proxy) shut(closed bool) {
	p.mu.Lock()
	p.closed = closed
	p.mu.Unlock()
	if closed {
		p.cut()
	}
}

// cutAfter cuts after so many more bytes from the engine, wherever in a frame that is.
func (p *proxy) cutAfter(bytes int) {
	p.mu.Lock()
	p.budget = bytes
	p.mu.Unlock()
}

// lose swallows what comes on the present connections from now on, both ways.
func (p *proxy) lose() {
	p.mu.Lock()
	for _, l := range p.links {
		l.loses = true
	}
	p.mu.Unlock()
}

// count is how often it has cut.
func (p *proxy) count() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.cuts
}

func (p *proxy) close() {
	p.listener.Close()
	p.cut()
}
